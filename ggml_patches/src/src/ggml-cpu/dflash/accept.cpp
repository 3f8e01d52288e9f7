// What of a verified block counts: the rows up to the first whose token is not what the draft proposed.

#include "dflash/kernels.h"

namespace dflash {
namespace {

// Leading rows whose token is final.
int64_t count_final(const int32_t * tokens, const int32_t * proposals, int64_t n_rows) {
    int64_t n = 0;
    while (n < n_rows && tokens[n] != -1) {
        n++;
        if (n == n_rows || tokens[n - 1] != proposals[n - 1]) {
            break;
        }
    }
    return n;
}

} // namespace

void accept(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor *tokens = dst->src[0], *proposals = dst->src[5];
    const auto ints = [&](int i) { return (int32_t *) dst->src[i]->data; };
    const int32_t *n_rows = ints(1), *slots = ints(2);
    int32_t *n_pending = ints(3), *anchors = ints(4);
    const int64_t T = tokens->ne[0], n_slots = dst->src[3]->ne[0];

    const Share share(tokens->ne[1], params);
    for (int64_t lane = share.begin; lane < share.end; lane++) {
        const int32_t * drawn = at<int32_t>(tokens, lane);
        const int64_t slot = owned_slot_of(slots, lane, n_slots);
        const bool live = slot >= 0 && n_rows[lane] >= 0 && n_rows[lane] <= T;
        const int64_t n =
            live ? count_final(drawn, proposals ? at<int32_t>(proposals, lane) : nullptr, n_rows[lane]) : 0;

        int32_t * out = at<int32_t>(dst, lane);
        out[0] = (int32_t) n;
        for (int64_t t = 0; t < T; t++) {
            out[1 + t] = t < n ? drawn[t] : -1;
        }
        if (live) {
            n_pending[slot] = (int32_t) n;
        }
        if (n > 0) {
            anchors[slot] = drawn[n - 1];
        }
    }
}

} // namespace dflash
