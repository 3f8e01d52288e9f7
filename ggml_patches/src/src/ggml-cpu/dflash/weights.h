#pragma once

// What a token weighs in top-p, as a whole number, so that a sum of weights does not depend on its order.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace dflash {

// floor(exp(d) * 2^32) for d <= 0, by the recipe in ggml_patches/README.md
inline uint64_t fixed_weight(float d) {
    if (!(d > -23.0f)) {
        return 0;
    }
    const float n = std::rint(d * (float) 1.4426950408889634);
    const float r = (d - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = (float) (1.0 / 720) + r * (float) (1.0 / 5040);
    p = (float) (1.0 / 120) + r * p;
    p = (float) (1.0 / 24) + r * p;
    p = (float) (1.0 / 6) + r * p;
    p = 0.5f + r * p;
    p = 1.0f + r * p;
    p = 1.0f + r * p;
    const int32_t bits = ((int32_t) n + 32 + 127) * (1 << 23); // of 2^(n + 32)
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return (uint64_t) (p * power);
}

} // namespace dflash
