#pragma once

// The kernel around the products of attention_mma.cuh: weights, folds, splits, units.

#include "attention_mma.cuh"

namespace dflash {
namespace attn {

// Of the two rows that a thread holds in each tile of 16; [2 m + half] is row 16 m + 8 half + lane / 4.
template <typename M> using ByRow = Sums[2 * M::TILES];
template <typename M> using Ranges = Range[2 * M::TILES];

// Largest score of the warp's positions, for all warps; scores are scaled and those that no row sees become -infinity.
template <typename M>
__device__ __forceinline__ void find_largest(const Work<M> & work, int split, const Ranges<M> & range,
                                             float (&score)[M::TILES][M::KEY_TILES][4]) {
    const int first = split * M::SPLIT + work.warp * M::WARP_POSITIONS + work.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * M::TILES; i++) {
        const uint32_t from = first - range[i].first, n = range[i].end - range[i].first;
        float max = -INFINITY;
#pragma unroll
        for (int tile = 0; tile < M::KEY_TILES; tile++) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float & x = score[i / 2][tile][i % 2 * 2 + c];
                x = from + tile * 8 + c < n ? work.node.scale * x : -INFINITY;
                max = fmaxf(max, x);
            }
        }
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, 1, 32));
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, 2, 32));
        if (work.lane % 4 == 0) {
            work.memory.max[work.warp][i * 8 + work.lane / 4] = max;
        }
    }
}

// Weights of the warp's positions and their sum, to shared memory; the rows' largest scores.
template <typename M>
__device__ __forceinline__ void weigh(const Work<M> & work, const float (&score)[M::TILES][M::KEY_TILES][4],
                                      ByRow<M> & sums) {
#pragma unroll
    for (int i = 0; i < 2 * M::TILES; i++) {
        const int row = i * 8 + work.lane / 4;
        float max = -INFINITY;
#pragma unroll
        for (int warp = 0; warp < M::WARPS; warp++) {
            max = fmaxf(max, work.memory.max[warp][row]);
        }
        sums[i].max = max;
        const float from = max == -INFINITY ? 0.0f : max; // nothing seen: weights become 0
        float sum = 0.0f;
#pragma unroll
        for (int tile = 0; tile < M::KEY_TILES; tile++) {
            const float * x = &score[i / 2][tile][i % 2 * 2];
            const half2 pair =
                __floats2half2_rn(power_of_two((x[0] - from) * 1.44269504f), power_of_two((x[1] - from) * 1.44269504f));
            const int position = work.warp * M::WARP_POSITIONS + tile * 8 + work.lane % 4 * 2;
            *(half2 *) (work.memory.weights[row] + 2 * position) = pair;
            sum += __low2float(pair) + __high2float(pair);
        }
        sum += __shfl_xor_sync(0xffffffff, sum, 1, 32);
        sum += __shfl_xor_sync(0xffffffff, sum, 2, 32);
        if (work.lane % 4 == 0) {
            work.memory.sum[work.warp][row] = sum;
        }
    }
}

// Where some row does not see what others see: takes values out that are no finite f16, and marks their positions. By
// all threads, between barriers.
template <typename M> __device__ __forceinline__ void clear_wrong_values(const Work<M> & work, int stage) {
    for (int row = stage * M::STAGE + work.warp; row < (stage + 1) * M::STAGE; row += M::WARPS) {
        if (clear_row<typename M::ValueRow>(work.memory.values[row], work.lane)) {
            atomicOr(&work.memory.wrong[row / 32], 1u << (row % 32));
        }
    }
}

template <typename M> __device__ __forceinline__ bool sees_wrong_values(const Work<M> & work, int split, Range range) {
    bool found = false;
    const int first = max(range.first - split * M::SPLIT, 0), end = min(range.end - split * M::SPLIT, M::SPLIT);
    for (int i = first; i < end; i++) {
        found |= work.memory.wrong[i / 32] >> (i % 32) & 1;
    }
    return found;
}

// Everything a split gives its rows: largest scores, sums and weighted values. Fetches the next split's keys and values
// on the way. By all threads.
template <typename M>
__device__ __forceinline__ void meet_split(const Work<M> & work, int split, bool has_next, const Ranges<M> & range,
                                           ByRow<M> & sums, float (&values)[M::TILES][4][4]) {
    const int begin = split * M::SPLIT;
    const bool is_mixed = max(begin, work.job.seen.first) < work.job.common.first ||
                          min(begin + M::SPLIT, work.job.seen.end) > work.job.common.end;
    if (threadIdx.x < M::SPLIT / 32) {
        work.memory.wrong[threadIdx.x] = 0;
    }
    float score[M::TILES][M::KEY_TILES][4] = {};
    meet_keys<M>(work, score);
    __syncwarp();
    fetch_keys<M>(work, split + 1, has_next);
    find_largest<M>(work, split, range, score);
    __syncthreads();
    weigh<M>(work, score, sums);

    const auto stage = [&](int number) {
        __syncthreads();
        if (is_mixed) {
            clear_wrong_values<M>(work, number);
            __syncthreads();
        }
        const int first = begin + number * M::STAGE;
        if (work.job.seen.meets(first, first + M::STAGE)) {
            meet_values<M>(work, number, values);
        }
    };
    copy_wait<M::STAGES - 1 + 2>();
    stage(0);
    copy_wait<M::STAGES - 2 + 2>();
    stage(1);
    copy_wait<M::STAGES - 3 + 2>();
    stage(2);
    copy_wait<M::STAGES - 4 + 2>();
    stage(3);

#pragma unroll
    for (int i = 0; i < 2 * M::TILES; i++) {
#pragma unroll
        for (int warp = 0; warp < M::WARPS; warp++) {
            sums[i].sum += work.memory.sum[warp][i * 8 + work.lane / 4];
        }
        if (is_mixed && sees_wrong_values(work, split, range[i])) {
            sums[i].sum = NAN;
        }
    }
    __syncthreads();
    fetch_values<M>(work, split + 1, has_next);
}

// What the rows of a tile met.
template <typename M> struct TileRows {
    ByRow<M> sums;
    float values[M::TILES][4][4] = {};

    __device__ void take(const ByRow<M> & next_sums, const float (&next)[M::TILES][4][4]) {
#pragma unroll
        for (int i = 0; i < 2 * M::TILES; i++) {
            if (next_sums[i].sum != 0.0f) { // the row met something, or a NaN
                const Factors factors = fold(sums[i], next_sums[i]);
#pragma unroll
                for (int j = 0; j < 4; j++) {
#pragma unroll
                    for (int c = i % 2 * 2; c < i % 2 * 2 + 2; c++) {
                        values[i / 2][j][c] = factors.apply(values[i / 2][j][c], next[i / 2][j][c]);
                    }
                }
            }
        }
    }

    // To the unit's place in the scratch memory; where a group was written before, folded into it.
    __device__ void write(const Scratch & scratch, int64_t unit, const Work<M> & work, bool is_first,
                          ByRow<M> & written) const {
        float2 * to = scratch.values + unit * (M::TILE_ROWS * M::D / 2) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < 2 * M::TILES; i++) {
            Factors factors = {0.0f, 1.0f};
            if (is_first) {
                written[i] = sums[i];
            } else if (sums[i].sum != 0.0f) {
                factors = fold(written[i], sums[i]);
            } else {
                continue;
            }
#pragma unroll
            for (int part = 0; part < 4; part++) {
                float2 & place = to[(i * 4 + part) * M::THREADS];
                const float2 next = M::pair_of(values[i / 2], i % 2, part);
                const float2 before = is_first ? float2{0.0f, 0.0f} : place;
                place = {factors.apply(before.x, next.x), factors.apply(before.y, next.y)};
            }
            if (work.warp == 0 && work.lane % 4 == 0) {
                scratch.sums[unit * M::TILE_ROWS + i * 8 + work.lane / 4] = {written[i].max, written[i].sum};
            }
        }
    }
};

template <typename M>
__device__ __forceinline__ void run_unit(const Work<M> & work, const Unit & unit, int index, const Cut & cut,
                                         const Scratch & scratch) {
    __syncthreads(); // the last unit's pages and queries are done with
    load_page_numbers<M>(work, unit.end_split * M::SPLIT);
    __syncthreads();
    fetch_keys<M>(work, unit.first_split, true);
    fetch_values<M>(work, unit.first_split, true);
    load_queries<M>(work, cut);
    Range range[2 * M::TILES];
#pragma unroll
    for (int i = 0; i < 2 * M::TILES; i++) {
        range[i] = work.job.visible(work.node, cut, i * 8 + work.lane / 4);
    }
    __syncthreads();

    TileRows<M> group;
    Sums written[2 * M::TILES];
    bool is_first = true;
    for (int split = unit.first_split; split < unit.end_split; split++) {
        Sums sums[2 * M::TILES];
        float values[M::TILES][4][4] = {};
        const bool is_last = split + 1 == unit.end_split;
        meet_split<M>(work, split, !is_last, range, sums, values);
        group.take(sums, values);
        if (is_last || (split + 1) % splits_of(GROUP_LEVEL) == 0) {
            group.write(scratch, index, work, is_first, written);
            group = TileRows<M>();
            is_first = false;
        }
    }
}

template <int D, ggml_type K, ggml_type V, int TILES>
__global__ void __launch_bounds__(D, 1) mma(const Node node, const Cut cut, const Scratch scratch) {
#if defined(AMPERE_MMA_AVAILABLE)
    using M = Mma<D, K, V, TILES, has_large_memory(__CUDA_ARCH__)>;
    static_assert(M::THREADS == D, "a thread per column");
    extern __shared__ __align__(16) char shared[];
    typename M::Memory & memory = *(typename M::Memory *) shared;
    ggml_cuda_pdl_sync();
    make_plan(memory.plan, node, cut, scratch);
    ggml_cuda_pdl_lc();

    for (int index = blockIdx.x; index < memory.plan.n_units(cut); index += gridDim.x) {
        const Unit unit = memory.plan.unit(node, cut, index);
        const Job job(node, cut, unit.job);
        const Work<M> work = {node,
                              job,
                              memory,
                              unit.kv_head,
                              unit.first_split * M::SPLIT / PAGE,
                              (int) threadIdx.x / 32,
                              (int) threadIdx.x % 32};
        run_unit<M>(work, unit, index, cut, scratch);
    }
#else
    GGML_UNUSED_VARS(node, cut, scratch);
    NO_DEVICE_CODE;
#endif
}

} // namespace attn
} // namespace dflash
