#pragma once

// mul_mat on Hopper: weights on their way. Each warp fetches the 16 rows that it decodes, a super-block at a time, some
// stages ahead, and waits for nobody else.
//
// Rows are copied in pieces of 16 bytes that are aligned in global memory, so a row begins up to 15 bytes behind its
// place. Threads whose piece no row needs copy its neighbour once more: that costs no traffic and no decision.

#include "../mul_mat_cut.cuh"
#include "../mul_mat_products.cuh"

namespace dflash {
namespace wgmma {

// Rows in shared memory are PITCH bytes apart: what 16 threads read of four rows, 8 bytes each, lies in different
// banks.
template <ggml_type TYPE> constexpr int PITCH = 160;
template <> constexpr int PITCH<GGML_TYPE_Q5_K> = 224;
template <> constexpr int PITCH<GGML_TYPE_Q6_K> = 240;
template <> constexpr int PITCH<GGML_TYPE_Q8_0> = 304;

template <ggml_type TYPE> struct Pieces {
    using F = mm::Format<TYPE>;
    static constexpr int MOST = (16 - F::ALIGN + F::BYTES + 15) / 16; // of a row
    static constexpr int LEAST = (F::BYTES + 15) / 16;                // where it begins at a multiple of 16
    static constexpr int OF_PITCH = PITCH<TYPE> / 16;
    static constexpr int COPIES = (mm::TILE * OF_PITCH + 31) / 32; // of a thread
    static constexpr int STAGE_BYTES = COPIES * 32 * 16;
};

template <ggml_type TYPE> class Weights {
    using P = Pieces<TYPE>;
    const mm::Node & node;
    const mm::Cut & cut;
    int warp;
    char * ring; // of the warp
    mm::Batch<1> next;
    const char * rows = nullptr; // the warp's first row
    uint32_t offsets[P::COPIES]; // of the pieces that this thread copies

    __device__ void open_tile() {
        const int last = node.n_rows - 1, first = min(next.tile * cut.height + warp * mm::TILE, last);
        rows = node.w + first * node.w_row;
#pragma unroll
        for (int i = 0; i < P::COPIES; i++) {
            const int place = (int) threadIdx.x % 32 + 32 * i;
            const int row = min(min(place / P::OF_PITCH, mm::TILE - 1), last - first);
            offsets[i] = (uint32_t) row * (uint32_t) node.w_row + min(place % P::OF_PITCH, P::MOST - 1) * 16;
        }
    }

  public:
    __device__ Weights(const mm::Node & of, const mm::Cut & cut_of, int warp_of, char * ring_of, int share)
        : node(of), cut(cut_of), warp(warp_of), ring(ring_of), next(cut_of, share) {
        open_tile();
    }

    // Fetches the next super-block into a stage, if the share has one; a stage without copies counts.
    __device__ void fetch(int stage) {
        if (next.left > 0) {
            const char * from = rows + next.block * mm::Format<TYPE>::BYTES;
            char * to = ring + stage * P::STAGE_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
            for (int i = 0; i < P::COPIES; i++) {
                const char * at = from + offsets[i];
                uintptr_t piece = (uintptr_t) at & ~(uintptr_t) 15;
                if (P::LEAST < P::MOST) { // the last one may lie behind the row
                    const bool is_last = (threadIdx.x % 32 + 32 * i) % P::OF_PITCH >= P::MOST - 1;
                    piece -= is_last && ((uintptr_t) at & 15) == 0 ? 16 : 0;
                }
                attn::copy_async<16>(to + i * 512, (const char *) piece, true);
            }
            const int tile = next.tile;
            next.advance();
            if (next.tile != tile && next.left > 0) {
                open_tile();
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

// All stages but the last N have arrived, for the whole warp, which has left all that it read before.
template <int N> __device__ __forceinline__ void wait_for_stages() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
    __syncwarp();
}

// Low bits of the address of a row, of which the place in shared memory of its super-blocks follows.
template <ggml_type TYPE> __device__ __forceinline__ int place_in_stage(uint32_t row_low, int block, int row) {
    return row * PITCH<TYPE> + (int) ((row_low + block * mm::Format<TYPE>::BYTES) & 15);
}

} // namespace wgmma
} // namespace dflash
