#pragma once

// How what a row met in one place and what it met in the next become one, and the kernel that ends the sum.

#include "attention_work.cuh"
#include "numbers.cuh"

namespace dflash {
namespace attn {

// Of a row and some positions: the largest score, and the sum of exp(score - max).
struct Sums {
    float max = -INFINITY, sum = 0.0f;
};

// Factors for the values: values = keep * values + add * next values.
struct Factors {
    float keep, add;

    __device__ float apply(float values, float next) const { return fmaf(add, next, keep * values); }
};

// Nothing, folded with anything, is that to the bit: keep meets zeros only and add is 1.
__device__ __forceinline__ Factors fold(Sums & sums, const Sums & next) {
    const float rise = next.max - sums.max, smaller = exp_same(-fabsf(rise));
    const Factors factors = {rise > 0.0f ? smaller : 1.0f, rise > 0.0f ? 1.0f : smaller};
    sums.sum = factors.apply(sums.sum, next.sum);
    sums.max = fmaxf(sums.max, next.max);
    return factors;
}

// Two neighbouring columns of a row.
struct Partial {
    Sums sums;
    float2 values = {0.0f, 0.0f};

    __device__ void add(const Partial & next) {
        const Factors factors = fold(sums, next.sums);
        values.x = factors.apply(values.x, next.values.x);
        values.y = factors.apply(values.y, next.values.y);
    }
};

// By all threads of a block: is a page missing that the row needs?
__device__ __forceinline__ bool misses_a_page(const Node & node, int slot, Range range) {
    const int32_t * pages = node.table + (int64_t) slot * node.max_pages;
    bool missing = false;
    for (int page = range.first / PAGE + threadIdx.x; page <= (range.end - 1) / PAGE; page += blockDim.x) {
        missing |= pages[page] < 0 || pages[page] >= node.n_pages;
    }
    return __syncthreads_or(missing);
}

// The tree above the units first..last of a row. `load(unit)` gives a unit's partial.
template <typename Load> __device__ __forceinline__ Partial fold_units(int level, int first, int last, Load load) {
    constexpr int AHEAD = 8;
    const int in_group = (1 << max(bits_of(GROUP_LEVEL) - bits_of(level), 0)) - 1; // number of a unit there: these bits
    const int in_super = (1 << (bits_of(SUPER_LEVEL) - bits_of(level))) - 1;
    Partial group, super, total;
    for (int from = first; from <= last; from += AHEAD) {
        Partial ahead[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (from + i <= last) {
                ahead[i] = load(from + i);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            const int unit = from + i;
            if (unit <= last) {
                group.add(ahead[i]);
                if ((unit & in_group) == in_group || unit == last) {
                    super.add(group);
                    group = Partial();
                }
                if ((unit & in_super) == in_super || unit == last) {
                    total.add(super);
                    super = Partial();
                }
            }
        }
    }
    return total;
}

// A block per row of a tile and kv head, a thread per pair of columns.
template <typename Layout>
__global__ void __launch_bounds__(Layout::THREADS) combine(const Node node, const Cut cut, const Scratch scratch) {
    const int tile_row = blockIdx.x % cut.tile_rows;
    const int kv_head = blockIdx.x / cut.tile_rows % node.n_kv_heads;
    const int job_index = blockIdx.x / cut.tile_rows / node.n_kv_heads;
    const Job job(node, cut, job_index);
    const int row = job.row_of(cut, tile_row);
    if (row >= node.rows_per_kv_head()) {
        return;
    }
    const Range range = job.visible(node, cut, tile_row);
    const bool is_live = range.end > 0 && !misses_a_page(node, job.lane.slot, range);
    ggml_cuda_pdl_sync();

    constexpr int PAIRS = Layout::D / 2;
    const int pair = threadIdx.x;
    if (pair >= PAIRS) {
        return;
    }
    float2 result = {0.0f, 0.0f};
    if (is_live) {
        const int level = scratch.plan[0];
        const int bits = cut.split_bits + bits_of(level);
        const int start = scratch.plan[1 + job_index], end = scratch.plan[2 + job_index];
        const int first_place = start + (end - start) / node.n_kv_heads * kv_head - (job.seen.first >> bits);
        const Partial total = fold_units(level, range.first >> bits, (range.end - 1) >> bits, [&](int number) {
            const int64_t place = first_place + number;
            const float2 sums = scratch.sums[place * cut.tile_rows + tile_row];
            Partial partial;
            partial.sums = {sums.x, sums.y};
            partial.values = scratch.values[place * cut.tile_rows * PAIRS + Layout::place(tile_row, pair)];
            return partial;
        });
        const float norm = 1.0f / total.sums.sum;
        result.x = norm * total.values.x;
        result.y = norm * total.values.y;
    }
    const int64_t head = kv_head * node.gqa + row % node.gqa;
    float * out = node.out + (((int64_t) job.lane_index * node.T + row / node.gqa) * node.n_q_heads + head) * Layout::D;
    ((float2 *) out)[Layout::column(pair) / 2] = result;
}

} // namespace attn
} // namespace dflash
