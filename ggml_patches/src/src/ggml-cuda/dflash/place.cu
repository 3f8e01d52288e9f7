// Where the rows of a run stand: token, position and physical rows of each, from the slots' memory. A row is one
// thread's.

#include "kernels.cuh"

#include <algorithm>

namespace dflash {
namespace {

constexpr int THREADS = 256;

struct Node {
    const int32_t *slots, *n_rows, *base, *history, *table, *ring; // ring may be NULL
    int32_t * out;
    int T, L, n_slots, n_history, n_pages, n_ring_pages;
    int n_positions; // for which there is history, and a page in each table
    int fill, spare, ring_spare;
};

__device__ __forceinline__ int page_row(const int32_t * pages, int n_pages, int slot, int position) {
    return pages[(int64_t) slot * n_pages + position / GGML_DFLASH_PAGE_ROWS] * GGML_DFLASH_PAGE_ROWS +
           position % GGML_DFLASH_PAGE_ROWS;
}

__global__ void __launch_bounds__(THREADS) place_rows(const Node node) {
    ggml_cuda_pdl_sync();
    const int lane = blockIdx.y, t = blockIdx.x * THREADS + threadIdx.x, T = node.T;
    if (t >= T) {
        return;
    }
    const int n_rows = node.n_rows[lane], slot = owned_slot_of(node.slots, lane, node.n_slots);
    const bool is_live = slot >= 0 && n_rows >= 0 && n_rows <= T && node.base[slot] >= 0;
    const int base = is_live ? node.base[slot] : -1;
    const int64_t position = (int64_t) base + t;
    const bool is_row = is_live && t < n_rows && position < node.n_positions;

    const int n = T * node.L, at = lane * T + t, p = is_row ? (int) position : 0;
    int token = 0;
    if (is_row) {
        const int known = t == 0 || node.fill < 0 ? node.history[(int64_t) slot * node.n_history + p] : node.fill;
        token = known > 0 ? known : 0;
    }
    const int spare_row = t % GGML_DFLASH_PAGE_ROWS;
    node.out[at] = token;
    node.out[n + at] = p;
    node.out[2 * n + at] = is_row ? page_row(node.table, node.n_pages, slot, p) : node.spare + spare_row;
    if (node.ring) {
        node.out[3 * n + at] = is_row ? page_row(node.ring, node.n_ring_pages, slot, p) : node.ring_spare + spare_row;
    }
    if (t == 0) {
        node.out[(node.ring ? 4 : 3) * n + lane] = base;
    }
}

} // namespace

void place(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor *history = dst->src[3], *table = dst->src[4], *ring = dst->src[5];
    const auto ints = [&](int i) { return dst->src[i] ? (const int32_t *) dst->src[i]->data : nullptr; };
    const int T = dst->op_params[1], L = (int) dst->src[0]->ne[0];
    const int64_t n_pages = ring ? std::min(table->ne[0], ring->ne[0]) : table->ne[0];
    const Node node = {ints(0),
                       ints(1),
                       ints(2),
                       ints(3),
                       ints(4),
                       ints(5),
                       (int32_t *) dst->data,
                       T,
                       L,
                       (int) history->ne[1],
                       (int) history->ne[0],
                       (int) table->ne[0],
                       ring ? (int) ring->ne[0] : 0,
                       (int) std::min(history->ne[0], n_pages * GGML_DFLASH_PAGE_ROWS),
                       dst->op_params[2],
                       dst->op_params[3],
                       dst->op_params[4]};
    const dim3 blocks((T + THREADS - 1) / THREADS, L);
    ggml_cuda_kernel_launch(place_rows, ggml_cuda_kernel_launch_params(blocks, dim3(THREADS), 0, ctx.stream()), node);
}

} // namespace dflash
