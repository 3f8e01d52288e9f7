#pragma once

// mul_mat on Hopper: what a product's columns may be, other than a tensor: the last steps of what makes them are taken
// as they are prepared. load() gives a thread its eight elements of super-block `block` of a column.

#include "columns.cuh"

namespace dflash {
namespace wgmma {

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + expf(-x));
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + expf(-x));
}

// x [K, n]; columns are `stride` elements apart
struct Plain {
    const float * x;
    int64_t stride;

    template <ggml_type TYPE> __device__ void load(float (&to)[8], int column, int block) const {
        const float * from = x + column * stride + block * mm::SUPER;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            to[i] = from[element_of<TYPE>(i)];
        }
    }
};

struct Silu {
    static __device__ float of(float x) { return silu(x); }
};

struct Sigmoid {
    static __device__ float of(float x) { return sigmoid(x); }
};

// x Activation(gate)
template <typename Activation> struct Gated {
    Plain x, gate;

    template <ggml_type TYPE> __device__ void load(float (&to)[8], int column, int block) const {
        float gates[8];
        gate.load<TYPE>(gates, column, block);
        x.load<TYPE>(to, column, block);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            to[i] *= Activation::of(gates[i]);
        }
    }
};

// RMS(x) weight silu(gate): each 128 elements have a norm of their own. Every type has them in 16 threads.
struct NormedHeads {
    static constexpr int HEAD_WIDTH = 128;
    Plain x, gate;
    const float * weight; // [128]
    float eps;

    template <ggml_type TYPE> __device__ void load(float (&to)[8], int column, int block) const {
        static_assert(mm::element<TYPE>(7, 3, 1, 1) < HEAD_WIDTH && mm::element<TYPE>(8, 0, 0, 0) >= HEAD_WIDTH,
                      "half of the steps are one head");
        float gates[8];
        gate.load<TYPE>(gates, column, block);
        x.load<TYPE>(to, column, block);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            sum = fmaf(to[i], to[i], sum);
        }
#pragma unroll
        for (int step = 8; step > 0; step /= 2) {
            sum += __shfl_xor_sync(0xffffffff, sum, step, 32);
        }
        const float scale = rsqrtf(sum / HEAD_WIDTH + eps);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            to[i] = scale * to[i] * weight[element_of<TYPE>(i) % HEAD_WIDTH] * silu(gates[i]);
        }
    }
};

} // namespace wgmma
} // namespace dflash
