#pragma once

// Attention on tensor cores: head width 128 or 256, pages F16 or Q8_0.
//
// A block takes a split at a time, all of its keys and values in shared memory as the pages hold them. Each warp meets
// an equal part of the positions with all rows of the tile for the scores, then all positions with 32 columns of the
// values: every key and value becomes a fragment once. Keys are a warp's own, so that it fetches the next split's as
// soon as it is done with these; both arrive in parts, and work starts with the first.
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

    static constexpr int WARPS = D / 32, THREADS = 32 * WARPS, TILE_ROWS = 16 * TILES;
    static constexpr bool IS_SMALL = D == 128 || (KeyRow::IS_QUANTISED && ValueRow::IS_QUANTISED);
    static constexpr int WARP_POSITIONS = (IS_SMALL ? 32 : 16) / (LARGE || D == 128 ? 1 : 2);
    static constexpr int SPLIT = WARPS * WARP_POSITIONS;
    static constexpr int KEY_TILES = WARP_POSITIONS / 8;
    static constexpr int STAGES = 4, STAGE = SPLIT / STAGES; // positions whose values arrive together

    static constexpr int Q_PITCH = 2 * D + 16, P_PITCH = 2 * SPLIT + 16;
    struct Memory {
        __align__(16) char keys[SPLIT][KeyRow::PITCH];
        __align__(16) char values[SPLIT][ValueRow::PITCH];
        __align__(16) char q[TILE_ROWS][Q_PITCH];
        __align__(16) char weights[TILE_ROWS][P_PITCH];
        float max[WARPS][TILE_ROWS], sum[WARPS][TILE_ROWS]; // of a warp's positions
        uint32_t wrong[SPLIT / 32];                         // positions with a value that is no finite f16
        int32_t pages[splits_of(SUPER_LEVEL) * SPLIT / PAGE];
        Plan plan;
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
    int kv_head, first_page; // memory.pages[0] is page first_page of the slot
    int warp, lane;

    // Bytes of a row of a page, and whether there is such a row that anyone sees.
    struct Source {
        const char * row;
        bool exists;
    };
    __device__ Source source(const char * pages, int64_t row_stride, int64_t head_stride, int position) const {
        const bool is_seen = position >= job.seen.first && position < job.seen.end;
        const int page = is_seen ? memory.pages[position / PAGE - first_page] : -1;
        const int64_t row = page >= 0 ? (int64_t) page * PAGE + position % PAGE : 0;
        return {pages + row * row_stride + kv_head * head_stride, page >= 0};
    }
};

// Page numbers of a unit, -1 for what is missing or out of range. A barrier must follow.
template <typename M> __device__ __forceinline__ void load_page_numbers(const Work<M> & work, int end_position) {
    const int32_t * table = work.node.table + (int64_t) work.job.lane.slot * work.node.max_pages;
    const int n = (end_position - 1) / PAGE - work.first_page + 1;
    for (int i = threadIdx.x; i < n; i += M::THREADS) {
        const int page = work.first_page + i < work.node.max_pages ? table[work.first_page + i] : -1;
        work.memory.pages[i] = page >= 0 && page < work.node.n_pages ? page : -1;
    }
}

// Queries of the tile as f16, zeros where it has no live row. A barrier must follow.
template <typename M> __device__ __forceinline__ void load_queries(const Work<M> & work, const Cut & cut) {
    const Node & node = work.node;
#pragma unroll 8
    for (int i = threadIdx.x; i < M::TILE_ROWS * M::D / 2; i += M::THREADS) {
        const int tile_row = i / (M::D / 2), column = i % (M::D / 2) * 2;
        const int row = work.job.row_of(cut, tile_row), t = row / node.gqa;
        half2 q = __float2half2_rn(0.0f);
        if (t < work.job.lane.n_live) {
            const int64_t head = work.kv_head * node.gqa + row % node.gqa;
            const float * from =
                (const float *) (node.q + head * node.q_head + t * node.q_row + work.job.lane_index * node.q_lane);
            q = __floats2half2_rn(from[column], from[column + 1]);
        }
        *(half2 *) (work.memory.q[tile_row] + 2 * k_of_column<M::K_TYPE>(column)) = q;
    }
}

template <typename Row>
__device__ __forceinline__ void copy_chunk(char * to, const char * from, bool exists, bool is_aligned) {
    if (is_aligned) {
        copy_async<Row::CHUNK>(to, from, exists);
        return;
    }
    for (int i = 0; i < Row::CHUNK / 2; i++) {
        ((uint16_t *) to)[i] = exists ? ((const uint16_t *) from)[i] : 0;
    }
}

// Fetches a warp's keys of a split: two groups, each half of the columns.
template <typename M> __device__ __forceinline__ void fetch_keys(const Work<M> & work, int split, bool exists) {
    using Row = typename M::KeyRow;
    const Node & node = work.node;
    const bool is_aligned = ((uintptr_t) node.k | node.k_row | node.k_head) % Row::CHUNK == 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int first = half == 0 ? 0 : Row::HALF_CHUNKS;
        const int n = half == 0 ? Row::HALF_CHUNKS : Row::CHUNKS - Row::HALF_CHUNKS;
        for (int i = work.lane; exists && i < M::WARP_POSITIONS * n; i += 32) {
            const int row = work.warp * M::WARP_POSITIONS + i / n, offset = (first + i % n) * Row::CHUNK;
            const auto source = work.source(node.k, node.k_row, node.k_head, split * M::SPLIT + row);
            copy_chunk<Row>(work.memory.keys[row] + offset, source.row + offset, source.exists, is_aligned);
        }
        copy_commit();
    }
}

// Fetches the values of a split: a group for each stage. By all threads.
template <typename M> __device__ __forceinline__ void fetch_values(const Work<M> & work, int split, bool exists) {
    using Row = typename M::ValueRow;
    const Node & node = work.node;
    const bool is_aligned = ((uintptr_t) node.v | node.v_row | node.v_head) % Row::CHUNK == 0;
#pragma unroll
    for (int stage = 0; stage < M::STAGES; stage++) {
        for (int i = threadIdx.x; exists && i < M::STAGE * Row::CHUNKS; i += M::THREADS) {
            const int row = stage * M::STAGE + i / Row::CHUNKS, offset = i % Row::CHUNKS * Row::CHUNK;
            const auto source = work.source(node.v, node.v_row, node.v_head, split * M::SPLIT + row);
            copy_chunk<Row>(work.memory.values[row] + offset, source.row + offset, source.exists, is_aligned);
        }
        copy_commit();
    }
}

// score[m][n] = q . k of the 16 rows m and the 8 positions n of this warp
template <typename M>
__device__ __forceinline__ void meet_keys(const Work<M> & work, float (&score)[M::TILES][M::KEY_TILES][4]) {
    const auto half_of_columns = [&](int half) {
#pragma unroll
        for (int block = half * M::WARPS / 2; block < (half + 1) * M::WARPS / 2; block++) {
            uint32_t keys[M::KEY_TILES][4];
#pragma unroll
            for (int n = 0; n < M::KEY_TILES; n++) {
                const int row = work.warp * M::WARP_POSITIONS + n * 8;
                key_fragment<typename M::KeyRow>(keys[n], work.memory.keys[row], block, work.lane);
            }
#pragma unroll
            for (int step = 0; step < 2; step++) {
#pragma unroll
                for (int m = 0; m < M::TILES; m++) {
                    uint32_t q[4];
                    load_matrices(q, work.memory.q[m * 16 + work.lane % 16] + block * 64 + step * 32 +
                                         work.lane / 16 * 16);
#pragma unroll
                    for (int n = 0; n < M::KEY_TILES; n++) {
                        multiply(score[m][n], q, keys[n][2 * step], keys[n][2 * step + 1]);
                    }
                }
            }
        }
    };
    copy_wait<1 + M::STAGES>();
    __syncwarp();
    half_of_columns(0);
    copy_wait<M::STAGES>();
    __syncwarp();
    half_of_columns(1);
}

// values[m] += weights * the values of a stage in this warp's 32 columns
template <typename M>
__device__ __forceinline__ void meet_values(const Work<M> & work, int stage, float (&values)[M::TILES][4][4]) {
#pragma unroll
    for (int first = stage * M::STAGE; first < (stage + 1) * M::STAGE; first += 16) {
        uint32_t v[4][2];
        value_fragment<typename M::ValueRow>(v, work.memory.values[first], work.warp, work.lane);
#pragma unroll
        for (int m = 0; m < M::TILES; m++) {
            uint32_t p[4];
            load_matrices(p, work.memory.weights[m * 16 + work.lane % 16] + first * 2 + work.lane / 16 * 16);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                multiply(values[m][j], p, v[j][0], v[j][1]);
            }
        }
    }
}

} // namespace attn
} // namespace dflash
