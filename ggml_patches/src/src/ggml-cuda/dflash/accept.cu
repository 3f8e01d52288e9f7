// What of a verified block counts: the rows up to the first whose token is not what the draft proposed. A lane is one
// thread's; there are too few numbers for more.

#include "kernels.cuh"

namespace dflash {
namespace {

struct Node {
    const int32_t *tokens, *n_rows, *slots, *proposals; // proposals NULL if T is 1
    int32_t *n_pending, *anchors, *out;
    int T, L, n_slots;
};

// Leading rows whose token is final.
__device__ int count_final(const int32_t * tokens, const int32_t * proposals, int n_rows) {
    int n = 0;
    while (n < n_rows && tokens[n] != -1) {
        n++;
        if (n == n_rows || tokens[n - 1] != proposals[n - 1]) {
            break;
        }
    }
    return n;
}

__global__ void __launch_bounds__(GGML_DFLASH_MAX_LANES) accept_lanes(const Node node) {
    ggml_cuda_pdl_sync();
    const int lane = threadIdx.x, T = node.T;
    if (lane >= node.L) {
        return;
    }
    const int32_t * tokens = node.tokens + lane * T;
    const int32_t * proposals = node.proposals + lane * (T - 1);
    const int n_rows = node.n_rows[lane], slot = owned_slot_of(node.slots, lane, node.n_slots);
    const bool is_live = slot >= 0 && n_rows >= 0 && n_rows <= T;
    const int n = is_live ? count_final(tokens, proposals, n_rows) : 0;

    int32_t * out = node.out + lane * (T + 1);
    out[0] = n;
    for (int t = 0; t < T; t++) {
        out[1 + t] = t < n ? tokens[t] : -1;
    }
    if (is_live) {
        node.n_pending[slot] = n;
    }
    if (n > 0) {
        node.anchors[slot] = tokens[n - 1];
    }
}

} // namespace

void accept(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const auto ints = [&](int i) { return dst->src[i] ? (int32_t *) dst->src[i]->data : nullptr; };
    const Node node = {ints(0),
                       ints(1),
                       ints(2),
                       ints(5),
                       ints(3),
                       ints(4),
                       (int32_t *) dst->data,
                       (int) dst->src[0]->ne[0],
                       (int) dst->src[0]->ne[1],
                       (int) dst->src[3]->ne[0]};
    ggml_cuda_kernel_launch(
        accept_lanes, ggml_cuda_kernel_launch_params(dim3(1), dim3(GGML_DFLASH_MAX_LANES), 0, ctx.stream()), node);
}

} // namespace dflash
