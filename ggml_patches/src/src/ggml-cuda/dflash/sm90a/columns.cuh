#pragma once

// mul_mat on Hopper: the columns. Each 256 elements of a column, a super-block, are scaled by a power of two and
// rounded to f16 as mul_mat_columns.cuh does it with whole columns: every super-block is prepared for itself, all at
// once.
//
// A super-block of 8 N8 columns is its steps of [N8][2][8 columns][8 k], one behind the other, and the columns' units.
// First comes a step for the sums of 32 elements, if the weights have minima: half 0 has the larger parts, half 1 the
// rest.

#include "../mul_mat_columns.cuh"
#include "mul_mat.cuh"
#include "wgmma.cuh"

namespace dflash {
namespace wgmma {

constexpr int MAX_N8 = 8; // tiles of 8 columns that meet the weights together

template <ggml_type TYPE> constexpr int HEAD = mm::HAS_MINIMA<TYPE> ? 1 : 0; // steps before those of elements
template <ggml_type TYPE> constexpr int ALL_STEPS = HEAD<TYPE> + mm::STEPS;
template <ggml_type TYPE> constexpr int COLUMN_BYTES = ALL_STEPS<TYPE> * STEP_BYTES + 8 * sizeof(float); // a tile's

// Sum of the rounded elements of a thread's sub-block: it shares it with three others (mm::element).
template <ggml_type TYPE> __device__ __forceinline__ void write_sum(const half (&rounded)[8], half * to) {
    const int lane = (int) threadIdx.x % 32;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        sum += __half2float(rounded[i]);
    }
    sum += __shfl_xor_sync(0xffffffff, sum, 1, 32);
    sum += __shfl_xor_sync(0xffffffff, sum, 4, 32);
    if ((lane & 5) == 0) {
        const half larger = __float2half_rn(sum);
        const int sub_block = lane / 8 * 2 + lane / 2 % 2;
        to[sub_block] = larger;
        to[sub_block + 64] = __float2half_rn(sum - __half2float(larger));
    }
}

// Where prepared columns lie: passes of 64 columns, the last of which may have fewer, super-block by super-block.
struct Place {
    char * columns;
    int n_blocks, last_pass, last_n8;

    template <ggml_type TYPE> __device__ char * block(int pass, int block) const {
        const int64_t n8 = tiles_of(pass);
        return columns + ((int64_t) pass * MAX_N8 * n_blocks + block * n8) * COLUMN_BYTES<TYPE>;
    }

    __device__ int tiles_of(int pass) const { return pass == last_pass ? last_n8 : MAX_N8; }
};

// By a warp: a super-block of a column. x are the elements of thread `lane`: half lane % 2 of step lane / 2.
template <ggml_type TYPE>
__device__ __forceinline__ void write_block(const float (&x)[8], const Place & place, int column, int block) {
    const int lane = (int) threadIdx.x % 32, pass = column / (8 * MAX_N8), tile = column / 8 % MAX_N8;
    uint32_t max_bits = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        max_bits = max(max_bits, (uint32_t) __float_as_int(x[i]) & 0x7FFFFFFF);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        max_bits = max(max_bits, (uint32_t) __shfl_xor_sync(0xffffffff, (int) max_bits, step, 32));
    }
    const mm::ColumnScale scale(max_bits);
    half rounded[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        rounded[i] = scale.apply(x[i]);
    }
    char * to = place.block<TYPE>(pass, block);
    char * of_column = to + tile * STEP_BYTES + column % 8 * 16;
    const int step_bytes = place.tiles_of(pass) * STEP_BYTES;
    *(uint4 *) (of_column + (HEAD<TYPE> + lane / 2) * step_bytes +
                lane % 2 * 128) = {mm::pair_bits(rounded[0], rounded[1]), mm::pair_bits(rounded[2], rounded[3]),
                                   mm::pair_bits(rounded[4], rounded[5]), mm::pair_bits(rounded[6], rounded[7])};
    if constexpr (mm::HAS_MINIMA<TYPE>) {
        write_sum<TYPE>(rounded, (half *) of_column);
    }
    if (lane == 0) {
        *(float *) (to + ALL_STEPS<TYPE> * step_bytes + (tile * 8 + column % 8) * sizeof(float)) = scale.unit;
    }
}

// Element i of the eight that a thread has of a super-block.
template <ggml_type TYPE> __device__ __forceinline__ int element_of(int i) {
    const int lane = (int) threadIdx.x % 32;
    return mm::element<TYPE>(lane / 2, i / 2, lane % 2, i % 2);
}

// Zeroes counters of parts; by all threads of a grid.
__device__ __forceinline__ void clear(const Counters & counters) {
    const int n_threads = gridDim.x * gridDim.y * blockDim.x;
    for (int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x; i < counters.n; i += n_threads) {
        counters.arrived[i] = 0;
    }
}

// A block has a super-block of a tile of 8 columns, a warp one column. Source: what the columns are.
template <ggml_type TYPE, typename Source>
__global__ void __launch_bounds__(256)
    prepare(const Source source, const Place place, const int n_columns, const Counters counters) {
    ggml_cuda_pdl_lc(); // the products fetch weights meanwhile, nothing else
    ggml_cuda_pdl_sync();
    clear(counters);
    const int column = (int) (blockIdx.y * 8 + threadIdx.x / 32);
    float x[8] = {};
    if (column < n_columns) {
        source.template load<TYPE>(x, column, (int) blockIdx.x);
    }
    write_block<TYPE>(x, place, column, (int) blockIdx.x);
}

} // namespace wgmma
} // namespace dflash
