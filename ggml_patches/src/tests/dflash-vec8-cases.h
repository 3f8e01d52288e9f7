#pragma once

// The lane arithmetic of the CPU kernels, in the form that this compiler run chooses (AVX2 or loops).

#include "dflash-harness.h"

#include "../src/ggml-cpu/dflash/vec8.h"

inline float exp_lane(float x) {
    float lanes[dflash::WIDTH];
    dflash::exp(dflash::Vec8::all(x)).store(lanes);
    return lanes[dflash::WIDTH - 1];
}

inline void vec8_cases() {
    counter().label = "vec8";
    double worst = 0; // in units in the last place
    for (int i = 0; i <= 1000000; i++) {
        const float x = -87.0f + 175.0f * (float) i / 1000000;
        const double exact = std::exp((double) x);
        const float near = (float) exact;
        worst = std::max(worst, std::fabs(exp_lane(x) - exact) / (std::nextafter(near, INFINITY) - near));
    }
    counter().expect(worst < 2, "exp is off by %g units in the last place", worst);
    counter().expect(exp_lane(0.0f) == 1.0f, "exp(0)");
    counter().expect(exp_lane(-INFINITY) == exp_lane(-87.0f) && exp_lane(-1e30f) < 1e-37f, "exp of very little");
    counter().expect(exp_lane(INFINITY) == exp_lane(88.0f) && std::isfinite(exp_lane(1e30f)), "exp of very much");
    counter().expect(std::isnan(exp_lane(NAN)), "exp(NaN)");

    const float big = 1 << 25; // shows the order: one of the lost ones comes back only if it meets its like first
    const float order[] = {big, 1, 3, 0, 1, 1, -big, 5};
    const float tree = ((big + 1) + (3 + -big)) + ((1 + 1) + (0.0f + 5));
    counter().expect(dflash::sum(dflash::Vec8::load(order)) == tree, "sum is in another order");

    dflash::Vec8 four[4];
    float single[4], together[4];
    for (int m = 0; m < 4; m++) {
        const Floats x = normal(dflash::WIDTH);
        four[m] = dflash::Vec8::load(x.data());
        single[m] = dflash::sum(four[m]);
    }
    dflash::sum4(four, together);
    counter().expect(same_bits(single, together, 4), "four sums together are others");
}
