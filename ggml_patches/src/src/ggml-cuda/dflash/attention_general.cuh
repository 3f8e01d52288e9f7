#pragma once

// Attention in F32 on any device, for every head width and type of pages: four warps of four rows share one page at a
// time in shared memory, its keys first, then its values.

#include "attention_fold.cuh"

namespace dflash {
namespace attn {

// A unit's values lie row by row in the scratch memory.
template <int D_> struct RowLayout {
    static constexpr int D = D_, THREADS = D < 64 ? 32 : D / 2; // of the combining kernel

    static __device__ int place(int tile_row, int pair) { return tile_row * (D / 2) + pair; }
    static __device__ int column(int pair) { return 2 * pair; }
};

template <int D_> struct General {
    static constexpr int D = D_;
    static constexpr int WARPS = 4, WARP_ROWS = 4, THREADS = 32 * WARPS, TILE_ROWS = WARPS * WARP_ROWS;
    static constexpr int SPLIT = 256;
    static constexpr int PITCH = D + 4;           // of a page's rows, so that banks differ
    static constexpr int LANES = D < 32 ? D : 32; // that hold values
    static constexpr int COLUMNS = D / LANES;     // lane + 32 c
    using Layout = RowLayout<D>;
};

__device__ __forceinline__ float element(ggml_type type, const char * row, int i) {
    if (type == GGML_TYPE_F32) {
        return ((const float *) row)[i];
    }
    if (type == GGML_TYPE_F16) {
        return __half2float(((const half *) row)[i]);
    }
    const block_q8_0 & block = ((const block_q8_0 *) row)[i / QK8_0];
    return __half2float(block.d) * block.qs[i % QK8_0];
}

// Rows of a page, those outside first..end-1 as zeros. By all threads, a barrier before and behind.
template <typename G>
__device__ __forceinline__ void stage(float (&to)[PAGE][G::PITCH], ggml_type type, const char * page, int64_t stride,
                                      int first, int end) {
    __syncthreads();
    for (int i = threadIdx.x; i < PAGE * G::D; i += G::THREADS) {
        const int row = i / G::D, column = i % G::D;
        to[row][column] = row >= first && row < end ? element(type, page + row * stride, column) : 0.0f;
    }
    __syncthreads();
}

// What the rows of a warp met; a thread holds some columns of each.
template <typename G> struct Rows {
    Sums sums[G::WARP_ROWS];
    float values[G::WARP_ROWS][G::COLUMNS] = {};

    // next where a row met anything; then next is nothing again
    __device__ void take(Rows & next) {
#pragma unroll
        for (int r = 0; r < G::WARP_ROWS; r++) {
            if (next.sums[r].sum != 0.0f) {
                const Factors factors = fold(sums[r], next.sums[r]);
#pragma unroll
                for (int c = 0; c < G::COLUMNS; c++) {
                    values[r][c] = factors.apply(values[r][c], next.values[r][c]);
                }
            }
        }
        next = Rows();
    }

    __device__ void write(const Scratch & scratch, int64_t unit, int warp, int lane) const {
        if (lane >= G::LANES) {
            return;
        }
#pragma unroll
        for (int r = 0; r < G::WARP_ROWS; r++) {
            const int64_t row = unit * G::TILE_ROWS + warp * G::WARP_ROWS + r;
            scratch.sums[row] = {sums[r].max, sums[r].sum};
#pragma unroll
            for (int c = 0; c < G::COLUMNS; c++) {
                ((float *) scratch.values)[row * G::D + lane + 32 * c] = values[r][c];
            }
        }
    }
};

// Scores of the position lane % 16 of a page; each half of the warp sums half of the columns.
template <typename G>
__device__ __forceinline__ void scores(float (&score)[G::WARP_ROWS], const float (*q)[G::D],
                                       const float (&k)[PAGE][G::PITCH], int lane) {
    constexpr int HALF = G::D / 2;
    const int from = lane / PAGE * HALF;
    float4 acc[G::WARP_ROWS] = {};
#pragma unroll 4
    for (int i = from; i < from + HALF; i += 4) {
        const float4 b = *(const float4 *) &k[lane % PAGE][i];
#pragma unroll
        for (int r = 0; r < G::WARP_ROWS; r++) {
            const float4 a = *(const float4 *) &q[r][i];
            acc[r].x = fmaf(a.x, b.x, acc[r].x);
            acc[r].y = fmaf(a.y, b.y, acc[r].y);
            acc[r].z = fmaf(a.z, b.z, acc[r].z);
            acc[r].w = fmaf(a.w, b.w, acc[r].w);
        }
    }
#pragma unroll
    for (int r = 0; r < G::WARP_ROWS; r++) {
        const float sum = (acc[r].x + acc[r].y) + (acc[r].z + acc[r].w);
        score[r] = sum + __shfl_xor_sync(0xffffffff, sum, PAGE, 32);
    }
}

// A row meets a page: the weight of position lane % 16, the sum so far scaled.
template <typename G> __device__ __forceinline__ float weigh(Rows<G> & rows, int r, float score, bool sees) {
    float max = sees ? score : -INFINITY;
    for (int step = PAGE / 2; step > 0; step /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, step, 32));
    }
    max = fmaxf(rows.sums[r].max, max);
    const float weight = sees ? exp_same(score - max) : 0.0f;
    float sum = weight;
    for (int step = PAGE / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, step, 32);
    }
    const float keep = exp_same(rows.sums[r].max - max);
    rows.sums[r].sum = fmaf(keep, rows.sums[r].sum, sum);
    rows.sums[r].max = max;
#pragma unroll
    for (int c = 0; c < G::COLUMNS; c++) {
        rows.values[r][c] *= keep;
    }
    return weight;
}

template <typename G> struct GeneralMemory {
    Plan plan;
    __align__(16) float q[G::TILE_ROWS][G::D];
    __align__(16) float page[PAGE][G::PITCH];
};

// Positions of one page; range[r] is what row r sees.
template <typename G>
__device__ __forceinline__ void meet_page(Rows<G> & rows, GeneralMemory<G> & memory, const Node & node, const Job & job,
                                          int kv_head, int page, const Range (&range)[G::WARP_ROWS]) {
    const int physical = node.table[(int64_t) job.lane.slot * node.max_pages + page];
    if (physical < 0 || physical >= node.n_pages) {
        return; // the rows that need it become zeros in the end
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int64_t first_row = (int64_t) physical * PAGE;
    const int first = max(job.seen.first - page * PAGE, 0), end = min(job.seen.end - page * PAGE, PAGE);

    stage<G>(memory.page, node.k_type, node.k + first_row * node.k_row + kv_head * node.k_head, node.k_row, first, end);
    float score[G::WARP_ROWS];
    scores<G>(score, &memory.q[warp * G::WARP_ROWS], memory.page, lane);
#pragma unroll
    for (int r = 0; r < G::WARP_ROWS; r++) {
        const int position = page * PAGE + lane % PAGE;
        const bool sees = position >= range[r].first && position < range[r].end;
        score[r] = range[r].meets(page * PAGE, (page + 1) * PAGE) ? weigh(rows, r, node.scale * score[r], sees) : 0.0f;
    }

    stage<G>(memory.page, node.v_type, node.v + first_row * node.v_row + kv_head * node.v_head, node.v_row, first, end);
    for (int i = first; i < end; i++) {
        const int position = page * PAGE + i;
#pragma unroll
        for (int r = 0; r < G::WARP_ROWS; r++) {
            const float weight = __shfl_sync(0xffffffff, score[r], i, 32);
            if (position >= range[r].first && position < range[r].end && lane < G::LANES) {
#pragma unroll
                for (int c = 0; c < G::COLUMNS; c++) {
                    rows.values[r][c] = fmaf(weight, memory.page[i][lane + 32 * c], rows.values[r][c]);
                }
            }
        }
    }
}

// Queries of a tile, zeros where it has no row; a barrier must follow.
template <typename G>
__device__ __forceinline__ void load_queries(float (&to)[G::TILE_ROWS][G::D], const Node & node, const Cut & cut,
                                             const Job & job, int kv_head) {
    for (int i = threadIdx.x; i < G::TILE_ROWS * G::D; i += G::THREADS) {
        const int row = job.row_of(cut, i / G::D), t = row / node.gqa;
        const int64_t head = kv_head * node.gqa + row % node.gqa;
        const char * q = node.q + head * node.q_head + t * node.q_row + job.lane_index * node.q_lane;
        to[i / G::D][i % G::D] = t < job.lane.n_live ? ((const float *) q)[i % G::D] : 0.0f;
    }
}

template <typename G>
__global__ void __launch_bounds__(G::THREADS, 2) general(const Node node, const Cut cut, const Scratch scratch) {
    __shared__ GeneralMemory<G> memory;
    ggml_cuda_pdl_sync();
    make_plan(memory.plan, node, cut, scratch);
    ggml_cuda_pdl_lc();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    for (int index = blockIdx.x; index < memory.plan.n_units(cut); index += gridDim.x) {
        const Unit unit = memory.plan.unit(node, cut, index);
        const Job job(node, cut, unit.job);
        __syncthreads(); // the last unit's queries are done with
        load_queries<G>(memory.q, node, cut, job, unit.kv_head);
        Range range[G::WARP_ROWS];
        for (int r = 0; r < G::WARP_ROWS; r++) {
            range[r] = job.visible(node, cut, warp * G::WARP_ROWS + r);
        }

        Rows<G> split, group, all;
        for (int s = unit.first_split; s < unit.end_split; s++) {
            const int first = max(s * G::SPLIT, job.seen.first), end = min((s + 1) * G::SPLIT, job.seen.end);
            for (int page = first / PAGE; page <= (end - 1) / PAGE; page++) {
                meet_page<G>(split, memory, node, job, unit.kv_head, page, range);
            }
            group.take(split);
            if ((s + 1) % splits_of(GROUP_LEVEL) == 0 || s + 1 == unit.end_split) {
                all.take(group);
            }
        }
        all.write(scratch, index, warp, lane);
    }
}

} // namespace attn
} // namespace dflash
