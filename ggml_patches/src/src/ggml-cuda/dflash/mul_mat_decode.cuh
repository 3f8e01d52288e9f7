#pragma once

// mul_mat: weights of a super-block of one row, as f16. A weight is unit * (integer scale * integer); what is decoded
// is the bracket, exact or (IQ4_XS, Q6_K) rounded once to f16, so at most 4096 in magnitude.
//
// Bytes become f16 by way of 1024 + b: its bits are 0x6400 + b. All of a row's bytes are in shared memory, from `at`
// on.

#include "mul_mat_format.cuh"

namespace dflash {
namespace mm {

constexpr uint32_t MAGIC = 0x64006400; // two f16 of 1024

__device__ __forceinline__ half2 as_half2(uint32_t bits) {
    half2 x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

__device__ __forceinline__ uint32_t as_bits(half2 x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

__device__ __forceinline__ half2 both(float x) {
    return __float2half2_rn(x);
}

// two f16 of 1024 + byte i of the word
__device__ __forceinline__ half2 magic_of_byte(uint32_t word, int i) {
    return as_half2(__byte_perm(word, MAGIC, 0x5050 + i * 0x0101));
}

// f16 of 1024 + byte i and 1024 + byte i + 1
__device__ __forceinline__ half2 magic_of_bytes(uint32_t word, int i) {
    return as_half2(__byte_perm(word, MAGIC, 0x5150 + i * 0x0101));
}

__device__ __forceinline__ uint2 two_words(const char * shared, int at) {
    return *(const uint2 *) (shared + at);
}

// Words a multiple of 4 bytes behind a place that is aligned to 2.
struct Words {
    const char * shared;
    int aligned, shift;

    __device__ void open(const char * memory, int at) { shared = memory, aligned = at & ~3, shift = (at & 2) * 8; }

    __device__ uint32_t at(int offset) const {
        const uint32_t * two = (const uint32_t *) (shared + aligned + offset);
        return __funnelshift_r(two[0], two[1], shift);
    }
};

__device__ __forceinline__ float half_at(const char * shared, int at) {
    return __half2float(*(const half *) (shared + at));
}

// What thread q (threadIdx.x % 4) decodes of a row: open() a super-block, then two_steps(t, part) gives
// the pairs of two steps of quarter t, the first or the last two.
template <ggml_type TYPE, bool TABLE> struct Row;

// A pair for every byte, once per thread of a warp so that no two threads meet at a bank. It serves three words of
// four, so that neither shared memory nor integer arithmetic is what limits; either way the numbers are the same.
constexpr int TABLE_BYTES = 256 * 32 * 4;

constexpr uint32_t IQ4_0 = 0x3F2D1801, IQ4_4 = 0x766A5D4F, IQ4_8 = 0xA6998D81, IQ4_12 = 0xF1D9C5B5; // values + 128

__device__ __forceinline__ float iq4_value(int code) {
    const uint32_t four = code < 4 ? IQ4_0 : code < 8 ? IQ4_4 : code < 12 ? IQ4_8 : IQ4_12;
    return (float) (int) (four >> code % 4 * 8 & 0xFF) - 128.0f;
}

// By all threads of the block; a barrier must follow.
__device__ __forceinline__ void fill_table(char * table) {
    for (int i = threadIdx.x; i < TABLE_BYTES / 4; i += blockDim.x) {
        const int byte = i / 32;
        ((half2 *) table)[i] = __floats2half2_rn(iq4_value(byte % 16), iq4_value(byte / 16));
    }
}

// The bytes value + 128 of four codes
__device__ __forceinline__ uint32_t iq4_bytes(uint32_t codes, uint32_t pick) {
    const uint32_t low = __byte_perm(IQ4_0, IQ4_4, codes);
    const uint32_t high = __byte_perm(IQ4_8, IQ4_12, codes);
    return __byte_perm(low, high, pick);
}

template <bool TABLE> struct Row<GGML_TYPE_IQ4_XS, TABLE> {
    const char * shared; // a table begins there, if there is one
    int at;
    uint32_t scales; // + 32, of the four sub-blocks that this thread meets

    __device__ void open(const char * memory, int block) {
        shared = memory, at = block;
        const int q = threadIdx.x % 4;
        const uint2 head = two_words(memory, block);
        const uint32_t low = head.y >> q / 2 * 4 & 0x0F0F0F0F;
        const uint32_t high = head.x >> 16 >> q / 2 * 2, apart = (high | high << 8) & 0x00330033;
        scales = low | (apart << 4 & 0x00300030) | (apart << 8 & 0x30003000);
    }

    __device__ float unit() const { return half_at(shared, at); }

    __device__ void two_steps(int t, int part, uint32_t (&pairs)[2][2]) const {
        const uint2 bytes = two_words(shared, at + 8 + threadIdx.x % 4 * 8 + 32 * t);
        const half2 scale = __hsub2(magic_of_byte(scales, t), both(1024.0f + 32.0f));
        const uint32_t four = part == 0 ? bytes.x : bytes.y; // bytes
        if (TABLE && (part == 0 || t % 2 == 0)) {
            const uint32_t entries[4] = {four << 7, four >> 1, four >> 9, four >> 17};
            const uint32_t of_thread = threadIdx.x % 32 * 4;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const half2 values = *(const half2 *) (shared + ((entries[i] & 0x7F80) | of_thread));
                pairs[i / 2][i % 2] = as_bits(__hmul2(values, scale));
            }
        } else {
            const half2 bias = __hmul2(scale, both(-(1024.0f + 128.0f)));
            const uint32_t codes = four & 0x77777777, pick = 0x32103210 | (four & 0x88888888) >> 1;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t values = iq4_bytes(codes >> 16 * i, pick >> 16 * i);
                pairs[i][0] = as_bits(__hfma2(magic_of_bytes(values, 0), scale, bias));
                pairs[i][1] = as_bits(__hfma2(magic_of_bytes(values, 2), scale, bias));
            }
        }
    }
};

// Header of Q4_K and Q5_K: two f16, and 8 scales and 8 minima of 6 bits.
struct KHeader {
    const char * shared;
    int at;
    uint32_t minima;    // this thread's two
    uint32_t scales[2]; // of four sub-blocks each

    __device__ void open_header(const char * memory, int block) {
        const int q = threadIdx.x % 4;
        shared = memory, at = block;
        const uint2 a = two_words(memory, block), b = two_words(memory, block + 8);
        const uint32_t low = b.x & 0x3F3F3F3F, high = (b.y >> 4 & 0x0F0F0F0F) | (b.x >> 2 & 0x30303030);
        const half2 pair = magic_of_bytes(q < 2 ? low : high, q % 2 * 2);
        minima = as_bits(__hsub2(pair, both(1024.0f)));
        scales[0] = a.y & 0x3F3F3F3F, scales[1] = (b.y & 0x0F0F0F0F) | (a.y >> 2 & 0x30303030);
    }

    __device__ float unit() const { return half_at(shared, at); }

    __device__ float min_unit() const { return half_at(shared, at + 2); }

    __device__ half2 scale(int sub_block) const {
        return __hsub2(magic_of_byte(scales[sub_block / 4], sub_block % 4), both(1024.0f));
    }
};

// The steps of four bytes, each of which is a low and a high nibble; bits[k] is what is above nibble k's, in place.
__device__ __forceinline__ void nibbles(uint32_t codes, const uint32_t (&bits)[2], const half2 (&scale)[2],
                                        uint32_t (&low)[2], uint32_t (&high)[2]) {
    const half2 low_bias = __hmul2(scale[0], both(-1024.0f)), high_bias = __hmul2(scale[1], both(-64.0f));
    const half2 high_scale = __hmul2(scale[1], both(1.0f / 16.0f));
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const uint32_t a = (codes >> 8 * r & 0x000F000F) | (bits[0] >> 8 * r & 0x00100010) | MAGIC;
        const uint32_t b = (codes >> 8 * r & 0x00F000F0) | (bits[1] >> 8 * r & 0x00010001) << 8 | MAGIC;
        low[r] = as_bits(__hfma2(as_half2(a), scale[0], low_bias));
        high[r] = as_bits(__hfma2(as_half2(b), high_scale, high_bias));
    }
}

template <bool TABLE> struct Row<GGML_TYPE_Q4_K, TABLE> : KHeader {
    __device__ void open(const char * memory, int block) { open_header(memory, block); }

    __device__ void two_steps(int t, int part, uint32_t (&pairs)[2][2]) const {
        const uint2 bytes = two_words(shared, at + 16 + threadIdx.x % 4 * 8 + 32 * t);
        const half2 scales_of[2] = {scale(2 * t), scale(2 * t + 1)};
        const uint32_t none[2] = {0, 0};
        nibbles(part == 0 ? bytes.x : bytes.y, none, scales_of, pairs[0], pairs[1]);
    }
};

template <bool TABLE> struct Row<GGML_TYPE_Q5_K, TABLE> : KHeader {
    __device__ void open(const char * memory, int block) { open_header(memory, block); }

    __device__ void two_steps(int t, int part, uint32_t (&pairs)[2][2]) const {
        const uint2 bytes = two_words(shared, at + 48 + threadIdx.x % 4 * 8 + 32 * t);
        const half2 scales_of[2] = {scale(2 * t), scale(2 * t + 1)};
        const uint2 bits = two_words(shared, at + 16 + threadIdx.x % 4 * 8); // bit j of a byte is sub-block j's
        const uint32_t of_word = (part == 0 ? bits.x : bits.y) >> 2 * t, above[2] = {of_word << 4, of_word >> 1};
        nibbles(part == 0 ? bytes.x : bytes.y, above, scales_of, pairs[0], pairs[1]);
    }
};

template <bool TABLE> struct Row<GGML_TYPE_Q6_K, TABLE> {
    const char * shared;
    int at;

    Words words;

    __device__ void open(const char * memory, int block) {
        shared = memory, at = block;
        words.open(memory, block);
    }

    __device__ float unit() const { return half_at(shared, at + 208); }

    __device__ void two_steps(int t, int part, uint32_t (&pairs)[2][2]) const {
        const int first = t % 2 * 16 + threadIdx.x % 4 * 4; // of 32 bytes
        const uint32_t bits = words.at(128 + t / 2 * 32 + first);
        const uint32_t scales = words.at(192 + t / 2 * 8 + part * 4) ^ 0x80808080; // + 128
#pragma unroll
        for (int i = 0; i < 2; i++) { // half a sub-block of 32 each; low nibbles, then high ones
            const half2 scale = __hsub2(magic_of_byte(scales, i * 2 + t % 2), both(1024.0f + 128.0f));
            const uint32_t low = words.at(t / 2 * 64 + i * 32 + first) >> part * 4;
            const uint32_t high = part == 0 ? bits << (2 - i) * 2 : bits >> i * 2;
            const uint32_t codes = (low & 0x0F0F0F0F) | (high & 0x30303030); // + 32
            const half2 bias = both(1024.0f + 32.0f);
            pairs[i][0] = as_bits(__hmul2(__hsub2(magic_of_bytes(codes, 0), bias), scale));
            pairs[i][1] = as_bits(__hmul2(__hsub2(magic_of_bytes(codes, 2), bias), scale));
        }
    }
};

template <bool TABLE> struct Row<GGML_TYPE_Q8_0, TABLE> {
    const char * shared;
    int at;

    Words words[2]; // of the first two blocks, and of those two further on

    __device__ void open(const char * memory, int block) {
        shared = memory, at = block;
        words[0].open(memory, block + 2);
        words[1].open(memory, block + 34 + 2);
    }

    __device__ float unit_of(int block) const { return half_at(shared, at + 34 * block); }

    __device__ void two_steps(int t, int part, uint32_t (&pairs)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int offset = t * 68 + i * 16 + threadIdx.x % 4 * 4;
            const uint32_t four = (part == 0 ? words[0].at(offset) : words[1].at(offset)) ^ 0x80808080; // + 128
            const half2 bias = both(1024.0f + 128.0f);
            pairs[i][0] = as_bits(__hsub2(magic_of_bytes(four, 0), bias));
            pairs[i][1] = as_bits(__hsub2(magic_of_bytes(four, 2), bias));
        }
    }
};

} // namespace mm
} // namespace dflash
