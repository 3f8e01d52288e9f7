#pragma once

// Gated delta rule: what is asked of L2 ahead of time. By far the most that a block reads is its state, and that stands
// in the way of nothing: it can come while the kernel before still runs.

#include "gdn_tile.cuh"

namespace dflash {

constexpr int L2_LINE = 32; // floats

// Asks L2 for a line. A hint: nothing waits for it, nothing depends on it.
__device__ __forceinline__ void prefetch_l2(const float * p) {
#if defined(GGML_CUDA_USE_PDL) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
    (void) p;
#endif
}

// L1 would keep a value that the kernel before is about to change.
__device__ __forceinline__ int read_past_l1(const int32_t * p) {
#if defined(GGML_USE_HIP)
    return *p;
#else
    return __ldcg(p);
#endif
}

// Asks L2 for the state of a block's columns. -> slot of the lane, or -1. Works on a slot that is out of date, too; it
// is read past L1, which would keep that.
template <int S> __device__ __forceinline__ int prefetch_state(const GdnNode & node, int lane, int head, int column) {
    using Tile = GdnTile<S>;
    const int slot = read_past_l1(node.slots + lane);
    if (slot < 0 || slot >= node.n_slots) {
        return -1;
    }
    const float * state = node.columns_of<S>(slot, head, column);
    for (int i = threadIdx.x * L2_LINE; i < Tile::BLOCK_COLUMNS * S; i += Tile::THREADS * L2_LINE) {
        prefetch_l2(state + i);
    }
    return slot;
}

// What a block can ask for while the kernel before this one may still run and write slots, counts, state and log:
// everything is read again after ggml_cuda_pdl_sync().
template <int S> __device__ __forceinline__ void prefetch_early(const GdnNode & node, int lane, int head, int column) {
    using Tile = GdnTile<S>;
    constexpr int ROW_LINES = (2 * S + 1 + L2_LINE - 1) / L2_LINE;
    const int slot = prefetch_state<S>(node, lane, head, column);
    if (slot < 0) {
        return;
    }
    const int n = min(read_past_l1(node.n_pending + slot), min(node.n_block, Tile::ROWS)) * ROW_LINES;
    for (int i = threadIdx.x; i < n; i += Tile::THREADS) {
        prefetch_l2(node.log_row<S>(slot, i / ROW_LINES, head) + min(i % ROW_LINES * L2_LINE, 2 * S));
    }
}

} // namespace dflash
