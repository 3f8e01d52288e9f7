#pragma once

// mul_mat: weights of a super-block of one row, as signed bytes and the scales of each 32 or 16 of them. All of a row's
// bytes are in shared memory, from `at` on; nothing is rounded.

#include "mul_mat_format.cuh"

namespace dflash {
namespace mm {

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

__device__ __forceinline__ uint32_t word_at(const char * shared, int at) {
    return *(const uint32_t *) (shared + at);
}

__device__ __forceinline__ uint2 two_words(const char * shared, int at) {
    return *(const uint2 *) (shared + at);
}

__device__ __forceinline__ float half_at(const char * shared, int at) {
    return __half2float(*(const half *) (shared + at));
}

__device__ __forceinline__ int signed_byte(uint32_t word, int i) {
    return (int8_t) (word >> 8 * i);
}

// Words a multiple of 4 bytes behind a place that is aligned to 2.
struct Words {
    const char * shared;
    int aligned, shift;

    __device__ Words(const char * memory, int at) : shared(memory), aligned(at & ~3), shift((at & 2) * 8) {}

    __device__ uint32_t at(int offset) const {
        return __funnelshift_r(word_at(shared, aligned + offset), word_at(shared, aligned + offset + 4), shift);
    }
};

// Bytes of 0..63, each less 32
__device__ __forceinline__ uint32_t less_32(uint32_t bytes) {
    return (bytes + 0x60606060) ^ 0x80808080;
}

// What thread q (threadIdx.x % 4) decodes of a row: steps(t) gives its two words of steps 2t and 2t + 1, scale(step, i)
// the i-th scale of a step. A weight is unit() * scale * byte, less min_unit() * minimum where there are minima.
template <ggml_type TYPE> struct Row;

// Bytes of x and y that the nibbles of the low half of `pick` name. On NVIDIA a nibble from 8 on gives 0 or -1, the
// sign of the byte that it names less 8; elsewhere there may be none.
__device__ __forceinline__ uint32_t permute(uint32_t x, uint32_t y, uint32_t pick) {
#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)
    return __byte_perm(x, y, pick);
#else
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(x), "r"(y), "r"(pick));
    return bytes;
#endif
}

// What a type's decoder keeps in registers for all blocks. `zero` is one that the compiler knows neither as such nor as
// the same for all threads: constants would be put into registers anew for every use.
template <ggml_type TYPE> struct Table {
    __device__ explicit Table(uint32_t) {}
};

template <> struct Table<GGML_TYPE_IQ4_XS> {
    uint32_t first, third, third_more, places; // values of codes 0..3 and 8..11, also + 1; 0, 1, 2, 3

    __device__ explicit Table(uint32_t zero)
        : first(0xBFAD9881 ^ zero), third(0x26190D01 ^ zero), third_more(0x271A0E02 ^ zero), places(0x32103210 ^ zero) {
    }

    // The values of four codes, below 8: all are negative
    __device__ uint32_t negative(uint32_t codes) const { return permute(first, 0xF6EADDCF, codes); }

    // The values of four codes, less 8: all are positive
    __device__ uint32_t positive(uint32_t codes) const { return permute(third, 0x71594535, codes); }

    __device__ uint32_t positive_more(uint32_t codes) const { return permute(third_more, 0x725A4636, codes); }
};

template <> struct Row<GGML_TYPE_IQ4_XS> {
    typedef int Scale;
    const char * shared;
    int at;
    const Table<GGML_TYPE_IQ4_XS> & table;
    uint32_t scales[2]; // of even and of odd steps, signed

    __device__ Row(const char * memory, int block, const Table<GGML_TYPE_IQ4_XS> & of)
        : shared(memory), at(block), table(of) {
        const uint2 head = two_words(memory, block);
        const uint32_t wide = __byte_perm(head.x, 0, 0x4342), high = (wide | wide << 4) & 0x0F0F0F0F; // 2 bits a step
        scales[0] = less_32((head.y & 0x0F0F0F0F) | (high << 4 & 0x30303030));
        scales[1] = less_32((head.y >> 4 & 0x0F0F0F0F) | (high << 2 & 0x30303030));
    }

    __device__ float unit() const { return half_at(shared, at); }

    __device__ int scale(int step, int) const { return signed_byte(scales[step % 2], step / 2); }

    __device__ uint32_t codes(int step) const { return word_at(shared, at + 8 + 16 * step + threadIdx.x % 4 * 4); }

    __device__ void steps(int t, uint32_t (&words)[1][2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t eight = codes(2 * t + i), low = eight & 0x77777777;
            const uint32_t pick = (eight >> 1 & 0x44444444) | table.places; // j, + 4 if code j is 8 or more
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint32_t four = low >> 16 * j;
                words[0][i][j] = permute(table.negative(four), table.positive(four), pick >> 16 * j);
            }
        }
    }

    // The same as two summands, for products that cost less than to choose: one is the value or -1 if that is positive,
    // the other one is 0 or the value + 1.
    __device__ void steps(int t, uint32_t (&words)[2][2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t eight = codes(2 * t + i), turned = eight ^ 0x88888888;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                words[0][i][j] = table.negative(eight >> 16 * j);
                words[1][i][j] = table.positive_more(turned >> 16 * j);
            }
        }
    }
};

// Header of Q4_K and Q5_K: two f16, and 8 scales and 8 minima of 6 bits.
struct KHeader {
    typedef int Scale;
    const char * shared;
    int at;
    uint32_t scales[2]; // of steps 0..3 and 4..7
    uint32_t minima;    // of steps 2q and 2q + 1, as f16

    __device__ KHeader(const char * memory, int block) : shared(memory), at(block) {
        const int q = threadIdx.x % 4;
        const uint2 a = two_words(memory, block), b = two_words(memory, block + 8);
        scales[0] = a.y & 0x3F3F3F3F;
        scales[1] = (b.y & 0x0F0F0F0F) | (a.y >> 2 & 0x30303030);
        const uint32_t four = q < 2 ? b.x & 0x3F3F3F3F : (b.y >> 4 & 0x0F0F0F0F) | (b.x >> 2 & 0x30303030);
        const uint32_t bits = __byte_perm(four >> q % 2 * 16, 0x64646464, 0x4140); // f16 of 1024 + byte
        minima = as_bits(__hsub2(as_half2(bits), __float2half2_rn(1024.0f)));
    }

    __device__ float unit() const { return half_at(shared, at); }

    __device__ float min_unit() const { return half_at(shared, at + 2); }

    __device__ int scale(int step, int) const {
        return (int) ((step < 4 ? scales[0] : scales[1]) >> step % 4 * 8 & 0xFF);
    }
};

template <> struct Row<GGML_TYPE_Q4_K> : KHeader {
    __device__ Row(const char * memory, int block, const Table<GGML_TYPE_Q4_K> &) : KHeader(memory, block) {}

    __device__ void steps(int t, uint32_t (&words)[1][2][2]) const {
        const uint2 bytes = two_words(shared, at + 16 + 32 * t + threadIdx.x % 4 * 8);
        words[0][0][0] = bytes.x & 0x0F0F0F0F, words[0][0][1] = bytes.y & 0x0F0F0F0F;
        words[0][1][0] = bytes.x >> 4 & 0x0F0F0F0F, words[0][1][1] = bytes.y >> 4 & 0x0F0F0F0F;
    }
};

template <> struct Row<GGML_TYPE_Q5_K> : KHeader {
    uint2 bits; // bit i of a byte is step i's

    __device__ Row(const char * memory, int block, const Table<GGML_TYPE_Q5_K> &) : KHeader(memory, block) {
        bits = two_words(memory, block + 16 + threadIdx.x % 4 * 8);
    }

    static __device__ uint32_t merge(uint32_t low, uint32_t high) { return (low & 0x0F0F0F0F) | (high & 0x10101010); }

    __device__ void steps(int t, uint32_t (&words)[1][2][2]) const {
        const uint2 bytes = two_words(shared, at + 48 + 32 * t + threadIdx.x % 4 * 8);
        const uint32_t of_x = bits.x >> 2 * t, of_y = bits.y >> 2 * t;
        words[0][0][0] = merge(bytes.x, of_x << 4), words[0][0][1] = merge(bytes.y, of_y << 4);
        words[0][1][0] = merge(bytes.x >> 4, of_x << 3), words[0][1][1] = merge(bytes.y >> 4, of_y << 3);
    }
};

template <> struct Row<GGML_TYPE_Q6_K> {
    typedef int Scale;
    const char * shared;
    int at;
    Words words_of;

    __device__ Row(const char * memory, int block, const Table<GGML_TYPE_Q6_K> &)
        : shared(memory), at(block), words_of(memory, block) {}

    __device__ float unit() const { return half_at(shared, at + 208); }

    __device__ int scale(int step, int i) const {
        return *(const int8_t *) (shared + at + 192 + step / 4 * 8 + (step % 2 * 2 + i) * 2 + step / 2 % 2);
    }

    __device__ void steps(int t, uint32_t (&words)[1][2][2]) const {
        const int first = t % 2 * 16 + threadIdx.x % 4 * 4; // of 32 bytes
        const uint32_t bits = words_of.at(128 + t / 2 * 32 + first);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t nibbles = words_of.at(t / 2 * 64 + i * 32 + first);
            words[0][0][i] = less_32((nibbles & 0x0F0F0F0F) | (bits << (2 - i) * 2 & 0x30303030));
            words[0][1][i] = less_32((nibbles >> 4 & 0x0F0F0F0F) | (bits >> i * 2 & 0x30303030));
        }
    }
};

template <> struct Row<GGML_TYPE_Q8_0> {
    typedef float Scale;
    const char * shared;
    int at;
    Words even, odd; // the bytes of steps 0 and 1; those of two steps further on are 68 bytes behind

    __device__ Row(const char * memory, int block, const Table<GGML_TYPE_Q8_0> &)
        : shared(memory), at(block), even(memory, block + 2), odd(memory, block + 34 + 2) {}

    __device__ float unit() const { return 1.0f; }

    __device__ float scale(int step, int) const { return half_at(shared, at + 34 * step); }

    __device__ void steps(int t, uint32_t (&words)[1][2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int offset = t * 68 + threadIdx.x % 4 * 8 + i * 4;
            words[0][0][i] = even.at(offset), words[0][1][i] = odd.at(offset);
        }
    }
};

} // namespace mm
} // namespace dflash
