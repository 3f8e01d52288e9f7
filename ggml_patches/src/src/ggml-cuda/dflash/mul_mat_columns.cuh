#pragma once

// mul_mat: the columns, as the products take them.
//
// A column is scaled by a power of two, so that its largest magnitude is in [512, 1024), and rounded to f16: an error
// of 2^-12 of an element, or 2^-34 of the largest one, whichever is more. No sum of 32 elements leaves f16, and no sum
// of products F32. The sums of 32 rounded elements, which minima are multiplied with, are kept as two f16 each.

#include "mul_mat_format.cuh"

namespace dflash {
namespace mm {

constexpr int COLUMN_THREADS = 512;
constexpr uint32_t INFINITE = 0x7F800000; // bits of infinity; of a NaN's magnitude they are more

struct ColumnScale {
    float factor, unit; // factor * unit = 1
    bool is_finite;

    // magnitudes below 2^-100 are taken for as small as that
    __device__ explicit ColumnScale(uint32_t max_bits) {
        const int exponent = max((int) (max_bits >> 23), 27);
        is_finite = max_bits < INFINITE;
        factor = __int_as_float((263 - min(exponent, 254)) << 23);
        unit = __int_as_float(is_finite ? (exponent - 9) << 23 : 0x7FC00000);
    }

    __device__ half apply(float x) const { return __float2half_rn(is_finite ? x * factor : 0.0f); }
};

// Largest magnitude of a column, as bits. By all threads of the block.
__device__ __forceinline__ uint32_t largest(const float * x, int64_t n) {
    __shared__ uint32_t of_warps[COLUMN_THREADS / 32];
    uint32_t max_bits = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < n; i += COLUMN_THREADS) {
        max_bits = max(max_bits, (uint32_t) __float_as_int(x[i]) & 0x7FFFFFFF);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        max_bits = max(max_bits, (uint32_t) __shfl_xor_sync(0xffffffff, (int) max_bits, step, 32));
    }
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = max_bits;
    }
    __syncthreads();
    for (int i = 0; i < COLUMN_THREADS / 32; i++) {
        max_bits = max(max_bits, of_warps[i]);
    }
    return max_bits;
}

__device__ __forceinline__ uint32_t pair_bits(half low, half high) {
    return (uint32_t) __half_as_ushort(low) | (uint32_t) __half_as_ushort(high) << 16;
}

// Pair r of a step; x is a super-block.
template <ggml_type TYPE>
__device__ __forceinline__ uint32_t pair_of(const float * x, const ColumnScale & scale, int step, int q, int r) {
    return pair_bits(scale.apply(x[element<TYPE>(step, q, r, 0)]), scale.apply(x[element<TYPE>(step, q, r, 1)]));
}

// x is a sub-block of 32
__device__ __forceinline__ float rounded_sum(const float * x, const ColumnScale & scale) {
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < 32; i++) {
        sum += __half2float(scale.apply(x[i]));
    }
    return sum;
}

// A block per column, those that pad the last tile of 8 included. Zeroes the counters as well.
template <ggml_type TYPE>
__global__ void __launch_bounds__(COLUMN_THREADS)
    prepare_columns(const Node node, const Scratch scratch, const int n_counters) {
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc(); // behind the wait: who comes next may rely on all that was before
    const int column = blockIdx.x, n_tiles = gridDim.x / 8, tile = column / 8, lane = column % 8 * 4;
    for (int i = column * COLUMN_THREADS + threadIdx.x; i < n_counters; i += gridDim.x * COLUMN_THREADS) {
        scratch.arrived[i] = 0;
    }
    const int64_t n = column < node.n_columns ? (int64_t) node.n_blocks * SUPER : 0;
    const float * x = node.x + (n > 0 ? column * n : 0);
    const ColumnScale scale(largest(x, n));
    if (threadIdx.x == 0) {
        scratch.units[column] = scale.unit;
    }
    for (int i = threadIdx.x; i < node.n_blocks * (STEPS / 2 * 4); i += COLUMN_THREADS) {
        const int q = i % 4, steps = i / 4, step = steps % (STEPS / 2) * 2;
        const float * block = x + (int64_t) (steps / (STEPS / 2)) * SUPER;
        uint4 pairs = {};
        if (n > 0) {
            pairs.x = pair_of<TYPE>(block, scale, step, q, 0), pairs.y = pair_of<TYPE>(block, scale, step, q, 1);
            pairs.z = pair_of<TYPE>(block, scale, step + 1, q, 0);
            pairs.w = pair_of<TYPE>(block, scale, step + 1, q, 1);
        }
        scratch.columns[((int64_t) steps * n_tiles + tile) * 32 + lane + q] = pairs;
    }
    if (HAS_MINIMA<TYPE>) {
        for (int i = threadIdx.x; i < node.n_blocks * 4; i += COLUMN_THREADS) {
            const float * sub_blocks = x + (int64_t) i * 64; // 2q and 2q + 1
            uint4 pairs = {};                                // the second step has nothing
            if (n > 0) {
                const float a = rounded_sum(sub_blocks, scale), b = rounded_sum(sub_blocks + 32, scale);
                const half a_high = __float2half_rn(a), b_high = __float2half_rn(b);
                pairs.x = pair_bits(a_high, b_high);
                pairs.y =
                    pair_bits(__float2half_rn(a - __half2float(a_high)), __float2half_rn(b - __half2float(b_high)));
            }
            scratch.sums[((int64_t) (i / 4) * n_tiles + tile) * 32 + lane + i % 4] = pairs;
        }
    }
}

} // namespace mm
} // namespace dflash
