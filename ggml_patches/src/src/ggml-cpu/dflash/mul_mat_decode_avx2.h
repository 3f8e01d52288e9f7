#pragma once

// mul_mat for AVX2: weights become tiles. Included by mul_mat_avx2.h.

namespace dflash {

constexpr int LANES = 16; // int16 of a vector
constexpr int VECTORS = BLOCK / LANES;

// One super-block of 8 weight rows. What decode leaves as found, finish turns into vectors over rows.
struct Tile {
    alignas(64) int16_t q[VECTORS][ROWS][LANES];
    alignas(32) float units_32[ROWS][SUBS]; // Q8_0
    alignas(32) float units[ROWS];          // the others
    alignas(32) float min[ROWS];
    alignas(32) int32_t mins[SUBS][ROWS]; // each twice, in both halves
    alignas(32) ggml_half found_units[ROWS], found_min[ROWS];
    alignas(32) uint64_t found_mins[ROWS]; // 8 bytes
};

inline __m256i load(const void * p) {
    return _mm256_loadu_si256((const __m256i *) p);
}

// the same 16 bytes in both halves
inline __m256i load_twice(const void * p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) p));
}

inline __m256i load_pair(const void * low, const void * high) {
    const __m256i v = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) low));
    return _mm256_inserti128_si256(v, _mm_loadu_si128((const __m128i *) high), 1);
}

inline void store(void * p, __m256i v) {
    _mm256_store_si256((__m256i *) p, v);
}

// Eight words, each twice.
inline void store_pairs(int32_t * p, __m128i words) {
    _mm_store_si128((__m128i *) p, _mm_unpacklo_epi16(words, words));
    _mm_store_si128((__m128i *) (p + 4), _mm_unpackhi_epi16(words, words));
}

// Word i of both halves, everywhere.
inline __m256i spread(__m256i twice, int i) {
    return _mm256_shuffle_epi8(twice, _mm256_set1_epi16((int16_t) (2 * i | (2 * i + 1) << 8)));
}

// Signed bytes of sub-block sub times scale. A byte in the upper half of a word counts 256 times, so does a scale
// shifted up: the upper half of their product is the product.
inline void store_signed(Tile & t, int r, int sub, __m256i bytes, __m256i scale_256) {
    const __m256i even = _mm256_slli_epi16(bytes, 8);
    const __m256i odd = _mm256_and_si256(bytes, _mm256_set1_epi16((int16_t) 0xFF00));
    store(t.q[2 * sub][r], _mm256_mulhi_epi16(even, scale_256));
    store(t.q[2 * sub + 1][r], _mm256_mulhi_epi16(odd, scale_256));
}

// Unsigned bytes times scale (in each word): of each pair of bytes one meets the scale, the other a zero.
inline void store_unsigned(Tile & t, int r, int sub, __m256i bytes, __m256i scale) {
    store(t.q[2 * sub][r], _mm256_maddubs_epi16(bytes, scale));
    store(t.q[2 * sub + 1][r], _mm256_maddubs_epi16(bytes, _mm256_slli_epi16(scale, 8)));
}

// The eight scales of IQ4_XS, times 256.
inline __m128i iq4_xs_scales(const block_iq4_xs & b) {
    uint32_t packed;
    std::memcpy(&packed, b.scales_l, sizeof(packed));
    const __m128i bytes = _mm_cvtsi32_si128((int) packed);
    const __m128i low = _mm_cvtepu8_epi16(_mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4))); // 4 bits and others
    const __m128i moved = _mm_mullo_epi16(_mm_set1_epi16((int16_t) b.scales_h),
                                          _mm_setr_epi16(1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6, 1 << 4, 1 << 2, 1));
    const __m128i high = _mm_slli_epi16(_mm_srli_epi16(moved, 14), 12); // bits 2i and 2i+1
    const __m128i both = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(low, _mm_set1_epi16(15)), 8), high);
    return _mm_sub_epi16(both, _mm_set1_epi16(32 << 8));
}

inline void decode(const block_iq4_xs & b, Tile & t, int r) {
    t.found_units[r] = b.d;
    const __m256i scales = _mm256_broadcastsi128_si256(iq4_xs_scales(b));
    const __m256i values = load_twice(IQ4_VALUES);
    const __m256i shift = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4); // low nibbles: elements 0..15, high: 16..31
#pragma GCC unroll 8
    for (int sub = 0; sub < SUBS; sub++) {
        const __m256i moved = _mm256_srlv_epi32(load_twice(b.qs + 16 * sub), shift);
        const __m256i codes = _mm256_and_si256(moved, _mm256_set1_epi8(15));
        store_signed(t, r, sub, _mm256_shuffle_epi8(values, codes), spread(scales, sub));
    }
}

// Shuffle that moves scale 2 * sub of 16 into the upper bytes of the words of the lower half, and the next one into
// those of the upper half.
inline __m256i q6_K_spread(int sub) {
    const __m256i first = _mm256_setr_epi32(0x00800080, 0x00800080, 0x00800080, 0x00800080, //
                                            0x01800180, 0x01800180, 0x01800180, 0x01800180);
    return _mm256_add_epi8(first, _mm256_set1_epi16((int16_t) (2 * sub << 8)));
}

inline void decode(const block_q6_K & b, Tile & t, int r) {
    t.found_units[r] = b.d;
    const __m256i scales = load_twice(b.scales);
    const __m256i nibbles = _mm256_set1_epi8(15), bits = _mm256_set1_epi8(3 << 4);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) { // 128 elements
        const __m256i low_0 = load(b.ql + 64 * i), low_1 = load(b.ql + 64 * i + 32);
        const __m256i high = load(b.qh + 32 * i);
        const __m256i q[4] = {
            _mm256_or_si256(_mm256_and_si256(low_0, nibbles), _mm256_and_si256(_mm256_slli_epi16(high, 4), bits)),
            _mm256_or_si256(_mm256_and_si256(low_1, nibbles), _mm256_and_si256(_mm256_slli_epi16(high, 2), bits)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low_0, 4), nibbles), _mm256_and_si256(high, bits)),
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(low_1, 4), nibbles),
                            _mm256_and_si256(_mm256_srli_epi16(high, 2), bits)),
        };
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const __m256i scale = _mm256_shuffle_epi8(scales, q6_K_spread(4 * i + j));
            store_signed(t, r, 4 * i + j, _mm256_sub_epi8(q[j], _mm256_set1_epi8(32)), scale);
        }
    }
}

// What Q4_K and Q5_K have in common. Returns the scales, in both halves.
inline __m256i decode_scales(const uint8_t * packed, ggml_half d, ggml_half min, Tile & t, int r) {
    uint32_t s[2], m[2];
    unpack_scales(packed, s, m);
    t.found_mins[r] = (uint64_t) m[1] << 32 | m[0];
    t.found_units[r] = d;
    t.found_min[r] = min;
    const __m128i bytes = _mm_cvtsi64_si128((int64_t) ((uint64_t) s[1] << 32 | s[0]));
    return _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(bytes));
}

inline void decode(const block_q4_K & b, Tile & t, int r) {
    const __m256i scales = decode_scales(b.scales, b.data.data.d, b.data.data.dmin, t, r);
    const __m256i nibbles = _mm256_set1_epi8(15);
#pragma GCC unroll 4
    for (int sub = 0; sub < SUBS; sub += 2) {
        const __m256i both = load(b.qs + 16 * sub);
        const __m256i low = _mm256_and_si256(both, nibbles);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibbles);
        store_unsigned(t, r, sub, low, spread(scales, sub));
        store_unsigned(t, r, sub + 1, high, spread(scales, sub + 1));
    }
}

// Bit sub of every byte, moved to bit 4.
inline __m256i q5_K_fifth(__m256i bytes, int sub) {
    const __m256i moved = sub < 4 ? _mm256_slli_epi16(bytes, 4 - sub) : _mm256_srli_epi16(bytes, sub - 4);
    return _mm256_and_si256(moved, _mm256_set1_epi8(16));
}

inline void decode(const block_q5_K & b, Tile & t, int r) {
    const __m256i scales = decode_scales(b.scales, b.data.data.d, b.data.data.dmin, t, r);
    const __m256i nibbles = _mm256_set1_epi8(15);
    const __m256i fifth = load(b.qh);
#pragma GCC unroll 4
    for (int sub = 0; sub < SUBS; sub += 2) {
        const __m256i both = load(b.qs + 16 * sub);
        const __m256i low = _mm256_and_si256(both, nibbles);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibbles);
        store_unsigned(t, r, sub, _mm256_or_si256(low, q5_K_fifth(fifth, sub)), spread(scales, sub));
        store_unsigned(t, r, sub + 1, _mm256_or_si256(high, q5_K_fifth(fifth, sub + 1)), spread(scales, sub + 1));
    }
}

// 8 x 8 of 32 bits, from rows whose halves lie apart: a[i] is the lower half of row i and of row i+4, a[i+4] the upper
// ones
inline void transpose_halves(__m256i (&a)[8]) {
    __m256i b[8];
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
}

inline void decode(const block_q8_0 (&b)[SUBS], Tile & t, int r) {
    uint64_t halves[2] = {};
    __m256i bytes[SUBS];
    for (int i = 0; i < 4; i++) {
        halves[0] |= (uint64_t) b[i].d << (16 * i);
        halves[1] |= (uint64_t) b[i + 4].d << (16 * i);
        bytes[i] = load_pair(b[i].qs, b[i + 4].qs);
        bytes[i + 4] = load_pair(b[i].qs + 16, b[i + 4].qs + 16);
    }
    _mm256_store_ps(t.units_32[r], _mm256_cvtph_ps(_mm_set_epi64x((int64_t) halves[1], (int64_t) halves[0])));
    transpose_halves(bytes);
    for (int i = 0; i < SUBS; i++) { // once or not at all: widens every second byte
        store(t.q[2 * i][r], _mm256_maddubs_epi16(_mm256_set1_epi16(1), bytes[i]));
        store(t.q[2 * i + 1][r], _mm256_maddubs_epi16(_mm256_set1_epi16(1 << 8), bytes[i]));
    }
}

inline __m256 floats_of(const ggml_half * halves) {
    return _mm256_cvtph_ps(_mm_load_si128((const __m128i *) halves));
}

template <Scheme SCHEME> void finish(Tile & t) {
    if (SCHEME == Scheme::UNIT_PER_32) {
        return;
    }
    _mm256_store_ps(t.units, floats_of(t.found_units));
    if (SCHEME == Scheme::MINIMA) {
        _mm256_store_ps(t.min, floats_of(t.found_min));
        // 8 x 8 bytes, rows to columns
        __m128i a[4], b[4];
        for (int i = 0; i < 4; i++) { // rows i and i+4 in turn
            a[i] = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *) (t.found_mins + i)),
                                     _mm_loadl_epi64((const __m128i *) (t.found_mins + i + 4)));
        }
        for (int i = 0; i < 2; i++) { // rows i, i+2, i+4, i+6 in turn, of subs 0..3 and of subs 4..7
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 2]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 2]);
        }
        for (int i = 0; i < 2; i++) {
            const __m128i subs[2] = {_mm_unpacklo_epi8(b[i], b[i + 2]), _mm_unpackhi_epi8(b[i], b[i + 2])};
            for (int j = 0; j < 2; j++) { // 8 rows of sub 4i+2j, 8 rows of the next one
                store_pairs(t.mins[4 * i + 2 * j], _mm_cvtepu8_epi16(subs[j]));
                store_pairs(t.mins[4 * i + 2 * j + 1], _mm_cvtepu8_epi16(_mm_srli_si128(subs[j], 8)));
            }
        }
    }
}

} // namespace dflash
