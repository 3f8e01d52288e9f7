#pragma once

// Rows of pages in shared memory, as they are stored, and how they become fragments of B.
//
// A Q8_0 block is 34 bytes, so every other one starts in the middle of a word. A thread reads whole words: of an even
// block (scale in the lower half of word 0) words 1..8 hold values 2..31 and the next block's scale, in whose place
// values 0 and 1 from word 0 are put; of an odd one (scale in the upper half of word 0) words 1..8 hold values 0..31.
// So place i of a block is value (i + shift) % 32, shift 2 or 0. Queries are stored by place, outputs found by it.

#include "attention_ptx.cuh"
#include "attention_work.cuh"

namespace dflash {
namespace attn {

template <int D, ggml_type TYPE> struct PageRow {
    static constexpr bool IS_QUANTISED = TYPE == GGML_TYPE_Q8_0;
    static_assert(IS_QUANTISED || TYPE == GGML_TYPE_F16, "types of pages with fragments");

    static constexpr int BYTES = IS_QUANTISED ? D / QK8_0 * (int) sizeof(block_q8_0) : 2 * D;
    static constexpr int CHUNK = BYTES % 16 == 0 ? 16 : 8; // what one copy moves
    static constexpr int CHUNKS = BYTES / CHUNK;
    static constexpr int PITCH = IS_QUANTISED ? (BYTES + 15) / 16 * 16 : BYTES + 16; // so that banks differ

    static __device__ int shift(int block) { return IS_QUANTISED && block % 2 == 0 ? 2 : 0; }
};

// How the 32 columns of a block are numbered as k of two products: thread q of four holds places 4q..4q + 3 of the
// first 16 and of the second in its two registers.
template <ggml_type TYPE> __device__ __forceinline__ int k_of_column(int column) {
    if (TYPE == GGML_TYPE_F16) {
        return column;
    }
    const int place = (column - PageRow<32, TYPE>::shift(column / 32)) & 31;
    return (column & ~31) + (place & 16) + (place & 2) * 4 + (place & 12) / 2 + (place & 1);
}

// Four bytes, each + 128, are q; two of them as f16, 1152 = 1024 + 128 taken off exactly.
__device__ __forceinline__ half2 pair_of_bytes(uint32_t biased, uint32_t selector) {
    const uint32_t bits = __byte_perm(biased, 0x64646464, selector);
    return __hsub2(*(const half2 *) &bits, __float2half2_rn(1152.0f));
}

__device__ __forceinline__ uint32_t scaled(half2 q, uint32_t scales) {
    const half2 product = __hmul2(q, *(const half2 *) &scales);
    return *(const uint32_t *) &product;
}

// Word 1 + i of a block whose word 0 is given; see above.
__device__ __forceinline__ uint32_t block_word(const uint32_t * block, uint32_t word_0, bool is_even, int i) {
    return __byte_perm(block[1 + i], word_0, is_even && i == 7 ? 0x7610 : 0x3210);
}

__device__ __forceinline__ const uint32_t * block_words(const char * row, int block) {
    return (const uint32_t *) row + (uint32_t) block * 17 / 2;
}

// B of 8 positions and the 32 columns of a block: registers of the first 16, of the second. `rows`: the first position.
template <typename Row>
__device__ __forceinline__ void key_fragment(uint32_t (&to)[4], const char * rows, int block, int lane) {
    if constexpr (Row::IS_QUANTISED) {
        const bool is_even = block % 2 == 0;
        const uint32_t * words = block_words(rows + lane / 4 * Row::PITCH, block);
        const uint32_t word_0 = words[0];
        const uint32_t scales = __byte_perm(word_0, 0, is_even ? 0x1010 : 0x3232);
#pragma unroll
        for (int step = 0; step < 2; step++) {
            const uint32_t biased = block_word(words, word_0, is_even, lane % 4 + 4 * step) ^ 0x80808080;
            to[2 * step] = scaled(pair_of_bytes(biased, 0x4140), scales);
            to[2 * step + 1] = scaled(pair_of_bytes(biased, 0x4342), scales);
        }
    } else {
        load_matrices(to, rows + lane % 8 * Row::PITCH + block * 64 + lane / 8 * 16);
    }
}

// B of 16 positions and the 32 columns of a block, as four tiles of 8 columns. Column n of tile j is column 8 j + n of
// the block, or place 4 n + j.
template <typename Row>
__device__ __forceinline__ void value_fragment(uint32_t (&to)[4][2], const char * rows, int block, int lane) {
    if constexpr (Row::IS_QUANTISED) {
        const bool is_even = block % 2 == 0;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const char * row = rows + (lane % 4 * 2 + r * 8) * Row::PITCH;
            const uint32_t * early = block_words(row, block);
            const uint32_t * late = block_words(row + Row::PITCH, block);
            const uint32_t early_0 = early[0], late_0 = late[0];
            const uint32_t a = block_word(early, early_0, is_even, lane / 4) ^ 0x80808080;
            const uint32_t b = block_word(late, late_0, is_even, lane / 4) ^ 0x80808080;
            const uint32_t scales = __byte_perm(early_0, late_0, is_even ? 0x5410 : 0x7632);
            const uint32_t low = __byte_perm(a, b, 0x5140), high = __byte_perm(a, b, 0x7362);
            to[0][r] = scaled(pair_of_bytes(low, 0x4140), scales);
            to[1][r] = scaled(pair_of_bytes(low, 0x4342), scales);
            to[2][r] = scaled(pair_of_bytes(high, 0x4140), scales);
            to[3][r] = scaled(pair_of_bytes(high, 0x4342), scales);
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            uint32_t four[4];
            load_matrices_transposed(four, rows + lane % 16 * Row::PITCH + block * 64 + (j + lane / 16) * 16);
            to[j][0] = four[0], to[j][1] = four[1];
            to[j + 1][0] = four[2], to[j + 1][1] = four[3];
        }
    }
}

// A value that is no finite f16 would reach rows that do not see it, as 0 * NaN: makes such values of N rows zero and
// marks their rows, bits from wrong[first / 32] on. Lane `lane` of a warp, all of which do this.
template <typename Row, int N>
__device__ __forceinline__ void clear_wrong(char (*rows)[Row::PITCH], int first, uint32_t * wrong, int lane) {
    constexpr int PARTS = Row::IS_QUANTISED ? Row::BYTES / (int) sizeof(block_q8_0) : 32; // lanes of a row
#pragma unroll 4
    for (int i = first + lane / PARTS; i < first + N; i += 32 / PARTS) {
        bool found = false;
        if constexpr (Row::IS_QUANTISED) {
            uint16_t & scale = ((uint16_t *) rows[i])[lane % PARTS * (sizeof(block_q8_0) / 2)];
            found = (scale & 0x7FFF) >= 0x6000; // 512: times 127 overflows
            scale = found ? 0 : scale;
        } else {
#pragma unroll
            for (int j = 0; j < Row::BYTES / 128; j++) {
                uint32_t & pair = ((uint32_t *) rows[i])[lane + 32 * j];
                const uint32_t keep =
                    ((pair & 0x7C00) == 0x7C00 ? 0 : 0xFFFF) | ((pair & 0x7C000000) == 0x7C000000 ? 0 : 0xFFFF0000);
                found |= keep != 0xFFFFFFFF;
                pair &= keep;
            }
        }
        if (found) {
            atomicOr(&wrong[i / 32], 1u << (i % 32));
        }
    }
}

} // namespace attn
} // namespace dflash
