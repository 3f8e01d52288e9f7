#pragma once

// mul_mat: the columns, as the products take them.
//
// Of each 256 elements of a column, the largest magnitude counts as 32512 and all are rounded to integers of it: an
// error of at most 2^-16 of the largest. An integer is 256 high + low, two digits of a signed byte each. A sum of 32
// integers, which minima are multiplied with, is 1024 high + low, of which f16 holds 32 high and low exactly.

#include "mul_mat_format.cuh"

namespace dflash {
namespace mm {

constexpr int COLUMN_THREADS = 128;       // a warp for each column of a tile
constexpr uint32_t INFINITE = 0x7F800000; // bits of infinity; of a NaN's magnitude they are more
constexpr float LARGEST = 32512.0f;

struct ColumnUnit {
    float factor, unit; // factor * unit = 1
    bool is_finite;

    // Magnitudes below 2^-111 are taken for as small as that: units are no subnormal numbers.
    __device__ explicit ColumnUnit(uint32_t max_bits) {
        is_finite = max_bits < INFINITE;
        const float largest = fmaxf(is_finite ? __int_as_float((int) max_bits) : 0.0f, 0x1p-111f);
        factor = LARGEST / largest;
        unit = is_finite ? largest / LARGEST : __int_as_float(0x7FC00000);
    }

    __device__ int apply(float x) const { return is_finite ? __float2int_rn(x * factor) : 0; }
};

__device__ __forceinline__ uint32_t largest_of_warp(const float (&x)[8]) {
    uint32_t max_bits = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        max_bits = max(max_bits, (uint32_t) __float_as_int(x[i]) & 0x7FFFFFFF);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        max_bits = max(max_bits, (uint32_t) __shfl_xor_sync(0xffffffff, (int) max_bits, step, 32));
    }
    return max_bits;
}

__device__ __forceinline__ uint32_t pair_bits(int low, int high) {
    return (uint32_t) __half_as_ushort(__float2half_rn((float) low)) |
           (uint32_t) __half_as_ushort(__float2half_rn((float) high)) << 16;
}

// sum: of this thread's 8 elements. The first thread of two sub-blocks writes their sums; they are digit 0 of a column,
// digit 1 is zero.
__device__ __forceinline__ void write_sums(uint2 * sums, int n_tiles, int tile, int column, int lane, int sum) {
    sum += __shfl_xor_sync(0xffffffff, sum, 1, 32);
    sum += __shfl_xor_sync(0xffffffff, sum, 2, 32);
    const int next = __shfl_xor_sync(0xffffffff, sum, 4, 32);
    if (lane % 8 == 0) {
        const int high = (sum + 512) >> 10, next_high = (next + 512) >> 10, at = column * 8 + lane / 8;
        sums[place_in_step(n_tiles, tile, at)] = {pair_bits(32 * high, 32 * next_high),
                                                  pair_bits(sum - 1024 * high, next - 1024 * next_high)};
        sums[place_in_step(n_tiles, tile, at + 4)] = {0, 0};
    }
}

// A block per super-block and tile of columns, those that pad the last tile included. Zeroes the counters as well.
template <ggml_type TYPE>
__global__ void __launch_bounds__(COLUMN_THREADS)
    prepare_columns(const Node node, const Scratch scratch, const int n_tiles, const int n_counters) {
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc(); // behind the wait: who comes next may rely on all that was before
    const int first = (int) blockIdx.x * COLUMN_THREADS + (int) threadIdx.x;
    for (int i = first; i < n_counters; i += (int) gridDim.x * COLUMN_THREADS) {
        scratch.arrived[i] = 0;
    }
    const int64_t block = blockIdx.x / n_tiles;
    const int tile = blockIdx.x % n_tiles, of_tile = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int column = tile * 4 + of_tile, step = lane / 4, q = lane % 4;
    float x[8] = {};
    if (column < node.n_columns) {
        const float * from = node.x + (column * (int64_t) node.n_blocks + block) * SUPER;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = from[element<TYPE>(step, q, i)];
        }
    }
    const ColumnUnit unit(largest_of_warp(x));
    uint32_t high[2] = {}, low[2] = {};
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int number = unit.apply(x[i]), digit = (number + 128) >> 8;
        high[i / 4] |= (uint32_t) (digit & 0xFF) << i % 4 * 8;
        low[i / 4] |= (uint32_t) (number & 0xFF) << i % 4 * 8; // of number - 256 digit
        sum += number;
    }
    uint2 * columns = scratch.columns + (block * STEPS + step) * n_tiles * 32;
    columns[place_in_step(n_tiles, tile, of_tile * 8 + q)] = {high[0], high[1]};
    columns[place_in_step(n_tiles, tile, of_tile * 8 + 4 + q)] = {low[0], low[1]};
    if (HAS_MINIMA<TYPE>) {
        write_sums(scratch.sums + block * n_tiles * 32, n_tiles, tile, of_tile, lane, sum);
    }
    if (lane == 0) {
        scratch.units[block * n_tiles * 4 + column] = unit.unit;
    }
}

} // namespace mm
} // namespace dflash
