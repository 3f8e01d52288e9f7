#pragma once

// From scores to weights, and values that no weight may meet.

#include "attention_mma.cuh"

namespace dflash {
namespace attn {

// Of the two rows that a thread holds in each tile of 16; [2 m + half] is row 16 m + 8 half + lane / 4.
template <typename M> using ByRow = Sums[2 * M::TILES];

// Scores that their row does not see become -infinity.
template <typename M>
__device__ __forceinline__ void hide_unseen(const Work<M> & work, int split,
                                            float (&score)[M::TILES][M::KEY_TILES][4]) {
    const int first = split * M::SPLIT + work.warp * M::WARP_POSITIONS + work.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * M::TILES; i++) {
        const int2 range = work.memory.range[work.is_odd][i * 8 + work.lane / 4];
        const uint32_t from = first - range.x, n = range.y;
#pragma unroll
        for (int j = 0; j < 2 * M::KEY_TILES; j++) {
            float & x = score[i / 2][j / 2][i % 2 * 2 + j % 2];
            x = from + j / 2 * 8 + j % 2 < n ? x : -INFINITY;
        }
    }
}

// Largest score of the warp's positions, for all warps. Scores are scaled. Where every live row sees the whole split,
// dead rows get numbers too, which nobody reads.
template <typename M>
__device__ __forceinline__ void find_largest(const Work<M> & work, int split,
                                             float (&score)[M::TILES][M::KEY_TILES][4]) {
#pragma unroll
    for (int i = 0; i < M::TILES * M::KEY_TILES * 4; i++) {
        (&score[0][0][0])[i] *= work.node.scale;
    }
    const Range common = work.job.common;
    if (split * M::SPLIT < common.first || (split + 1) * M::SPLIT > common.end) {
        hide_unseen<M>(work, split, score);
    }
#pragma unroll
    for (int i = 0; i < 2 * M::TILES; i++) {
        float max = -INFINITY;
#pragma unroll
        for (int j = 0; j < 2 * M::KEY_TILES; j++) {
            max = fmaxf(max, score[i / 2][j / 2][i % 2 * 2 + j % 2]);
        }
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, 1, 32));
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, 2, 32));
        if (work.lane % 4 == 0) {
            work.memory.max[i * 8 + work.lane / 4][work.warp] = max;
        }
    }
}

// A row's numbers of all warps, folded from left to right.
template <typename M, typename Fold>
__device__ __forceinline__ float over_warps(const float (&of_row)[M::WARPS], float x, Fold fold) {
#pragma unroll
    for (int warp = 0; warp < M::WARPS; warp += 4) {
        const float4 four = *(const float4 *) &of_row[warp];
        x = fold(fold(fold(fold(x, four.x), four.y), four.z), four.w);
    }
    return x;
}

// Weights of the warp's positions and their sum, to shared memory; the rows' largest scores. The weights of a tile are
// a fragment of A as they come, so a product with ones sums them up.
template <typename M>
__device__ __forceinline__ void weigh(const Work<M> & work, const float (&score)[M::TILES][M::KEY_TILES][4],
                                      ByRow<M> & sums) {
    constexpr float LOG2_E = 1.44269504f;
    constexpr uint32_t ONES = 0x3C003C00;
#pragma unroll
    for (int m = 0; m < M::TILES; m++) {
        uint32_t weights[M::KEY_TILES + M::KEY_TILES % 2][2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = m * 16 + half * 8 + work.lane / 4;
            const float max =
                over_warps<M>(work.memory.max[row], -INFINITY, [](float a, float b) { return fmaxf(a, b); });
            const float from = max == -INFINITY ? 0.0f : -LOG2_E * max; // nothing seen: weights become 0
            sums[2 * m + half].max = max;
#pragma unroll
            for (int tile = 0; tile < M::KEY_TILES; tile++) {
                const float * x = &score[m][tile][2 * half];
                const half2 pair =
                    __floats2half2_rn(power_of_two(fmaf(x[0], LOG2_E, from)), power_of_two(fmaf(x[1], LOG2_E, from)));
                const int position = work.warp * M::WARP_POSITIONS + tile * 8 + work.lane % 4 * 2;
                *(half2 *) (work.memory.weights[row] + 2 * position) = pair;
                weights[tile][half] = *(const uint32_t *) &pair;
            }
        }
        float sum[4] = {};
#pragma unroll
        for (int tile = 0; tile < M::KEY_TILES; tile += 2) {
            const uint32_t a[4] = {weights[tile][0], weights[tile][1], weights[tile + 1][0], weights[tile + 1][1]};
            multiply(sum, a, ONES, ONES);
        }
        if (work.lane % 4 == 0) {
            work.memory.sum[m * 16 + work.lane / 4][work.warp] = sum[0];
            work.memory.sum[m * 16 + 8 + work.lane / 4][work.warp] = sum[2];
        }
    }
}

// Does a row see a position that is marked as wrong?
template <typename M> __device__ __forceinline__ bool sees_wrong_values(const Work<M> & work, int split, int tile_row) {
    const int2 range = work.memory.range[work.is_odd][tile_row];
    bool found = false;
#pragma unroll 1
    for (int i = 0; i < M::SPLIT / 32; i++) {
        uint32_t wrong = work.memory.wrong[i];
        for (; wrong != 0; wrong &= wrong - 1) {
            const int position = split * M::SPLIT + i * 32 + __ffs(wrong) - 1;
            found |= (uint32_t) (position - range.x) < (uint32_t) range.y;
        }
    }
    return found;
}

// Where some row does not see what others see: takes values out that are no finite f16, and marks their positions.
template <typename M>
__device__ __forceinline__ void clear_wrong_values(const Work<M> & work, int split, uint32_t parity) {
#pragma unroll 1
    for (int stage = 0; stage < M::STAGES; stage++) {
        constexpr int N = M::STAGE / M::WARPS;
        const int first = stage * M::STAGE, position = split * M::SPLIT + first;
        wait(work.memory.values_arrived[stage], parity);
        if (work.job.seen.meets(position, position + M::STAGE)) {
            clear_wrong<typename M::ValueRow, N>(work.memory.values, first + work.warp * N, work.memory.wrong,
                                                 work.lane);
        }
    }
    sync_first<M::METERS>();
}

} // namespace attn
} // namespace dflash
