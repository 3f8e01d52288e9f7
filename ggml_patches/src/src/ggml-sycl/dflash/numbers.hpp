#pragma once

// Arithmetic that must give the CPU's bits: every + - * here is one IEEE operation (kernels.hpp sees to that), an fma
// is one where it is written, and a quotient that must be rounded correctly is divide(). F32 subnormals are kept by
// OpenCL and Level Zero unless a build option of the device compiler takes them away; none here does.

#include "kernels.hpp"

#include <cstdint>

namespace dflash {

inline uint32_t bits_of(float x) {
    return sycl::bit_cast<uint32_t>(x);
}

inline float float_of(uint32_t bits) {
    return sycl::bit_cast<float>(bits);
}

// By bits, so that a compiler that assumes there are none cannot answer.
inline bool is_nan(float x) {
    return (bits_of(x) & 0x7FFFFFFFu) > 0x7F800000u;
}

// exp as the CPU kernels compute it (vec8.h): x limited to -87..88, NaN stays NaN
inline float exp_same(float x) {
    x = -87.0f > x ? -87.0f : x;
    x = 88.0f < x ? 88.0f : x;
    const float shift = 12582912.0f; // 1.5 * 2^23: adding it rounds to the nearest integer
    const float shifted = sycl::fma(x, 1.44269504f, shift);
    const float n = shifted - shift;
    float r = sycl::fma(n, -0.693145752f, x); // ln 2 in two parts, the first with few bits
    r = sycl::fma(n, -1.42860677e-6f, r);
    float p = (float) (1.0 / 5040);
    p = sycl::fma(p, r, (float) (1.0 / 720));
    p = sycl::fma(p, r, (float) (1.0 / 120));
    p = sycl::fma(p, r, (float) (1.0 / 24));
    p = sycl::fma(p, r, (float) (1.0 / 6));
    p = sycl::fma(p, r, 0.5f);
    p = sycl::fma(p, r, 1.0f);
    p = sycl::fma(p, r, 1.0f);
    return p * float_of((bits_of(shifted) << 23) + 0x3F800000u);
}

// a / b, rounded to nearest. The / of a GPU may be 2.5 units off, so the remainder, which fma gives exactly, decides
// between neighbours. Where a or b is so large or small that it would not be exact, the device's / stands.
inline float divide(float a, float b) {
    float quotient = a / b;
    const auto is_moderate = [](float x) { return sycl::fabs(x) > 0x1p-60f && sycl::fabs(x) < 0x1p60f; };
    if (!is_moderate(a) || !is_moderate(b)) {
        return quotient;
    }
    float rest = sycl::fma(-quotient, b, a);
    const uint32_t step = (rest < 0.0f) == (a < 0.0f) ? 1u : ~0u; // to a larger or a smaller magnitude
    for (int i = 0; i < 3; i++) {
        const float next = float_of(bits_of(quotient) + step);
        const float next_rest = sycl::fma(-next, b, a);
        if (sycl::fabs(next_rest) >= sycl::fabs(rest)) {
            break;
        }
        quotient = next;
        rest = next_rest;
    }
    return quotient;
}

// A number's place in falling order: the larger x, the smaller its rank; -0 and +0 have the same.
inline uint32_t rank_of(float x) {
    const uint32_t bits = bits_of(x);
    return bits > 0x80000000u ? bits : 0x7FFFFFFFu - (bits & 0x7FFFFFFFu);
}

// Keys order a row by falling number, then by rising id.
constexpr int ID_BITS = 24, KEY_BITS = 32 + ID_BITS;
constexpr uint64_t NO_KEY = UINT64_MAX;
static_assert(GGML_DFLASH_MAX_VOCABULARY <= 1 << ID_BITS, "an id fits in a key");

inline uint64_t key_of(float x, int id) {
    return (uint64_t) rank_of(x) << ID_BITS | (uint32_t) id;
}

inline int id_of(uint64_t key) {
    return (int) (key & ((1u << ID_BITS) - 1));
}

// How a lane draws its tokens: its column of the sampling tensor.
struct Sampling {
    uint64_t seed, top_p; // top_p: the bits of an F64
    float temperature, log_min_p;
    int32_t top_k;

    explicit Sampling(const int32_t * column) {
        const auto words = [&](int low, int high) {
            return (uint64_t) (uint32_t) column[high] << 32 | (uint32_t) column[low];
        };
        seed = words(GGML_DFLASH_SAMPLING_SEED_LOW, GGML_DFLASH_SAMPLING_SEED_HIGH);
        top_p = words(GGML_DFLASH_SAMPLING_TOP_P_LOW, GGML_DFLASH_SAMPLING_TOP_P_HIGH);
        temperature = float_of((uint32_t) column[GGML_DFLASH_SAMPLING_TEMPERATURE]);
        log_min_p = float_of((uint32_t) column[GGML_DFLASH_SAMPLING_LOG_MIN_P]);
        top_k = column[GGML_DFLASH_SAMPLING_TOP_K];
    }

    bool is_greedy() const { return is_nan(temperature) || temperature <= 0.0f; }
};

// The noise of a draw: Gumbel, keyed by (seed, position, token); the recipe is in ggml_patches/README.md.

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

inline uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

// log(y) = k * LN2 + tail(f), y = 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2)
struct Split {
    int32_t k;
    float f;

    explicit Split(float y) {
        const uint32_t bits = bits_of(y);
        k = ((int32_t) bits - 0x3F3504F3) >> 23;
        f = float_of(bits - ((uint32_t) k << 23)) - 1.0f;
    }

    float log() const {
        const float s = divide(f, 2.0f + f), z = s * s;
        float p = (float) (1.0 / 7) + z * (float) (1.0 / 9);
        p = (float) (1.0 / 5) + z * p;
        p = (float) (1.0 / 3) + z * p;
        const float t = s + s;
        return (float) k * (float) 0.6931471805599453 + (t + t * (z * p));
    }
};

// -log(-log(1 - v)) of the 32-bit fraction v
inline float gumbel(uint32_t fraction) {
    float v = (float) (2 * (int64_t) fraction + 1) * 0x1p-33f;
    v = v < 1.0f - 0x1p-24f ? v : 1.0f - 0x1p-24f;
    Split inner(1.0f - v);
    inner.f = inner.k == 0 ? -v : inner.f; // all bits of a small v
    return -Split(-inner.log()).log();
}

constexpr float MOST_NOISE = 22.88f;

inline uint64_t noise_key(uint64_t seed, int64_t position) {
    return mix(mix(seed) + GOLDEN * ((uint64_t) position + 1));
}

inline float noise(uint64_t key, int64_t token) {
    return gumbel((uint32_t) (mix(key + GOLDEN * ((uint64_t) token + 1)) >> 32));
}

} // namespace dflash
