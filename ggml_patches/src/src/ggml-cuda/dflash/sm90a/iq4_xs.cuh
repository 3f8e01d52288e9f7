#pragma once

// mul_mat on Hopper: IQ4_XS by a table. A byte is two codes; its entry is their two values as f16, once per thread of a
// warp so that no two threads meet at a bank. Entries are 256 bytes apart: one permutation of bytes makes an address.

#include "../mul_mat_decode.cuh"

namespace dflash {
namespace wgmma {

constexpr int TABLE_BYTES = 256 * 256;

// By all threads of the block; a barrier must follow.
__device__ __forceinline__ void fill_table(char * table) {
    for (int byte = threadIdx.x; byte < 256; byte += blockDim.x) {
        const half2 pair = __floats2half2_rn(mm::iq4_value(byte % 16), mm::iq4_value(byte / 16));
        const uint32_t bits = mm::as_bits(pair);
#pragma unroll
        for (int i = 0; i < 8; i++) { // neighbours write to other banks
            *(uint4 *) (table + byte * 256 + (i + byte) % 8 * 16) = {bits, bits, bits, bits};
        }
    }
}

// Two steps of one row, looked up but not scaled, and then both.
struct TableRow : mm::Row<GGML_TYPE_IQ4_XS, false> {
    uint2 bytes; // of a quarter: those of its first pair, and of its second

    __device__ void read(int t) { bytes = mm::two_words(shared, at + 8 + threadIdx.x % 4 * 8 + 32 * t); }

    __device__ void open(const char * memory, int block) {
        mm::Row<GGML_TYPE_IQ4_XS, false>::open(memory, block);
        read(0);
    }

    // Pairs are looked up in order.
    __device__ void look_up(int pair, uint32_t (&raw)[4]) {
        const uint32_t four = pair % 2 == 0 ? bytes.x : bytes.y, of_thread = threadIdx.x % 32 * 4;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            raw[i] = *(const uint32_t *) (shared + __byte_perm(four, of_thread, 0x5504 + i * 16));
        }
        if (pair % 2 == 1 && pair + 1 < mm::STEPS / 2) {
            read(pair / 2 + 1);
        }
    }

    __device__ void finish(int pair, const uint32_t (&raw)[4], uint32_t (&steps)[2][2]) const {
        const half2 scale = __hsub2(mm::magic_of_byte(scales, pair / 2), mm::both(1024.0f + 32.0f));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            steps[i / 2][i % 2] = mm::as_bits(__hmul2(mm::as_half2(raw[i]), scale));
        }
    }
};

// The same of other types, which need no table.
template <ggml_type TYPE> struct PlainRow : mm::Row<TYPE, false> {
    __device__ void look_up(int pair, uint32_t (&raw)[4]) const {
        uint32_t steps[2][2];
        this->two_steps(pair / 2, pair % 2, steps);
        raw[0] = steps[0][0], raw[1] = steps[0][1], raw[2] = steps[1][0], raw[3] = steps[1][1];
    }

    __device__ void finish(int, const uint32_t (&raw)[4], uint32_t (&steps)[2][2]) const {
        steps[0][0] = raw[0], steps[0][1] = raw[1], steps[1][0] = raw[2], steps[1][1] = raw[3];
    }
};

template <ggml_type TYPE> struct RowOf {
    using Type = PlainRow<TYPE>;
};
template <> struct RowOf<GGML_TYPE_IQ4_XS> {
    using Type = TableRow;
};

} // namespace wgmma
} // namespace dflash
