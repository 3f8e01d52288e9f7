#pragma once

// The inner parts of mul_mat for AVX2. Included by mul_mat_blocks.h, which says what they compute.
//
// A vector of 16 weights meets a vector of 16 activations in vpmaddwd, which adds neighbours: eight 32-bit lanes. Both
// sides have their elements in the same order, chosen so that bytes can be widened in place: of each 32 elements first
// the even and then the odd ones. For Q8_0, lane i of every vector belongs to sub-block i.

#include "dflash/mul_mat_decode_avx2.h"

namespace dflash {

inline void transpose(__m256i (&a)[8]) {
    for (int i = 0; i < 4; i++) {
        const __m256i low = a[i], high = a[i + 4];
        a[i] = _mm256_permute2x128_si256(low, high, 0x20);
        a[i + 4] = _mm256_permute2x128_si256(low, high, 0x31);
    }
    transpose_halves(a);
}

inline uint32_t max_magnitude(const float * x) {
    __m256i max = _mm256_setzero_si256();
    for (int i = 0; i < BLOCK; i += WIDTH) {
        max = _mm256_max_epi32(max, _mm256_and_si256(load(x + i), _mm256_set1_epi32(0x7FFFFFFF)));
    }
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
    return (uint32_t) _mm_cvtsi128_si32(m);
}

// 32 activations times factor as words, even and odd ones.
inline void quantise_32(const float * x, float factor, __m256i & even, __m256i & odd) {
    __m256 q[4]; // elements 4i..4i+3 and 16+4i..16+4i+3, integers in disguise
    for (int i = 0; i < 4; i++) {
        const __m256 v =
            _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(x + 4 * i)), _mm_loadu_ps(x + 4 * i + 16), 1);
        q[i] = _mm256_castsi256_ps(_mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(factor))));
    }
    even = _mm256_packs_epi32(_mm256_castps_si256(_mm256_shuffle_ps(q[0], q[1], 0x88)),
                              _mm256_castps_si256(_mm256_shuffle_ps(q[2], q[3], 0x88)));
    odd = _mm256_packs_epi32(_mm256_castps_si256(_mm256_shuffle_ps(q[0], q[1], 0xDD)),
                             _mm256_castps_si256(_mm256_shuffle_ps(q[2], q[3], 0xDD)));
}

template <Scheme SCHEME> void quantise(const float * x, Column & c) {
    const uint32_t max_bits = max_magnitude(x);
    const float inverse = inverse_of(max_bits, x_max(SCHEME));

    c.d = unit_of(max_bits, x_max(SCHEME));
    if (!(inverse > 0.0f)) {
        std::memset(c.q, 0, sizeof(c.q));
        std::memset(c.sums, 0, sizeof(c.sums));
        return;
    }
    __m256i even[SUBS], odd[SUBS];
    for (int sub = 0; sub < SUBS; sub++) {
        quantise_32(x + 32 * sub, inverse, even[sub], odd[sub]);
        if (SCHEME == Scheme::MINIMA) {
            __m256i s = _mm256_madd_epi16(_mm256_add_epi16(even[sub], odd[sub]), _mm256_set1_epi16(1));
            s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0x4E));
            s = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0xB1));
            c.sums[sub][0] = (int16_t) _mm256_extract_epi32(s, 0);
            c.sums[sub][1] = (int16_t) _mm256_extract_epi32(s, 4);
        }
    }
    if (SCHEME == Scheme::UNIT_PER_32) {
        transpose(even);
        transpose(odd);
    }
    for (int sub = 0; sub < SUBS; sub++) {
        store(c.q + 2 * sub * LANES, even[sub]);
        store(c.q + (2 * sub + 1) * LANES, odd[sub]);
    }
}

// Lane r of the result: the 8 lanes of a[r] as ((0+2) + (1+3)) + ((4+6) + (5+7)). add says what the 32 bits of a lane
// are.
template <typename Add> __m256 sum_each(const __m256 (&a)[ROWS], const Add & add) {
    __m256 two[4], four[2];
    for (int i = 0; i < 4; i++) { // 0+2 and 1+3 of a pair of vectors, in turn
        two[i] = add(_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    }
    for (int i = 0; i < 2; i++) {
        const __m256d x = _mm256_castps_pd(two[2 * i]), y = _mm256_castps_pd(two[2 * i + 1]);
        four[i] = add(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    return add(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

// Adds to y[0..7] what the super-block gives, row by row.
template <Scheme SCHEME> void accumulate(const Tile & t, const Column & c, float * y) {
    __m256i s[ROWS];
    for (int r = 0; r < ROWS; r++) {
        s[r] = _mm256_setzero_si256();
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) {
        const __m256i x = load(c.q + v * LANES);
        for (int r = 0; r < ROWS; r++) {
            s[r] = _mm256_add_epi32(s[r], _mm256_madd_epi16(x, load(t.q[v][r])));
        }
    }

    const __m256 d = _mm256_set1_ps(c.d);
    __m256 sum = _mm256_loadu_ps(y), part[ROWS];
    if (SCHEME == Scheme::UNIT_PER_32) {
        for (int r = 0; r < ROWS; r++) {
            part[r] = _mm256_mul_ps(_mm256_load_ps(t.units_32[r]), _mm256_cvtepi32_ps(s[r]));
        }
        sum = _mm256_fmadd_ps(d, sum_each(part, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); }), sum);
    } else {
        for (int r = 0; r < ROWS; r++) {
            part[r] = _mm256_castsi256_ps(s[r]);
        }
        const __m256 total = sum_each(part, [](__m256 a, __m256 b) {
            return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
        });
        const __m256 unit = _mm256_mul_ps(_mm256_load_ps(t.units), d);
        sum = _mm256_fmadd_ps(unit, _mm256_cvtepi32_ps(_mm256_castps_si256(total)), sum);
    }
    if (SCHEME == Scheme::MINIMA) {
        __m256i m = _mm256_setzero_si256();
        for (int sub = 0; sub < SUBS; sub++) {
            int32_t both;
            std::memcpy(&both, c.sums[sub], sizeof(both));
            m = _mm256_add_epi32(m, _mm256_madd_epi16(_mm256_set1_epi32(both), load(t.mins[sub])));
        }
        sum = _mm256_fnmadd_ps(_mm256_mul_ps(_mm256_load_ps(t.min), d), _mm256_cvtepi32_ps(m), sum);
    }
    _mm256_storeu_ps(y, sum);
}

} // namespace dflash
