#pragma once

// mul_mat: products of decoded weights and columns, on tensor cores or by each thread for itself.
//
// A warp has TILES tiles of 16 rows and N8 tiles of 8 columns. Thread (g, q) = (lane / 4, lane % 4) decodes rows g and
// g + 8 of a tile and ends up with the sums of these rows and columns 2q and 2q + 1: sums 0, 1 of row g, 2, 3 of g + 8.
// A number is the sum of its row's and its column's products; nothing else has a part in it.

#include "mul_mat_decode.cuh"

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#include "attention_ptx.cuh"
#if defined(AMPERE_MMA_AVAILABLE)
#define DFLASH_MM_TENSOR
#endif
#endif

namespace dflash {
namespace mm {

// Largest number of tiles of 8 columns where there are no tensor cores, and where a table pays.
constexpr int MAX_GENERAL_N8 = 1, MAX_TABLE_N8 = 2;

#if defined(DFLASH_MM_TENSOR)

// A value of which the compiler does not know that it is the same each time: what follows from it is computed where it
// is needed instead of being kept in registers that the products need.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// of 32 column pairs, the first that a thread reads
__device__ __forceinline__ int first_pair(int lane) {
    return lane;
}

template <int N8> struct Products {
    float sums[N8][4] = {};

    __device__ void add(int tile, const uint32_t (&a)[2][4], const uint4 & b) {
        attn::multiply(sums[tile], a[0], b.x, b.y);
        attn::multiply(sums[tile], a[1], b.z, b.w);
    }

    __device__ void total(float (&to)[N8][4]) const {
#pragma unroll
        for (int i = 0; i < 4 * N8; i++) {
            to[i / 4][i % 4] = sums[i / 4][i % 4];
        }
    }
};

// Adds two steps. a[m][step]: pair 0 of rows g and g + 8, then pair 1.
template <int TILES, int N8>
__device__ __forceinline__ void add_steps(Products<N8> (&products)[TILES], const uint32_t (&a)[TILES][2][4],
                                          const uint4 * columns) {
#pragma unroll
    for (int tile = 0; tile < N8; tile++) {
        const uint4 b = columns[tile * 32];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            products[m].add(tile, a[m], b);
        }
    }
}

#else

__device__ __forceinline__ int opaque(int x) {
    return x;
}

__device__ __forceinline__ int first_pair(int lane) {
    return lane % 4; // and every fourth
}

template <int N8> struct Products {
    float sums[N8][8][2] = {}; // of all columns, over this thread's elements

    static __device__ float dot(uint32_t a, uint32_t b, float sum) {
        const float2 x = __half22float2(as_half2(a)), y = __half22float2(as_half2(b));
        return fmaf(x.y, y.y, fmaf(x.x, y.x, sum));
    }

    __device__ void add(int tile, int column, const uint32_t (&a)[2][4], const uint4 & b) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            float & sum = sums[tile][column][row];
            sum = dot(a[0][row + 2], b.y, dot(a[0][row], b.x, sum));
            sum = dot(a[1][row + 2], b.w, dot(a[1][row], b.z, sum));
        }
    }

    __device__ void total(float (&to)[N8][4]) const {
        const int q = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < N8 * 16; i++) {
            const int tile = i / 16, column = i / 2 % 8, row = i % 2;
            float sum = sums[tile][column][row];
            sum += __shfl_xor_sync(0xffffffff, sum, 1, 32);
            sum += __shfl_xor_sync(0xffffffff, sum, 2, 32);
            float & mine = to[tile][2 * row + column % 2];
            mine = column / 2 == q ? sum : mine;
        }
    }
};

template <int TILES, int N8>
__device__ __forceinline__ void add_steps(Products<N8> (&products)[TILES], const uint32_t (&a)[TILES][2][4],
                                          const uint4 * columns) {
#pragma unroll
    for (int i = 0; i < N8 * 8; i++) {
        const uint4 b = columns[i * 4];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            products[m].add(i / 8, i % 8, a[m], b);
        }
    }
}

#endif

// What a warp's rows have so far: F32, one fused multiply-add for each unit of weights.
template <int TILES, int N8> struct Sums {
    float of[TILES][N8][4] = {};

    // += unit * products, which start again
    __device__ void take(Products<N8> (&products)[TILES], const float (&units)[TILES][2]) {
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            float total[N8][4];
            products[m].total(total);
            products[m] = Products<N8>();
#pragma unroll
            for (int i = 0; i < 4 * N8; i++) {
                float & sum = of[m][i / 4][i % 4];
                sum = fmaf(units[m][i % 4 / 2], total[i / 4][i % 4], sum);
            }
        }
    }
};

// One super-block of a warp's rows and of all columns, given as this thread's. at[m] are the places of rows g and g + 8
// of tile m.
template <ggml_type TYPE, bool TABLE, int TILES, int N8>
__device__ __forceinline__ void meet_super_block(Sums<TILES, N8> & sums, const char * shared, const int (&at)[TILES][2],
                                                 const uint4 * columns, const uint4 * column_sums) {
    constexpr int QUARTERS = N8 <= 2 ? 4 : N8 <= 4 ? 2 : 1, PARTS = N8 <= 4 ? 2 : 1; // at once, as registers allow
    Row<TYPE, TABLE> rows[TILES][2];
    Products<N8> products[TILES];
    uint32_t a[TILES][2][4] = {};
    float units[TILES][2];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        rows[i / 2][i % 2].open(shared, at[i / 2][i % 2]);
    }
    if constexpr (HAS_MINIMA<TYPE>) { // their second step is zeros
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            a[i / 2][0][i % 2] = a[i / 2][0][i % 2 + 2] = rows[i / 2][i % 2].minima;
            units[i / 2][i % 2] = -rows[i / 2][i % 2].min_unit();
        }
        add_steps(products, a, column_sums);
        sums.take(products, units);
    }
#pragma unroll QUARTERS
    for (int t = 0; t < 4; t++) {
#pragma unroll PARTS
        for (int part = 0; part < 2; part++) {
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                uint32_t pairs[2][2];
                rows[i / 2][i % 2].two_steps(t, part, pairs);
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    a[i / 2][step][i % 2] = pairs[step][0];
                    a[i / 2][step][i % 2 + 2] = pairs[step][1];
                }
            }
            add_steps(products, a, columns + (2 * t + part) * (N8 * 32));
            if constexpr (UNIT_STEPS<TYPE> == 2) {
#pragma unroll
                for (int i = 0; i < 2 * TILES; i++) {
                    units[i / 2][i % 2] = rows[i / 2][i % 2].unit_of(2 * t + part);
                }
                sums.take(products, units);
            }
        }
    }
    if constexpr (UNIT_STEPS<TYPE> == STEPS) {
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            units[i / 2][i % 2] = rows[i / 2][i % 2].unit();
        }
        sums.take(products, units);
    }
}

} // namespace mm
} // namespace dflash
