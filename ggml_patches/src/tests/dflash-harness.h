#pragma once

// What the native op tests share: backends, runs between guard bytes, values and comparisons, the case counter.
// Everything goes through ggml-backend calls, so that the same cases run on every device.

#include "dflash-backend.h"
#include "dflash-counter.h"
#include "dflash-run.h"
#include "dflash-tolerances.h"
#include "ggml-alloc.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>

typedef std::vector<float> Floats;
typedef std::vector<int32_t> Ints;

inline std::mt19937 & random_engine() {
    static std::mt19937 engine(20240607);
    return engine;
}

inline Floats normal(size_t n, float deviation = 1.0f, float mean = 0.0f) {
    std::normal_distribution<float> distribution(mean, deviation);
    Floats data(n);
    for (float & x : data) {
        x = distribution(random_engine());
    }
    return data;
}

inline Floats nans(size_t n) {
    return Floats(n, std::nanf(""));
}

inline bool same_bits(const float * a, const float * b, size_t n) {
    return std::memcmp(a, b, n * sizeof(float)) == 0;
}

inline bool same_bits(const Floats & a, const Floats & b) {
    return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

inline bool all_zero(const float * a, size_t n) {
    return std::all_of(a, a + n, [](float x) { return x == 0.0f; });
}

// largest |a - b|; NaN on either side counts as infinite
inline double distance(const Floats & a, const std::vector<double> & b) {
    double worst = a.size() == b.size() ? 0.0 : INFINITY;
    for (size_t i = 0; i < a.size() && i < b.size(); i++) {
        const double d = std::fabs(a[i] - b[i]);
        worst = d <= worst ? worst : std::isnan(d) ? INFINITY : d;
    }
    return worst;
}
