#pragma once

// Arithmetic that must give the CPU's bits. Our files are compiled without fast-math and without contraction, so every
// + - * / here is one IEEE operation; an fma is one where it is written.

#include "../common.cuh"

#include <cstdint>

namespace dflash {

// exp as the CPU kernels compute it (vec8.h): x limited to -87..88; of NaN it is NaN
__device__ __forceinline__ float exp_same(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float shift = 12582912.0f; // 1.5 * 2^23: adding it rounds to the nearest integer
    const float shifted = fmaf(x, 1.44269504f, shift);
    const float n = shifted - shift;
    float r = fmaf(n, -0.693145752f, x); // ln 2 in two parts, the first with few bits
    r = fmaf(n, -1.42860677e-6f, r);
    float p = 1.0f / 5040;
    p = fmaf(p, r, 1.0f / 720);
    p = fmaf(p, r, 1.0f / 120);
    p = fmaf(p, r, 1.0f / 24);
    p = fmaf(p, r, 1.0f / 6);
    p = fmaf(p, r, 0.5f);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    return p * __int_as_float((int) (((uint32_t) __float_as_int(shifted) << 23) + 0x3F800000u));
}

// The noise of a draw: Gumbel, keyed by (seed, position, token); the recipe is in ggml_patches/README.md.

// mix without its last step
__host__ __device__ __forceinline__ uint64_t nearly_mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    return (z ^ (z >> 27)) * 0x94D049BB133111EBull;
}

__host__ __device__ __forceinline__ uint64_t mix(uint64_t z) {
    z = nearly_mix(z);
    return z ^ (z >> 31);
}

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;

__host__ __device__ __forceinline__ uint64_t noise_key(uint64_t seed, int64_t position) {
    return mix(mix(seed) + GOLDEN * (uint64_t) (position + 1));
}

// log(y) = k * LN2 + log1p(f), y = 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2); where k is 0, f may be given exactly
__device__ __forceinline__ float log_parts(float y, bool exact, float given) {
    const int32_t bits = __float_as_int(y);
    const int32_t k = (bits - 0x3F3504F3) >> 23;
    const float f = exact && k == 0 ? given : __int_as_float(bits - (k << 23)) - 1.0f;
    const float s = f / (2.0f + f);
    const float z = s * s;
    float p = 1.0f / 7 + z * (1.0f / 9);
    p = 1.0f / 5 + z * p;
    p = 1.0f / 3 + z * p;
    const float t = s + s;
    return (float) k * 0.6931471805599453f + (t + t * (z * p));
}

__host__ __device__ __forceinline__ uint32_t noise_bits(uint64_t key, int64_t token) {
    return (uint32_t) (mix(key + GOLDEN * (uint64_t) (token + 1)) >> 32);
}

__device__ __forceinline__ float gumbel_of(uint32_t bits) {
    const float v = fminf((float) (2ull * bits + 1) * 0x1p-33f, 1.0f - 0x1p-24f);
    const float e = -log_parts(1.0f - v, true, -v);
    return -log_parts(e, false, 0.0f);
}

__device__ __forceinline__ float gumbel(uint64_t key, int64_t token) {
    return gumbel_of(noise_bits(key, token));
}

} // namespace dflash
