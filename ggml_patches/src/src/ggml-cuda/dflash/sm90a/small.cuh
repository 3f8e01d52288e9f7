#pragma once

// Small steps between products, several nodes of a graph in one launch.

#include "sources.cuh"

namespace dflash {
namespace wgmma {

// decay [h, n] = softplus(x + bias) a of the first h rows of x [m, n], sigmoids [m, n] of all of them. May lie over x.
struct Gates {
    const float *x, *bias, *a;
    float *decay, *sigmoids;
    int h, m, n;
};

static __global__ void __launch_bounds__(256) gates_of(const Gates node) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int i = (int) (blockIdx.x * 256 + threadIdx.x), row = i % node.m, column = i / node.m;
    if (column >= node.n) {
        return;
    }
    const float x = node.x[i];
    if (row < node.h) {
        const float y = x + node.bias[row];
        node.decay[column * node.h + row] = (y > 20.0f ? y : logf(1.0f + expf(y))) * node.a[row];
    }
    node.sigmoids[i] = sigmoid(x);
}

// y = RMS(x) weight, rows of 128; x [128, n1, n2, n3] with strides, y packed. A warp per row. y may lie over x.
struct HeadNorms {
    const float *x, *weight;
    float * y;
    int64_t strides[3]; // in floats
    int n1, n2, n_rows;
    float eps;
};

static __global__ void __launch_bounds__(256) norm_heads(const HeadNorms node) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int row = (int) (blockIdx.x * 8 + threadIdx.x / 32), lane = (int) threadIdx.x % 32;
    if (row >= node.n_rows) {
        return;
    }
    const int64_t from = row % node.n1 * node.strides[0] + row / node.n1 % node.n2 * node.strides[1] +
                         row / node.n1 / node.n2 * node.strides[2];
    const float4 x = ((const float4 *) (node.x + from))[lane], w = ((const float4 *) node.weight)[lane];
    float sum = x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xffffffff, sum, step, 32);
    }
    const float scale = rsqrtf(sum / NormedHeads::HEAD_WIDTH + node.eps);
    ((float4 *) (node.y + (int64_t) row * NormedHeads::HEAD_WIDTH))[lane] = {scale * x.x * w.x, scale * x.y * w.y,
                                                                             scale * x.z * w.z, scale * x.w * w.w};
}

// Rows of F32 into rows of Q8_0, each at its index. A warp per block of 32. Strides in bytes.
struct StoredRows {
    const char * x;
    const int32_t * rows;
    char * y;
    int64_t x_row, y_row;
    int n_blocks, n_rows; // of a row; of x
};

static __global__ void __launch_bounds__(256) store_rows(const StoredRows node) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int i = (int) (blockIdx.x * 8 + threadIdx.x / 32), lane = (int) threadIdx.x % 32;
    const int row = i / node.n_blocks, block = i % node.n_blocks;
    if (row >= node.n_rows) {
        return;
    }
    const float x = ((const float *) (node.x + row * node.x_row))[block * QK8_0 + lane];
    float largest = fabsf(x);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, step, 32));
    }
    const float d = largest / 127.0f, inverse = d > 0.0f ? 1.0f / d : 0.0f;
    block_q8_0 & to = ((block_q8_0 *) (node.y + node.rows[row] * node.y_row))[block];
    to.qs[lane] = (int8_t) roundf(x * inverse);
    if (lane == 0) {
        to.d = __float2half_rn(d);
    }
}

} // namespace wgmma
} // namespace dflash
