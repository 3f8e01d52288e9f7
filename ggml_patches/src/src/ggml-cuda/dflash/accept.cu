// What of a verified block counts: the rows up to the first whose token is not what the draft proposed. The slot's
// history grows by their tokens. A lane is one thread's; there are too few numbers for more.

#include "kernels.cuh"

namespace dflash {
namespace {

struct Node {
    const int32_t *tokens, *block, *n_rows, *slots;
    int32_t *n_pending, *base, *history, *out;
    int T, L, n_slots, n_history;
};

// Leading rows whose token is final; what was proposed for row t of tokens is row t + 1 of the block.
__device__ int count_final(const int32_t * tokens, const int32_t * block, int n_rows) {
    int n = 0;
    while (n < n_rows && tokens[n] != -1) {
        n++;
        if (n == n_rows || tokens[n - 1] != block[n]) {
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
    const int n_rows = node.n_rows[lane], slot = owned_slot_of(node.slots, lane, node.n_slots);
    const int base = slot >= 0 ? node.base[slot] : -1;
    const bool is_live = base >= 0 && n_rows >= 0 && n_rows <= T;
    const int n = is_live ? count_final(tokens, node.block + lane * T, n_rows) : 0;

    int32_t * out = node.out + lane * (T + 1);
    out[0] = n;
    for (int t = 0; t < T; t++) {
        out[1 + t] = t < n ? tokens[t] : -1;
    }
    if (is_live) {
        int32_t * history = node.history + (int64_t) slot * node.n_history;
        for (int t = 0; t < n && t < node.n_history - 1 - base; t++) {
            history[base + 1 + t] = tokens[t];
        }
        node.n_pending[slot] = n;
        node.base[slot] = base + n;
    }
}

} // namespace

void accept(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const auto ints = [&](int i) { return (int32_t *) dst->src[i]->data; };
    const ggml_tensor *tokens = dst->src[0], *history = dst->src[6];
    const Node node = {ints(0),
                       ints(1),
                       ints(2),
                       ints(3),
                       ints(4),
                       ints(5),
                       ints(6),
                       (int32_t *) dst->data,
                       (int) tokens->ne[0],
                       (int) tokens->ne[1],
                       (int) history->ne[1],
                       (int) history->ne[0]};
    ggml_cuda_kernel_launch(
        accept_lanes, ggml_cuda_kernel_launch_params(dim3(1), dim3(GGML_DFLASH_MAX_LANES), 0, ctx.stream()), node);
}

} // namespace dflash
