// Grouped dynamic convolution of a draft block: a number of the result is one work-item's.

#include "kernels.hpp"

namespace dflash {

struct DynamicConv {
    View x, coef, base, out;
    int n_channels, group_width, n_taps;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), t = (int) item.get_group(1);
        const int e = (int) item.get_global_id(2);
        if (e >= n_channels) {
            return;
        }
        float sum = 0.0f;
        for (int tap = 0; tap < n_taps && tap <= t; tap++) { // rows before the block are zero
            const float weight = base.at<float>(tap)[e] + coef.at<float>(tap, t, lane)[e / group_width];
            sum = sycl::fma(weight, x.at<float>(t - tap, lane)[e], sum);
        }
        out.at<float>(t, lane)[e] = sum;
    }
};

void dynamic_conv(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    DynamicConv kernel;
    kernel.x = View(dst->src[0]), kernel.coef = View(dst->src[1]), kernel.base = View(dst->src[2]);
    kernel.out = View(dst);
    kernel.n_channels = (int) dst->ne[0];
    kernel.group_width = (int) (dst->ne[0] / dst->src[1]->ne[0]);
    kernel.n_taps = (int) dst->src[1]->ne[1];
    const int n_groups = (kernel.n_channels + GROUP_SIZE - 1) / GROUP_SIZE;
    launch(ctx, dst->ne[2], dst->ne[1], n_groups, GROUP_SIZE, [&](sycl::handler &) { return kernel; });
}

} // namespace dflash
