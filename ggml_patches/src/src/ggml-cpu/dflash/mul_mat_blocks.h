#pragma once

// The inner parts of mul_mat: a super-block of 256 elements of 8 weight rows meets the same of one column.
//
//   weights      become int16: quant times sub-block scale, exact. A float says what a unit is worth.
//   activations  become int16: x / d rounded to nearest, d = max |x| / X_MAX over the 256.
//   products     sum up in int32. X_MAX is as large as that sum allows: 256 * 4096 * 2047 < 2^31.
//
// Integer sums have no order, so what rounds is the activation and then this, super-block by super-block:
//
//   IQ4_XS, Q6_K   y = fma(unit * d, S, y)                            S: sum over the 256
//   Q4_K, Q5_K     the same, then y = fma(-(min * d), M, y)           M: sum of minimum times activation
//   Q8_0           y = fma(d, ((p0+p2)+(p1+p3)) + ((p4+p6)+(p5+p7)), y)   p_i = unit_i * S_i: sub-block i of 32
//
// S, S_i and M are rounded to float first. The AVX2 code and the plain loops give the same bits.

#include "dflash/kernels.h"
#include "simd-mappings.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

namespace dflash {

constexpr int BLOCK = 256; // elements of a super-block
constexpr int SUBS = BLOCK / 32;
constexpr int ROWS = 8; // of a tile

// One super-block of one column. x = d * q.
struct Column {
    alignas(64) int16_t q[BLOCK]; // in an order of the implementation
    int16_t sums[SUBS][2];        // of each half of 32; only if the weights have minima
    float d;
};

// How the float part goes.
enum class Scheme { PLAIN, MINIMA, UNIT_PER_32 };

// Largest quantised activation.
constexpr int x_max(Scheme scheme) {
    return scheme == Scheme::UNIT_PER_32 ? 32767 : 2047;
}

// What lies in memory for 256 weights, and its scheme.
template <ggml_type TYPE> struct Format;
template <> struct Format<GGML_TYPE_IQ4_XS> {
    typedef block_iq4_xs Block;
    static constexpr Scheme SCHEME = Scheme::PLAIN;
};
template <> struct Format<GGML_TYPE_Q6_K> {
    typedef block_q6_K Block;
    static constexpr Scheme SCHEME = Scheme::PLAIN;
};
template <> struct Format<GGML_TYPE_Q4_K> {
    typedef block_q4_K Block;
    static constexpr Scheme SCHEME = Scheme::MINIMA;
};
template <> struct Format<GGML_TYPE_Q5_K> {
    typedef block_q5_K Block;
    static constexpr Scheme SCHEME = Scheme::MINIMA;
};
template <> struct Format<GGML_TYPE_Q8_0> {
    typedef block_q8_0 Block[SUBS];
    static constexpr Scheme SCHEME = Scheme::UNIT_PER_32;
};

constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

inline float half(ggml_half h) {
    return GGML_CPU_FP16_TO_FP32(h);
}

// The 8 scales and 8 minima of Q4_K and Q5_K, 6 bits each. Four bytes at a time, first byte lowest in memory.
inline void unpack_scales(const uint8_t * packed, uint32_t (&scales)[2], uint32_t (&mins)[2]) {
    uint32_t in[3];
    std::memcpy(in, packed, sizeof(in));
    scales[0] = in[0] & 0x3F3F3F3F;
    scales[1] = (in[2] & 0x0F0F0F0F) | (in[0] >> 2 & 0x30303030);
    mins[0] = in[1] & 0x3F3F3F3F;
    mins[1] = (in[2] >> 4 & 0x0F0F0F0F) | (in[1] >> 2 & 0x30303030);
}

// d of 256 activations from the bits of the largest magnitude. Tiny blocks count as zeros, so that 1 / d is finite; an
// infinity or a NaN in the block makes it NaN.
inline float unit_of(uint32_t max_bits, int limit) {
    float max;
    std::memcpy(&max, &max_bits, sizeof(max));
    return max_bits >= 0x7F800000 ? NAN : max < 0x1p-100f ? 0.0f : max / (float) limit;
}

// Factor that quantises activations with the same largest magnitude; 0 if they all count as zeros or d is NaN.
inline float inverse_of(uint32_t max_bits, int limit) {
    float max;
    std::memcpy(&max, &max_bits, sizeof(max));
    return unit_of(max_bits, limit) > 0.0f ? (float) limit / max : 0.0f;
}

} // namespace dflash

// Both define Tile, decode(block, tile, row) and finish<SCHEME>(tile) after the last row, quantise<SCHEME>(x, column)
// and accumulate<SCHEME>(tile, column, y).
#if defined(DFLASH_VEC8_AVX2) && defined(__F16C__)
#include "dflash/mul_mat_avx2.h"
#else
#include "dflash/mul_mat_portable.h"
#endif
