#pragma once

// mul_mat: products of decoded weights and columns, on tensor cores or by each thread for itself.
//
// A warp has 16 rows and N4 tiles of 4 columns. Thread (g, q) = (lane / 4, lane % 4) decodes rows g and g + 8 and ends
// up with the sums of these rows and column q of each tile. Products of a step are exact, and so are the sums of a
// super-block up to the weights' F32 unit (Q8_0: of 32); a number is the sum of its row's and its column's products in
// the order of K, and nothing else has a part in it.

#include "mul_mat_decode.cuh"

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#include "attention_ptx.cuh"
#if defined(AMPERE_MMA_AVAILABLE)
#define DFLASH_MM_TENSOR
#endif
#endif

namespace dflash {
namespace mm {

// Largest number of tiles of 4 columns where there are no tensor cores, and for which blocks of the most warps share an
// SM's registers.
constexpr int MAX_GENERAL_N4 = 2;
#if defined(DFLASH_MM_TENSOR)
constexpr int MAX_SHARED_N4 = 4;
#else
constexpr int MAX_SHARED_N4 = 0;
#endif

// Sum of scale * (256 high + low). Digits are summed apart where scales are integers: 256 products of 7, 7 and 7 bits.
template <typename Scale> struct Total;

template <> struct Total<int> {
    int high = 0, low = 0;

    __device__ void add(int of_high, int of_low, int scale) {
        high += of_high * scale;
        low += of_low * scale;
    }

    __device__ float value() const { return fmaf(256.0f, (float) high, (float) low); }
};

template <> struct Total<float> {
    float sum = 0.0f;

    __device__ void add(int of_high, int of_low, float scale) {
        sum = fmaf(scale, (float) (256 * of_high + of_low), sum);
    }

    __device__ float value() const { return sum; }
};

// A step's weights as this thread has them, rows g and g + 8: word 0 of each, then word 1; and their scales.
template <ggml_type TYPE, int SUMMANDS> struct Weights {
    uint32_t words[SUMMANDS][4];
    typename Row<TYPE>::Scale scales[STEP_SCALES<TYPE>][2];
};

#if defined(DFLASH_MM_TENSOR)

// Words whose sum a weight is. Up to 8 columns tensor cores have time for two.
template <ggml_type TYPE, int N4> constexpr int N_SUMMANDS = TYPE == GGML_TYPE_IQ4_XS && N4 <= 2 ? 2 : 1;

// c += a b; a: 16 rows of 32 bytes, b: 8 columns
__device__ __forceinline__ void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], const uint2 & b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

// the same for 16 bytes
__device__ __forceinline__ void multiply_bytes(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// The columns' words of a step as this thread multiplies them.
template <int N4> struct StepColumns {
    uint2 of[N4];

    __device__ StepColumns(const uint2 * step, int lane) {
        if constexpr (N4 == 1) {
            of[0] = step[place_in_step(N4, 0, lane)];
        } else {
#pragma unroll
            for (int i = 0; i < N4; i += 2) { // two tiles at once
                const uint4 both = *(const uint4 *) (step + place_in_step(N4, i, lane));
                of[i] = {both.x, both.y};
                of[i + 1] = {both.z, both.w};
            }
        }
    }
};

// Of a tile of columns: this thread's column.
template <ggml_type TYPE> struct Products {
    Total<typename Row<TYPE>::Scale> totals[2];

    template <int SUMMANDS, int N4>
    __device__ void add(const Weights<TYPE, SUMMANDS> & a, const StepColumns<N4> & columns, int tile) {
        const uint2 b = columns.of[tile];
        if constexpr (STEP_SCALES<TYPE> == 1) {
            int c[4] = {};
#pragma unroll
            for (int i = 0; i < SUMMANDS; i++) {
                multiply_bytes(c, a.words[i], b);
            }
            take(c, a.scales[0]);
        } else {
            int first[4] = {}, last[4] = {};
            multiply_bytes(first, a.words[0][0], a.words[0][1], b.x);
            multiply_bytes(last, a.words[0][2], a.words[0][3], b.y);
            take(first, a.scales[0]);
            take(last, a.scales[1]);
        }
    }

    __device__ void take(const int (&c)[4], const typename Row<TYPE>::Scale (&scales)[2]) {
        totals[0].add(c[0], c[1], scales[0]);
        totals[1].add(c[2], c[3], scales[1]);
    }

    __device__ float value(int row) const { return totals[row].value(); }
};

// Sums of minima and of columns' sums: rows g and g + 8.
template <int N4>
__device__ __forceinline__ void add_minima(float (&to)[2], const uint32_t (&a)[4], const StepColumns<N4> & sums,
                                           int tile) {
    float c[4] = {};
    attn::multiply(c, a, sums.of[tile].x, sums.of[tile].y);
    to[0] = c[0], to[1] = c[2];
}

#else

template <ggml_type TYPE, int N4> constexpr int N_SUMMANDS = 1;

// The columns' words of a step, where this thread finds them.
template <int N4> struct StepColumns {
    const uint2 * step;
    int lane;

    __device__ StepColumns(const uint2 * columns, int of_thread) : step(columns), lane(of_thread) {}

    __device__ uint2 of(int tile, int column, int digit) const {
        return step[place_in_step(N4, tile, column * 8 + digit * 4 + lane % 4)];
    }
};

__device__ __forceinline__ float sum_of_four(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1, 32);
    return x + __shfl_xor_sync(0xffffffff, x, 2, 32);
}

// Of a tile of columns: all four, over this thread's elements.
template <ggml_type TYPE> struct Products {
    Total<typename Row<TYPE>::Scale> totals[4][2];

    template <int N4> __device__ void add(const Weights<TYPE, 1> & a, const StepColumns<N4> & columns, int tile) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint2 high = columns.of(tile, i / 2, 0), low = columns.of(tile, i / 2, 1);
            const int first = (int) a.words[0][i % 2], last = (int) a.words[0][i % 2 + 2];
            const int high_first = ggml_cuda_dp4a(first, (int) high.x, 0);
            const int low_first = ggml_cuda_dp4a(first, (int) low.x, 0);
            const int high_last = ggml_cuda_dp4a(last, (int) high.y, 0);
            const int low_last = ggml_cuda_dp4a(last, (int) low.y, 0);
            auto & total = totals[i / 2][i % 2];
            if constexpr (STEP_SCALES<TYPE> == 1) {
                total.add(high_first + high_last, low_first + low_last, a.scales[0][i % 2]);
            } else {
                total.add(high_first, low_first, a.scales[0][i % 2]);
                total.add(high_last, low_last, a.scales[1][i % 2]);
            }
        }
    }

    __device__ float value(int row) const {
        float mine = 0.0f;
#pragma unroll
        for (int column = 0; column < 4; column++) {
            const float sum = sum_of_four(totals[column][row].value());
            mine = column == threadIdx.x % 4 ? sum : mine;
        }
        return mine;
    }
};

__device__ __forceinline__ float dot(uint32_t a, uint32_t b, float sum) {
    const float2 x = __half22float2(as_half2(a)), y = __half22float2(as_half2(b));
    return fmaf(x.y, y.y, fmaf(x.x, y.x, sum));
}

template <int N4>
__device__ __forceinline__ void add_minima(float (&to)[2], const uint32_t (&a)[4], const StepColumns<N4> & sums,
                                           int tile) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint2 b = sums.of(tile, i / 2, 0);
        const float sum = sum_of_four(dot(a[i % 2 + 2], b.y, dot(a[i % 2], b.x, 0.0f)));
        to[i % 2] = i / 2 == threadIdx.x % 4 ? sum : to[i % 2];
    }
}

#endif

// What a warp's rows have so far, of column q of each tile: F32, one fused multiply-add for each super-block.
template <int N4> struct Sums {
    float of[N4][2] = {};

    __device__ void add(int tile, const float (&values)[2], const float (&row_units)[2], float column_unit) {
        of[tile][0] = fmaf(row_units[0] * column_unit, values[0], of[tile][0]);
        of[tile][1] = fmaf(row_units[1] * column_unit, values[1], of[tile][1]);
    }
};

// One super-block of the columns.
template <int N4> struct Columns {
    const uint2 *digits, *sums;
    const float * units; // of this thread's column of the first tile

    __device__ Columns(const Scratch & scratch, int64_t block, int lane)
        : digits(scratch.columns + block * (STEPS * N4 * 32)), sums(scratch.sums + block * (N4 * 32)),
          units(scratch.units + block * (4 * N4) + lane % 4) {}
};

// A super-block of a warp's rows, which are at `at` as this thread has them, and of all columns.
template <ggml_type TYPE, int N4>
__device__ __forceinline__ void meet_super_block(Sums<N4> & sums, const char * shared, const int (&at)[2],
                                                 const Columns<N4> & columns, const Table<TYPE> & table, int lane) {
    constexpr int SUMMANDS = N_SUMMANDS<TYPE, N4>;
    constexpr int UNROLL = N4 <= 4 ? 4 : N4 <= 8 ? 2 : 1; // as registers allow
    const Row<TYPE> rows[2] = {Row<TYPE>(shared, at[0], table), Row<TYPE>(shared, at[1], table)};
    Products<TYPE> products[N4];
#pragma unroll UNROLL
    for (int t = 0; t < STEPS / 2; t++) {
        uint32_t words[2][SUMMANDS][2][2];
        rows[0].steps(t, words[0]);
        rows[1].steps(t, words[1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int step = 2 * t + i;
            Weights<TYPE, SUMMANDS> a;
#pragma unroll
            for (int j = 0; j < SUMMANDS * 4; j++) {
                a.words[j / 4][j % 4] = words[j % 2][j / 4][i][j / 2 % 2];
            }
#pragma unroll
            for (int j = 0; j < 2 * STEP_SCALES<TYPE>; j++) {
                a.scales[j / 2][j % 2] = rows[j % 2].scale(step, j / 2);
            }
            const StepColumns<N4> b(columns.digits + step * (N4 * 32), lane);
#pragma unroll
            for (int tile = 0; tile < N4; tile++) {
                products[tile].add(a, b, tile);
            }
        }
    }
    const float units[2] = {rows[0].unit(), rows[1].unit()};
#pragma unroll
    for (int tile = 0; tile < N4; tile++) {
        sums.add(tile, {products[tile].value(0), products[tile].value(1)}, units, columns.units[4 * tile]);
    }
    if constexpr (HAS_MINIMA<TYPE>) {
        const float min_units[2] = {-rows[0].min_unit(), -rows[1].min_unit()};
        uint32_t a[4] = {0, 0, rows[0].minima, rows[1].minima};
        const StepColumns<N4> b(columns.sums, lane);
#pragma unroll
        for (int row = 0; row < 2; row++) { // the columns' high digits are 1024, as 32 * 32
            a[row] = as_bits(__hmul2(as_half2(a[row + 2]), __float2half2_rn(32.0f)));
        }
#pragma unroll
        for (int tile = 0; tile < N4; tile++) {
            float values[2] = {};
            add_minima(values, a, b, tile);
            sums.add(tile, values, min_units, columns.units[4 * tile]);
        }
    }
}

} // namespace mm
} // namespace dflash
