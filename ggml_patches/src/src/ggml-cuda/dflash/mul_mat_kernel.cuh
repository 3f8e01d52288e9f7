#pragma once

// mul_mat: the kernel. A block has one share (mul_mat_cut.cuh), and so has each of its warps, of fewer rows.

#include "mul_mat_fetch.cuh"

namespace dflash {
namespace mm {

// Counts a warp, by all its lanes; how many came before. What those wrote is there for this warp to read.
__device__ __forceinline__ int arrive(int * counter, int lane) {
    int before = 0;
#if defined(DFLASH_MM_TENSOR) // two fences less on the way of the last one
    __syncwarp();
    if (lane == 0) {
        asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    }
    __syncwarp();
#else
    __threadfence();
    ggml_cuda_syncwarp();
    if (lane == 0) {
        before = atomicAdd(counter, 1);
    }
    __threadfence();
#endif
    return __shfl_sync(0xffffffff, before, 0, 32);
}

// The sums of one warp's rows in a tile, or in a share's part of it.
template <int N4> struct Result {
    // Parts that are on their way together, as registers allow: each takes as long as the way to memory.
    static constexpr int AT_ONCE = N4 <= 2 ? 8 : N4 <= 4 ? 4 : 2;

    const Node & node;
    const Cut & cut;
    const Scratch & scratch;
    int warp, lane;

    __device__ float2 * part(int64_t slot) const {
        return scratch.parts + (slot * (cut.height / ROWS) + warp) * (N4 * 32) + lane;
    }

    __device__ void write(const Sums<N4> & sums, int tile) const {
        const int row = tile * cut.height + warp * ROWS + lane / 4;
#pragma unroll
        for (int i = 0; i < N4; i++) {
            const int column = 4 * i + lane % 4;
            float * y = node.y + column * (int64_t) node.n_rows + row;
#pragma unroll
            for (int m = 0; m < 2; m++) {
                if (column < node.n_columns && row + m * 8 < node.n_rows) {
                    y[m * 8] = sums.of[i][m];
                }
            }
        }
    }

    __device__ void store(const Sums<N4> & sums, int64_t slot) const {
        float2 * to = part(slot);
#pragma unroll
        for (int i = 0; i < N4; i++) {
            to[i * 32] = {sums.of[i][0], sums.of[i][1]};
        }
    }

    // The sum of a tile's parts, in the order of K.
    __device__ Sums<N4> sum_of_parts(int tile, int first, int last) const {
        Sums<N4> sums;
        for (int from = first; from <= last; from += AT_ONCE) {
            float2 parts[AT_ONCE][N4];
#pragma unroll
            for (int i = 0; i < AT_ONCE * N4; i++) {
                const int share = min(from + i / N4, last);
                parts[i / N4][i % N4] = part(cut.slot(share, tile))[i % N4 * 32];
            }
#pragma unroll
            for (int i = 0; i < AT_ONCE * N4; i++) {
                if (from + i / N4 <= last) {
                    sums.of[i % N4][0] += parts[i / N4][i % N4].x;
                    sums.of[i % N4][1] += parts[i / N4][i % N4].y;
                }
            }
        }
        return sums;
    }

    // Whole tiles are written. A part is stored; the last of a tile's parts to come adds them.
    __device__ void take(const Sums<N4> & sums, int tile, int share) const {
        const int64_t begin = (int64_t) tile * cut.n_blocks;
        const int first = cut.share_of(begin), last = cut.share_of(begin + cut.n_blocks - 1);
        if (first == last) {
            write(sums, tile);
            return;
        }
        store(sums, cut.slot(share, tile));
        if (arrive(scratch.arrived + tile * MAX_WARPS + warp, lane) == last - first) {
            write(sum_of_parts(tile, first, last), tile);
        }
    }
};

template <ggml_type TYPE, int N4>
__global__ void __launch_bounds__(MAX_WARPS * 32, N4 <= MAX_SHARED_N4 ? BLOCKS_PER_SM : 1)
    multiply_rows(const Node node, const Cut cut, const Scratch scratch) {
#if !defined(DFLASH_MM_TENSOR)
    if constexpr (N4 > MAX_GENERAL_N4) {
        GGML_UNUSED_VARS(node, cut, scratch);
        NO_DEVICE_CODE;
    } else
#endif
    {
        using F = Format<TYPE>;
        extern __shared__ __align__(16) char shared[];
        const int warp = (int) threadIdx.x / 32, lane = (int) threadIdx.x % 32, share = (int) blockIdx.x;
        Batch<F::BATCH> now(cut, share);
        Stream<TYPE> stream(node, cut, shared, share);
        for (int stage = 0; stage < F::STAGES; stage++) {
            stream.fetch(stage); // while columns are prepared, which began when all that was before had ended
        }
        ggml_cuda_pdl_sync();
        ggml_cuda_pdl_lc();

        const Result<N4> result = {node, cut, scratch, warp, lane};
        const Table<TYPE> table((uint32_t) (node.n_blocks + lane) >> 31);
        Sums<N4> sums;
        int stage = 0;
        while (now.left > 0) {
            wait_for_stages<F::STAGES - 1>();
            int at[2] = {stream.place(now, stage, lane / 4), stream.place(now, stage, lane / 4 + 8)};
            const int n = now.count();
#pragma unroll 1
            for (int i = 0; i < n; i++) {
                meet_super_block<TYPE, N4>(sums, shared, at, Columns<N4>(scratch, now.block + i, lane), table, lane);
                at[0] += F::BYTES, at[1] += F::BYTES;
            }
            end_reading();
            stream.fetch(stage);
            stage = stage + 1 == F::STAGES ? 0 : stage + 1;
            if (now.ends_part()) {
                result.take(sums, now.tile, share);
                sums = Sums<N4>();
            }
            now.advance();
        }
    }
}

} // namespace mm
} // namespace dflash
