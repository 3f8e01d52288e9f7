// Grouped dynamic convolution of a draft block. The channels of a group share a coefficient per row and tap. A thread
// computes one number; all that it reads is in flight at once.

#include "kernels.cuh"

namespace dflash {
namespace {

constexpr int THREADS = 256;

struct Node {
    const char *x, *coef, *base;
    float * y;
    size_t x_row, x_lane, coef_tap, coef_row, coef_lane, base_tap; // strides in bytes
    int n_channels, n_rows, group_size, n_taps;
};

__global__ void __launch_bounds__(THREADS) convolve_block(const Node node) {
    ggml_cuda_pdl_sync();
    const int channel = blockIdx.x * THREADS + threadIdx.x, t = blockIdx.y, lane = blockIdx.z;
    if (channel >= node.n_channels) {
        return;
    }
    const char * x = node.x + lane * node.x_lane + t * node.x_row;
    const char * coef = node.coef + lane * node.coef_lane + t * node.coef_row;
    const int group = channel / node.group_size;
    float y = 0.0f;
#pragma unroll
    for (int tap = 0; tap < GGML_DFLASH_MAX_DYNAMIC_TAPS; tap++) {
        if (tap < node.n_taps && tap <= t) { // rows before the block are zero
            const float fixed = ((const float *) (node.base + tap * node.base_tap))[channel];
            const float dynamic = ((const float *) (coef + tap * node.coef_tap))[group];
            y = fmaf(fixed + dynamic, ((const float *) (x - tap * node.x_row))[channel], y);
        }
    }
    node.y[((int64_t) lane * node.n_rows + t) * node.n_channels + channel] = y;
}

} // namespace

void dynamic_conv(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor *x = dst->src[0], *coef = dst->src[1], *base = dst->src[2];
    const int E = (int) x->ne[0], T = (int) x->ne[1], L = (int) x->ne[2];
    const Node node = {(const char *) x->data,
                       (const char *) coef->data,
                       (const char *) base->data,
                       (float *) dst->data,
                       x->nb[1],
                       x->nb[2],
                       coef->nb[1],
                       coef->nb[2],
                       coef->nb[3],
                       base->nb[1],
                       E,
                       T,
                       E / (int) coef->ne[0],
                       (int) coef->ne[1]};
    const dim3 blocks((E + THREADS - 1) / THREADS, T, L);
    ggml_cuda_kernel_launch(convolve_block, ggml_cuda_kernel_launch_params(blocks, dim3(THREADS), 0, ctx.stream()),
                            node);
}

} // namespace dflash
