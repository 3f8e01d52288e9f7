#pragma once

// Attention on tensor cores: head width 128 or 256, pages F16 or Q8_0.
//
// A block takes a split at a time, all of its keys and values in shared memory as the pages hold them. Each warp meets
// an equal part of the positions with all rows of the tile for the scores, then all positions with 32 columns of the
// values: every key and value becomes a fragment once. More warps fetch (attention_fetch.cuh). Between the scores
// and the weights, and between the weights and the values, all wait for each other; else warps run on, so that one's
// products fill another's waits. Loops are kept short on purpose: the whole of a split must fit the instruction cache.
//
// Numbers: q, k, v and the weights are rounded to f16 (a Q8_0 value is scale * integer, rounded), products are summed
// in F32, and so are the weights, as rounded. A weight is relative to the largest score of its split. A position that a
// row does not see has the weight 0 and adds an exact zero.

#include "attention_fold.cuh"
#include "attention_rows.cuh"

namespace dflash {
namespace attn {

// Whether a block may have far more than 100 KiB of shared memory.
__host__ __device__ constexpr bool has_large_memory(int arch) {
    return arch >= 900 && arch < 1200;
}

// How a unit's values lie in the scratch memory: as the threads hold them, each two rows of 16 and, of each row, four
// pairs of columns of its warp's block.
template <int D_, ggml_type V> struct MmaLayout {
    static constexpr int D = D_, THREADS = D / 2; // of the combining kernel

    static __device__ int place(int tile_row, int pair) {
        const int warp = pair / 16, part = pair % 16 / 4, lane = tile_row % 8 * 4 + pair % 4;
        return ((tile_row / 8 * 4 + part) * (D / 32) + warp) * 32 + lane;
    }
    static __device__ int column(int pair) {
        const int block = pair / 16, part = pair % 16 / 4, q = pair % 4;
        if (V == GGML_TYPE_F16) {
            return block * 32 + 8 * part + 2 * q;
        }
        const int place = 4 * (2 * q + part % 2) + part / 2 * 2;
        return block * 32 + (place + PageRow<D, V>::shift(block)) % 32;
    }
};

template <int D_, ggml_type K, ggml_type V, int TILES_, bool LARGE> struct Mma {
    static constexpr int D = D_, TILES = TILES_; // tiles of 16 rows
    using Layout = MmaLayout<D, V>;
    using KeyRow = PageRow<D, K>;
    using ValueRow = PageRow<D, V>;
    static constexpr ggml_type K_TYPE = K;

    static constexpr int WARPS = D / 32, METERS = 32 * WARPS; // threads that meet keys and values
    static constexpr int FETCHERS = WARPS / 2, THREADS = METERS + 32 * FETCHERS;
    static constexpr int TILE_ROWS = 16 * TILES;
    static constexpr bool IS_SMALL = D == 128 || (KeyRow::IS_QUANTISED && ValueRow::IS_QUANTISED);
    static constexpr int WARP_POSITIONS = (IS_SMALL ? 32 : 16) / (LARGE || D == 128 ? 1 : 2);
    static constexpr int SPLIT = WARPS * WARP_POSITIONS;
    static constexpr int KEY_TILES = WARP_POSITIONS / 8;
    static constexpr int STAGES = 4, STAGE = SPLIT / STAGES; // positions whose values arrive together,
    static constexpr int RUN = STAGE < 32 ? STAGE : 32, STAGE_RUNS = STAGE / RUN; // fetched so many at a time

    static constexpr int Q_PITCH = 2 * D + 16, P_PITCH = 2 * SPLIT + 16;
    struct Memory {
        __align__(16) char keys[SPLIT][KeyRow::PITCH];
        __align__(16) char values[SPLIT][ValueRow::PITCH];
        __align__(16) char q[TILE_ROWS][Q_PITCH];
        __align__(16) char weights[TILE_ROWS][P_PITCH];
        __align__(16) float max[TILE_ROWS][WARPS]; // of a warp's positions
        __align__(16) float sum[TILE_ROWS][WARPS];
        Barrier keys_arrived[WARPS], keys_free[WARPS], values_arrived[STAGES], values_free[STAGES];
        int2 range[2][TILE_ROWS];   // what a row sees, in even and in odd units: first position, number
        uint32_t wrong[SPLIT / 32]; // positions with a value that is no finite f16
        Plan plan;

        // By one thread; a barrier of the block must follow.
        __device__ void make_barriers() {
            for (int i = 0; i < WARPS; i++) {
                make_barrier(keys_arrived[i], 32), make_barrier(keys_free[i], 1);
            }
            for (int i = 0; i < STAGES; i++) {
                make_barrier(values_arrived[i], 32 * STAGE_RUNS), make_barrier(values_free[i], WARPS);
            }
        }
    };

    // pair `part` of a row's four from C of the four tiles
    static __device__ float2 pair_of(const float (&c)[4][4], int half, int part) {
        if (!ValueRow::IS_QUANTISED) {
            return {c[part][2 * half], c[part][2 * half + 1]};
        }
        const int tile = part / 2 * 2;
        return {c[tile][2 * half + part % 2], c[tile + 1][2 * half + part % 2]};
    }
};

// One unit as a block's threads see it.
template <typename M> struct Work {
    const Node & node;
    const Job & job;
    typename M::Memory & memory;
    int kv_head, warp, lane;
    bool is_odd; // unit of the block
};

// Queries of the tile as f16, zeros where it has no live row. A barrier must follow.
template <typename M> __device__ __forceinline__ void load_queries(const Work<M> & work, const Cut & cut) {
    const Node & node = work.node;
#pragma unroll 3
    for (int tile_row = work.warp; tile_row < M::TILE_ROWS; tile_row += M::WARPS) {
        const int row = work.job.row_of(cut, tile_row), t = row / node.gqa;
        const int64_t head = work.kv_head * node.gqa + (row - t * node.gqa);
        const float * from =
            (const float *) (node.q + head * node.q_head + t * node.q_row + work.job.lane_index * node.q_lane);
        const bool is_live = t < work.job.lane.n_live;
        half2 q[M::D / 64];
#pragma unroll
        for (int i = 0; i < M::D / 64; i++) {
            const int column = 64 * i + 2 * work.lane;
            q[i] = is_live ? __floats2half2_rn(from[column], from[column + 1]) : __float2half2_rn(0.0f);
        }
#pragma unroll
        for (int i = 0; i < M::D / 64; i++) {
            *(half2 *) (work.memory.q[tile_row] + 2 * k_of_column<M::K_TYPE>(64 * i + 2 * work.lane)) = q[i];
        }
    }
}

// score[m][n] = q . k of the 16 rows m and the 8 positions n of this warp
template <typename M>
__device__ __forceinline__ void meet_keys(const Work<M> & work, float (&score)[M::TILES][M::KEY_TILES][4]) {
    const char * rows = work.memory.keys[work.warp * M::WARP_POSITIONS];
    const char * queries = work.memory.q[work.lane % 16] + work.lane / 16 * 16;
#pragma unroll 1
    for (int pair = 0; pair < M::D / 64; pair++) {
#pragma unroll
        for (int block = 2 * pair; block < 2 * pair + 2; block++) {
            uint32_t keys[M::KEY_TILES][4];
#pragma unroll
            for (int n = 0; n < M::KEY_TILES; n++) {
                key_fragment<typename M::KeyRow>(keys[n], rows + n * 8 * M::KeyRow::PITCH, block, work.lane);
            }
#pragma unroll
            for (int step = 0; step < 2; step++) {
#pragma unroll
                for (int m = 0; m < M::TILES; m++) {
                    uint32_t q[4];
                    load_matrices(q, queries + m * 16 * M::Q_PITCH + block * 64 + step * 32);
#pragma unroll
                    for (int n = 0; n < M::KEY_TILES; n++) {
                        multiply(score[m][n], q, keys[n][2 * step], keys[n][2 * step + 1]);
                    }
                }
            }
        }
    }
}

// values[m] += weights * the values of a stage in this warp's 32 columns
template <typename M>
__device__ __forceinline__ void meet_values(const Work<M> & work, int stage, float (&values)[M::TILES][4][4]) {
    const char * rows = work.memory.values[stage * M::STAGE];
    const char * weights = work.memory.weights[work.lane % 16] + stage * M::STAGE * 2 + work.lane / 16 * 16;
#pragma unroll
    for (int first = 0; first < M::STAGE; first += 16) {
        uint32_t v[4][2];
        value_fragment<typename M::ValueRow>(v, rows + first * M::ValueRow::PITCH, work.warp, work.lane);
#pragma unroll
        for (int m = 0; m < M::TILES; m++) {
            uint32_t p[4];
            load_matrices(p, weights + m * 16 * M::P_PITCH + first * 2);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                multiply(values[m][j], p, v[j][0], v[j][1]);
            }
        }
    }
}

} // namespace attn
} // namespace dflash
