#pragma once

// The kernel around the products of attention_mma.cuh: splits, folds, units.

#include "attention_fetch.cuh"
#include "attention_weights.cuh"

namespace dflash {
namespace attn {

// Everything a split gives its rows: largest scores, sums and weighted values. `turn` is the number of splits that the
// block has met before.
template <typename M>
__device__ __forceinline__ void meet_split(const Work<M> & work, int split, uint32_t turn, ByRow<M> & sums,
                                           float (&values)[M::TILES][4][4]) {
    typename M::Memory & memory = work.memory;
    const uint32_t parity = turn & 1;
    const int begin = split * M::SPLIT;
    const bool is_mixed = max(begin, work.job.seen.first) < work.job.common.first ||
                          min(begin + M::SPLIT, work.job.seen.end) > work.job.common.end;
    float score[M::TILES][M::KEY_TILES][4] = {};
    wait(memory.keys_arrived[work.warp], parity);
    meet_keys<M>(work, score);
    __syncwarp();
    if (work.lane == 0) {
        arrive(memory.keys_free[work.warp]);
    }
    find_largest<M>(work, split, score);
    sync_first<M::METERS>();
    if (threadIdx.x < M::SPLIT / 32) {
        memory.wrong[threadIdx.x] = 0;
    }
    weigh<M>(work, score, sums);
    sync_first<M::METERS>();
    if (is_mixed) {
        clear_wrong_values<M>(work, split, parity);
    }

#pragma unroll 1
    for (int stage = 0; stage < M::STAGES; stage++) {
        wait(memory.values_arrived[stage], parity);
        const int first = begin + stage * M::STAGE;
        if (work.job.seen.meets(first, first + M::STAGE)) {
            meet_values<M>(work, stage, values);
        }
        __syncwarp();
        if (work.lane == 0) {
            arrive(memory.values_free[stage]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2 * M::TILES; i++) {
        sums[i].sum = over_warps<M>(memory.sum[i * 8 + work.lane / 4], 0.0f, [](float a, float b) { return a + b; });
        if (is_mixed && sees_wrong_values(work, split, i * 8 + work.lane / 4)) {
            sums[i].sum = NAN;
        }
    }
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
                float2 & place = to[(i * 4 + part) * M::METERS];
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

// `turn` counts the splits that this block meets.
template <typename M>
__device__ __forceinline__ void meet_unit(const Work<M> & work, const Unit & unit, int index, const Cut & cut,
                                          const Scratch & scratch, uint32_t & turn) {
    load_queries<M>(work, cut); // all warps are done with the last unit's: they met its last keys
    if (threadIdx.x < M::TILE_ROWS) {
        const Range range = work.job.visible(work.node, cut, threadIdx.x);
        work.memory.range[work.is_odd][threadIdx.x] = {range.first, range.end - range.first};
    }
    sync_first<M::METERS>();

    TileRows<M> group;
    Sums written[2 * M::TILES];
    bool is_first = true;
#pragma unroll 1
    for (int split = unit.first_split; split < unit.end_split; split++, turn++) {
        Sums sums[2 * M::TILES];
        float values[M::TILES][4][4] = {};
        meet_split<M>(work, split, turn, sums, values);
        group.take(sums, values);
        if (split + 1 == unit.end_split || (split + 1) % splits_of(GROUP_LEVEL) == 0) {
            group.write(scratch, index, work, is_first, written);
            group = TileRows<M>();
            is_first = false;
        }
    }
}

template <int D, ggml_type K, ggml_type V, int TILES>
__global__ void __launch_bounds__(D + D / 2, D == 128 ? 2 : 1)
    mma(const Node node, const Cut cut, const Scratch scratch) {
#if defined(AMPERE_MMA_AVAILABLE)
    using M = Mma<D, K, V, TILES, has_large_memory(__CUDA_ARCH__)>;
    static_assert(M::THREADS == D + D / 2, "a thread per column, and those that fetch");
    extern __shared__ __align__(16) char shared[];
    typename M::Memory & memory = *(typename M::Memory *) shared;
    const int warp = (int) threadIdx.x / 32, lane = (int) threadIdx.x % 32;
    if (threadIdx.x == M::METERS) {
        memory.make_barriers();
    }
    ggml_cuda_pdl_sync();
    make_plan(memory.plan, node, cut, scratch);
    ggml_cuda_pdl_lc();

    uint32_t turn = 0;
    bool is_odd = false;
    for (int index = blockIdx.x; index < memory.plan.n_units(cut); index += gridDim.x, is_odd = !is_odd) {
        const Unit unit = memory.plan.unit(node, cut, index);
        const Job job(node, cut, unit.job);
        if (warp >= M::WARPS) {
            fetch_unit<M>(memory, node, job, unit, turn, warp - M::WARPS, lane);
        } else {
            const Work<M> work = {node, job, memory, unit.kv_head, warp, lane, is_odd};
            meet_unit<M>(work, unit, index, cut, scratch, turn);
        }
    }
    wait_for_copies();
#else
    GGML_UNUSED_VARS(node, cut, scratch);
    NO_DEVICE_CODE;
#endif
}

} // namespace attn
} // namespace dflash
