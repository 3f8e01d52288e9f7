#pragma once

// Columns of products that are normed rows, from the rows: x [+ y], RMS norm, weight, and the columns of each product.

#include "by_type.cuh"

namespace dflash {
namespace wgmma {

constexpr int MAX_PRODUCTS = 2, MAX_ROW = 12 * 1024; // of one row; its elements, which go to shared memory

struct Target {
    ggml_type type;
    Place place;
    Counters counters;
};

struct Normed {
    const float *x, *y; // [K, n] each; y may be missing
    float * sum;        // x + y, where y is there; may be x or y
    const float * weight;
    float eps;
    int n_blocks, n_columns, n_targets;
    Target targets[MAX_PRODUCTS];
};

// Sum over a block of at most 32 warps, the same for all threads.
__device__ __forceinline__ float sum_of_block(float x) {
    __shared__ float of_warps[32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, step, 32);
    }
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = x;
    }
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < (int) blockDim.x / 32; i++) {
        sum += of_warps[i];
    }
    return sum;
}

// By all warps of a block: a column from shared memory, or one of padding.
template <ggml_type TYPE>
__device__ __forceinline__ void write_row(const float * row, const Place & place, int column, bool exists) {
    for (int block = threadIdx.x / 32; block < place.n_blocks; block += (int) blockDim.x / 32) {
        float x[8] = {};
        if (exists) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] = row[block * mm::SUPER + element_of<TYPE>(i)];
            }
        }
        write_block<TYPE>(x, place, column, block);
    }
}

// A block per column, those of padding included; with node.n_blocks or 32 warps.
static __global__ void __launch_bounds__(1024) norm_columns(const Normed node) {
    extern __shared__ float4 row[];
    constexpr int MOST = MAX_ROW / 4 / 1024; // of four elements that a thread has
    const int column = (int) blockIdx.x, n = node.n_blocks * (mm::SUPER / 4);
    float4 weights[MOST], x[MOST];
    ggml_cuda_pdl_lc();
    // Constant, so there is no need to wait; from memory, since nobody read them lately.
#pragma unroll
    for (int i = 0; i < MOST; i++) {
        const int at = (int) (threadIdx.x + i * blockDim.x);
        weights[i] = at < n ? ((const float4 *) node.weight)[at] : float4{};
    }
    ggml_cuda_pdl_sync();
    if (column < node.n_columns) {
        const int64_t begin = (int64_t) column * n;
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            const int at = (int) (threadIdx.x + i * blockDim.x);
            x[i] = at < n ? ((const float4 *) node.x)[begin + at] : float4{};
            if (node.y != nullptr && at < n) {
                const float4 y = ((const float4 *) node.y)[begin + at];
                x[i].x += y.x, x[i].y += y.y, x[i].z += y.z, x[i].w += y.w;
                ((float4 *) node.sum)[begin + at] = x[i];
            }
            squares += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
        }
        const float scale = rsqrtf(sum_of_block(squares) / (float) (n * 4) + node.eps);
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            const int at = (int) (threadIdx.x + i * blockDim.x);
            const float4 w = weights[i];
            if (at < n) {
                row[at] = {x[i].x * (scale * w.x), x[i].y * (scale * w.y), x[i].z * (scale * w.z),
                           x[i].w * (scale * w.w)};
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < node.n_targets; i++) {
        const Target & target = node.targets[i];
        clear(target.counters);
        switch (target.type) {
#define DFLASH_CASE(TYPE)                                                                                              \
    case TYPE:                                                                                                         \
        write_row<TYPE>((const float *) row, target.place, column, column < node.n_columns);                           \
        break;
            DFLASH_TYPES(DFLASH_CASE)
#undef DFLASH_CASE
        default:
            break;
        }
    }
}

} // namespace wgmma
} // namespace dflash
