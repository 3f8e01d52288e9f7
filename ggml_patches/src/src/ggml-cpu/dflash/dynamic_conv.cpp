// Grouped dynamic convolution of a draft block. The channels of a group share a coefficient per row and tap.

#include "dflash/kernels.h"

namespace dflash {
namespace {

// y[c] = sum_tap (base[tap][c] + coef[tap]) * x[t-tap][c] for the channels of a group, from 0 by fma
void run_group(ggml_tensor * dst, int64_t group, int64_t t, int64_t lane) {
    const ggml_tensor *x = dst->src[0], *coef = dst->src[1], *base = dst->src[2];
    const int64_t size = x->ne[0] / coef->ne[0], first = group * size;
    const int64_t n_taps = coef->ne[1] <= t ? coef->ne[1] : t + 1; // rows before the block are zero

    float * y = at<float>(dst, t, lane) + first;
    std::memset(y, 0, size * sizeof(float));
    for (int64_t tap = 0; tap < n_taps; tap++) {
        const float * in = at<float>(x, t - tap, lane) + first;
        const float * fixed = at<float>(base, tap) + first;
        const float dynamic = at<float>(coef, tap, t, lane)[group];
        for (int64_t c = 0; c < size; c++) {
            y[c] = std::fma(fixed[c] + dynamic, in[c], y[c]);
        }
    }
}

} // namespace

void dynamic_conv(const ggml_compute_params * params, ggml_tensor * dst) {
    const int64_t T = dst->ne[1], L = dst->ne[2], n_groups = dst->src[1]->ne[0];
    const Share share(n_groups * T * L, params);
    for (int64_t i = share.begin; i < share.end; i++) {
        run_group(dst, i % n_groups, i / n_groups % T, i / n_groups / T);
    }
}

} // namespace dflash
