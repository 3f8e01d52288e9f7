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
    const ggml_tensor *tokens = dst->src[0], *block = dst->src[1], *history = dst->src[6];
    const auto ints = [&](int i) { return (int32_t *) dst->src[i]->data; };
    const int32_t *n_rows = ints(2), *slots = ints(3);
    int32_t *n_pending = ints(4), *base = ints(5);
    const int64_t T = tokens->ne[0], C = history->ne[0], n_slots = history->ne[1];

    const Share share(tokens->ne[1], params);
    for (int64_t lane = share.begin; lane < share.end; lane++) {
        const int32_t * drawn = at<int32_t>(tokens, lane);
        const int64_t slot = owned_slot_of(slots, lane, n_slots);
        const bool live = slot >= 0 && n_rows[lane] >= 0 && n_rows[lane] <= T && base[slot] >= 0;
        const int64_t n = live ? count_final(drawn, at<int32_t>(block, lane) + 1, n_rows[lane]) : 0;

        int32_t * out = at<int32_t>(dst, lane);
        out[0] = (int32_t) n;
        for (int64_t t = 0; t < T; t++) {
            out[1 + t] = t < n ? drawn[t] : -1;
        }
        if (!live) {
            continue;
        }
        const int64_t first = (int64_t) base[slot] + 1;
        for (int64_t i = 0; i < n && first + i < C; i++) {
            at<int32_t>(history, slot)[first + i] = drawn[i];
        }
        n_pending[slot] = (int32_t) n;
        base[slot] = (int32_t) (base[slot] + n);
    }
}

} // namespace dflash
