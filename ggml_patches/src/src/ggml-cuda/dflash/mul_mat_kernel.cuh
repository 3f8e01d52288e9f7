#pragma once

// mul_mat: the kernel. A block has one share (mul_mat_cut.cuh), and so has each of its warps, of fewer rows.

#include "mul_mat_fetch.cuh"

namespace dflash {
namespace mm {

// The sums of one warp's rows in a tile, or in a share's part of it.
template <int TILES, int N8> struct Result {
    const Node & node;
    const Cut & cut;
    const Scratch & scratch;
    int warp, lane;

    __device__ float4 * part(int64_t slot) const {
        return scratch.parts + ((slot * (cut.height / TILE) + warp * TILES) * N8) * 32 + lane;
    }

    __device__ void write(const Sums<TILES, N8> & sums, int tile) const {
        const int row = tile * cut.height + warp * (TILES * TILE) + lane / 4;
        const int64_t n_rows = opaque(node.n_rows);
        int column = lane % 4 * 2;
        float * y = node.y + column * n_rows + row;
#pragma unroll
        for (int i = 0; i < N8 * 2; i++) {
            const float unit = scratch.units[column];
#pragma unroll
            for (int m = 0; m < 2 * TILES; m++) {
                if (column < node.n_columns && row + m * 8 < node.n_rows) {
                    y[m * 8] = sums.of[m / 2][i / 2][m % 2 * 2 + i % 2] * unit;
                }
            }
            y += (i % 2 ? 7 : 1) * n_rows;
            column += i % 2 ? 7 : 1;
        }
    }

    __device__ void store(const Sums<TILES, N8> & sums, int64_t slot) const {
        float4 * to = part(slot);
#pragma unroll
        for (int i = 0; i < TILES * N8; i++) {
            const float (&x)[4] = sums.of[i / N8][i % N8];
            to[i * 32] = {x[0], x[1], x[2], x[3]};
        }
    }

    // sums += a part
    __device__ void add(Sums<TILES, N8> & sums, int64_t slot) const {
        const float4 * from = part(slot);
#pragma unroll
        for (int i = 0; i < TILES * N8; i++) {
            float (&x)[4] = sums.of[i / N8][i % N8];
            const float4 y = from[i * 32];
            x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
        }
    }

    // Whole tiles are written. A part is stored; the last of a tile's parts to come adds them from the first one on.
    __device__ void take(Sums<TILES, N8> & sums, int tile, int share) const {
        const int begin = tile * cut.n_blocks;
        const int first = cut.share_of(begin), last = cut.share_of(begin + cut.n_blocks - 1);
        if (first == last) {
            write(sums, tile);
            return;
        }
        store(sums, cut.slot(share, tile));
        __threadfence();
        ggml_cuda_syncwarp();
        int before = 0;
        if (lane == 0) {
            before = atomicAdd(scratch.arrived + tile * (MAX_HEIGHT / HEIGHT_STEP * 2) + warp, 1);
        }
        before = __shfl_sync(0xffffffff, before, 0, 32);
        if (before == last - first) {
            __threadfence();
            sums = Sums<TILES, N8>();
            for (int from = first; from <= last; from++) {
                add(sums, cut.slot(from, tile));
            }
            write(sums, tile);
        }
    }
};

// Whether there is a table depends on the device's code, and its place in shared memory with it.
#if defined(DFLASH_MM_TENSOR)
template <ggml_type TYPE, int N8> constexpr bool HAS_TABLE = TYPE == GGML_TYPE_IQ4_XS && N8 <= MAX_TABLE_N8;
#else
template <ggml_type TYPE, int N8> constexpr bool HAS_TABLE = false;
#endif

constexpr int threads_of(int height, int tiles) {
    return height / (tiles * TILE) * 32;
}

template <ggml_type TYPE, int N8, int TILES>
__global__ void __launch_bounds__(threads_of(MAX_HEIGHT, TILES), 1)
    multiply_rows(const Node node, const Cut cut, const Scratch scratch) {
#if !defined(DFLASH_MM_TENSOR)
    if constexpr (N8 > MAX_GENERAL_N8) {
        GGML_UNUSED_VARS(node, cut, scratch);
        NO_DEVICE_CODE;
    } else
#endif
    {
        using F = Format<TYPE>;
        constexpr bool TABLE = HAS_TABLE<TYPE, N8>;
        extern __shared__ __align__(16) char shared[];
        const int warp = (int) threadIdx.x / 32, lane = (int) threadIdx.x % 32, share = (int) blockIdx.x;
        Batch<F::BATCH> now(cut, share);
        Stream<TYPE, TILES> stream(node, cut, shared, TABLE ? TABLE_BYTES : 0, share);
        for (int stage = 0; stage < F::STAGES; stage++) {
            stream.fetch(stage); // while columns are prepared, which began when all that was before had ended
        }
        if (TABLE) {
            fill_table(shared);
            __syncthreads();
        }
        ggml_cuda_pdl_sync();
        ggml_cuda_pdl_lc();

        const Result<TILES, N8> result = {node, cut, scratch, warp, lane};
        const uint4 *columns = scratch.columns + first_pair(lane), *column_sums = scratch.sums + first_pair(lane);
        Sums<TILES, N8> sums;
        int stage = 0;
        while (now.left > 0) {
            wait_for_stages<F::STAGES - 1>();
            int at[TILES][2];
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                at[i / 2][i % 2] = stream.place(now, stage, i * 8 + lane / 4);
            }
            const int n = now.count();
#pragma unroll 1
            for (int i = 0; i < n; i++) {
                const int64_t block = now.block + i;
                meet_super_block<TYPE, TABLE>(sums, shared, at, columns + block * (STEPS / 2 * N8 * 32),
                                              column_sums + block * (N8 * 32));
#pragma unroll
                for (int row = 0; row < 2 * TILES; row++) {
                    at[row / 2][row % 2] += F::BYTES;
                }
            }
            end_reading();
            stream.fetch(stage);
            stage = stage + 1 == F::STAGES ? 0 : stage + 1;
            if (now.ends_part()) {
                result.take(sums, now.tile, share);
                sums = Sums<TILES, N8>();
            }
            now.advance();
        }
    }
}

} // namespace mm
} // namespace dflash
