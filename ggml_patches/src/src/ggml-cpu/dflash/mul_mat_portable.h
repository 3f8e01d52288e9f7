#pragma once

// The inner parts of mul_mat in plain loops. Included by mul_mat_blocks.h, which says what they compute.

namespace dflash {

// One super-block of 8 weight rows, elements in their natural order.
struct Tile {
    int16_t q[ROWS][BLOCK];
    float units[ROWS][SUBS]; // one per 32 of Q8_0, the others use the first
    float min[ROWS];
    uint8_t mins[ROWS][SUBS];
};

inline int iq4_xs_scale(const block_iq4_xs & b, int sub) {
    const int low = b.scales_l[sub / 2] >> (sub % 2 * 4) & 15;
    return (low | (b.scales_h >> (2 * sub) & 3) << 4) - 32;
}

inline void decode(const block_iq4_xs & b, Tile & t, int r) {
    t.units[r][0] = half(b.d);
    for (int i = 0; i < BLOCK; i++) {
        const int code = b.qs[i / 32 * 16 + i % 16] >> (i % 32 / 16 * 4) & 15;
        t.q[r][i] = (int16_t) (IQ4_VALUES[code] * iq4_xs_scale(b, i / 32));
    }
}

inline void decode(const block_q6_K & b, Tile & t, int r) {
    t.units[r][0] = half(b.d);
    for (int i = 0; i < BLOCK; i++) {
        const int low = b.ql[i / 128 * 64 + i % 64] >> (i % 128 / 64 * 4) & 15;
        const int high = b.qh[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        t.q[r][i] = (int16_t) (((low | high << 4) - 32) * b.scales[i / 16]);
    }
}

inline int nibble(const uint8_t * qs, int i) {
    return qs[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
}

// What Q4_K and Q5_K have in common.
inline void decode_scales(const uint8_t * packed, ggml_half d, ggml_half min, Tile & t, int r, uint8_t * scales) {
    uint32_t s[2], m[2];
    unpack_scales(packed, s, m);
    std::memcpy(scales, s, sizeof(s));
    std::memcpy(t.mins[r], m, sizeof(m));
    t.units[r][0] = half(d);
    t.min[r] = half(min);
}

inline void decode(const block_q4_K & b, Tile & t, int r) {
    uint8_t scales[SUBS];
    decode_scales(b.scales, b.data.data.d, b.data.data.dmin, t, r, scales);
    for (int i = 0; i < BLOCK; i++) {
        t.q[r][i] = (int16_t) (nibble(b.qs, i) * scales[i / 32]);
    }
}

inline void decode(const block_q5_K & b, Tile & t, int r) {
    uint8_t scales[SUBS];
    decode_scales(b.scales, b.data.data.d, b.data.data.dmin, t, r, scales);
    for (int i = 0; i < BLOCK; i++) {
        const int fifth = b.qh[i % 32] >> (i / 32) & 1;
        t.q[r][i] = (int16_t) ((nibble(b.qs, i) | fifth << 4) * scales[i / 32]);
    }
}

inline void decode(const block_q8_0 (&b)[SUBS], Tile & t, int r) {
    for (int i = 0; i < BLOCK; i++) {
        t.q[r][i] = b[i / 32].qs[i % 32];
    }
    for (int sub = 0; sub < SUBS; sub++) {
        t.units[r][sub] = half(b[sub].d);
    }
}

template <Scheme> void finish(Tile &) {}

template <Scheme SCHEME> void quantise(const float * x, Column & c) {
    uint32_t max_bits = 0;
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof(bits));
        bits &= 0x7FFFFFFF;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    const float inverse = inverse_of(max_bits, x_max(SCHEME));

    c.d = unit_of(max_bits, x_max(SCHEME));
    int sums[SUBS][2] = {};
    for (int i = 0; i < BLOCK; i++) {
        c.q[i] = inverse > 0.0f ? (int16_t) std::lrint(x[i] * inverse) : 0;
        sums[i / 32][i % 32 / 16] += c.q[i];
    }
    if (SCHEME == Scheme::MINIMA) {
        for (int sub = 0; sub < SUBS; sub++) {
            c.sums[sub][0] = (int16_t) sums[sub][0];
            c.sums[sub][1] = (int16_t) sums[sub][1];
        }
    }
}

inline int32_t dot(const int16_t * a, const int16_t * b, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

inline float dot_with_units(const int16_t * w, const float * units, const int16_t * x) {
    float p[SUBS];
    for (int sub = 0; sub < SUBS; sub++) {
        p[sub] = units[sub] * (float) dot(w + 32 * sub, x + 32 * sub, 32);
    }
    return ((p[0] + p[2]) + (p[1] + p[3])) + ((p[4] + p[6]) + (p[5] + p[7]));
}

// Adds to y what the super-block gives, row by row.
template <Scheme SCHEME> void accumulate(const Tile & t, const Column & c, float * y) {
    for (int r = 0; r < ROWS; r++) {
        if (SCHEME == Scheme::UNIT_PER_32) {
            y[r] = std::fma(c.d, dot_with_units(t.q[r], t.units[r], c.q), y[r]);
            continue;
        }
        y[r] = std::fma(t.units[r][0] * c.d, (float) dot(t.q[r], c.q, BLOCK), y[r]);
        if (SCHEME == Scheme::MINIMA) {
            int32_t sum = 0;
            for (int sub = 0; sub < SUBS; sub++) {
                sum += t.mins[r][sub] * (c.sums[sub][0] + c.sums[sub][1]);
            }
            y[r] = std::fma(-(t.min[r] * c.d), (float) sum, y[r]);
        }
    }
}

} // namespace dflash
