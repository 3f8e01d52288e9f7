#pragma once

// Eight F32 lanes with one meaning on every CPU: AVX2 registers where the build has them, plain loops elsewhere. Both
// give the same bits, because every operation is one IEEE operation per lane and sums have one fixed order.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define DFLASH_VEC8_AVX2
#endif

namespace dflash {

constexpr int WIDTH = 8;

#if defined(DFLASH_VEC8_AVX2)

struct Vec8 {
    __m256 v;

    static Vec8 load(const float * p) { return {_mm256_loadu_ps(p)}; }
    static Vec8 all(float x) { return {_mm256_set1_ps(x)}; }
    void store(float * p) const { _mm256_storeu_ps(p, v); }
};

inline Vec8 operator+(Vec8 a, Vec8 b) {
    return {_mm256_add_ps(a.v, b.v)};
}
inline Vec8 operator-(Vec8 a, Vec8 b) {
    return {_mm256_sub_ps(a.v, b.v)};
}
inline Vec8 operator*(Vec8 a, Vec8 b) {
    return {_mm256_mul_ps(a.v, b.v)};
}
inline Vec8 operator/(Vec8 a, Vec8 b) {
    return {_mm256_div_ps(a.v, b.v)};
}

// a * b + c, rounded once
inline Vec8 fma(Vec8 a, Vec8 b, Vec8 c) {
    return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}

// x limited to low..high; NaN stays NaN
inline Vec8 clamp(Vec8 x, float low, float high) {
    x.v = _mm256_max_ps(_mm256_set1_ps(low), x.v);
    return {_mm256_min_ps(_mm256_set1_ps(high), x.v)};
}

// 2^n from 1.5 * 2^23 + n, -126 <= n <= 127
inline Vec8 power_of_two(Vec8 shifted) {
    const __m256i bits = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
    return {_mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_set1_epi32(0x3F800000)))};
}

// ((0+4) + (2+6)) + ((1+5) + (3+7))
inline float sum(Vec8 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// to[m] = sum(a[m]), m = 0..3, to the bit, with fewer shuffles
inline void sum4(const Vec8 * a, float * to) {
    const auto halves = [](__m256 x, __m256 y) { // four sums of x | four sums of y
        return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
    };
    const __m256 four01 = halves(a[0].v, a[1].v), four23 = halves(a[2].v, a[3].v);
    const __m256 two = _mm256_add_ps(_mm256_unpacklo_ps(four01, four23), _mm256_unpackhi_ps(four01, four23));
    const __m256 one = _mm256_add_ps(two, _mm256_shuffle_ps(two, two, _MM_SHUFFLE(3, 2, 3, 2))); // 0 2 . . | 1 3 . .
    _mm_storeu_ps(to, _mm_unpacklo_ps(_mm256_castps256_ps128(one), _mm256_extractf128_ps(one, 1)));
}

#else

struct Vec8 {
    float v[WIDTH];

    static Vec8 load(const float * p) {
        Vec8 r;
        std::memcpy(r.v, p, sizeof(r.v));
        return r;
    }
    static Vec8 all(float x) { return {{x, x, x, x, x, x, x, x}}; }
    void store(float * p) const { std::memcpy(p, v, sizeof(v)); }
};

template <typename F> inline Vec8 each_lane(F f) {
    Vec8 r;
    for (int l = 0; l < WIDTH; l++) {
        r.v[l] = f(l);
    }
    return r;
}

inline Vec8 operator+(const Vec8 & a, const Vec8 & b) {
    return each_lane([&](int l) { return a.v[l] + b.v[l]; });
}
inline Vec8 operator-(const Vec8 & a, const Vec8 & b) {
    return each_lane([&](int l) { return a.v[l] - b.v[l]; });
}
inline Vec8 operator*(const Vec8 & a, const Vec8 & b) {
    return each_lane([&](int l) { return a.v[l] * b.v[l]; });
}
inline Vec8 operator/(const Vec8 & a, const Vec8 & b) {
    return each_lane([&](int l) { return a.v[l] / b.v[l]; });
}

inline Vec8 fma(const Vec8 & a, const Vec8 & b, const Vec8 & c) {
    return each_lane([&](int l) { return std::fma(a.v[l], b.v[l], c.v[l]); });
}

inline Vec8 clamp(const Vec8 & x, float low, float high) {
    return each_lane([&](int l) {
        const float y = low > x.v[l] ? low : x.v[l];
        return high < y ? high : y;
    });
}

inline Vec8 power_of_two(const Vec8 & shifted) {
    return each_lane([&](int l) {
        uint32_t bits;
        std::memcpy(&bits, &shifted.v[l], sizeof(bits));
        bits = (bits << 23) + 0x3F800000u;
        float power;
        std::memcpy(&power, &bits, sizeof(power));
        return power;
    });
}

inline float sum(const Vec8 & a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}

inline void sum4(const Vec8 * a, float * to) {
    for (int m = 0; m < 4; m++) {
        to[m] = sum(a[m]);
    }
}

#endif

// exp(x) within 2 ulp for -87 <= x <= 88, limited to the values at these ends outside; NaN stays NaN.
inline Vec8 exp(Vec8 x) {
    x = clamp(x, -87.0f, 88.0f);
    const Vec8 shift = Vec8::all(12582912.0f); // 1.5 * 2^23: adding it rounds to the nearest integer
    const Vec8 shifted = fma(x, Vec8::all(1.44269504f), shift);
    const Vec8 n = shifted - shift;
    Vec8 r = fma(n, Vec8::all(-0.693145752f), x); // ln 2 in two parts, the first with few bits
    r = fma(n, Vec8::all(-1.42860677e-6f), r);
    Vec8 p = Vec8::all(1.0f / 5040); // Taylor: |r| <= ln(2)/2, so what is left out is below r^8/8! < 6e-9
    p = fma(p, r, Vec8::all(1.0f / 720));
    p = fma(p, r, Vec8::all(1.0f / 120));
    p = fma(p, r, Vec8::all(1.0f / 24));
    p = fma(p, r, Vec8::all(1.0f / 6));
    p = fma(p, r, Vec8::all(0.5f));
    p = fma(p, r, Vec8::all(1.0f));
    p = fma(p, r, Vec8::all(1.0f));
    return p * power_of_two(shifted);
}

} // namespace dflash
