#pragma once

// mul_mat: what of a weight type the kernel has to know, and where the elements of a super-block go.
//
// A super-block of 256 elements is 8 steps of 32, each one product of bytes. The elements of a step may come in any
// order, as long as weights and columns agree, so every type takes them as its bytes hold them: a thread decodes only
// what it multiplies itself. In a step, thread q of four has the 8 elements element<TYPE>(step, q, 0..7), as two words.

#include "kernels.cuh"

namespace dflash {
namespace mm {

constexpr int SUPER = 256, STEPS = 8; // elements of a super-block, its steps
constexpr int ROWS = 16;              // that a warp takes
constexpr int MAX_WARPS = 12, BLOCKS_PER_SM = 2;
constexpr int MAX_HEIGHT = MAX_WARPS * ROWS; // rows that a block takes at a time

// BYTES of a super-block, its alignment in every tensor whose rows have that of a block; BATCH super-blocks of a row
// arrive together, in one of STAGES places. Rows in shared memory are PITCH bytes apart, and SKEW more every 4: chosen
// so that what the threads of a warp read at a time, of 8 rows, lies in different banks, or nearly so.
template <ggml_type TYPE> struct Format;
template <> struct Format<GGML_TYPE_IQ4_XS> {
    static constexpr int BYTES = 136, ALIGN = 8, BATCH = 2, STAGES = 2, PITCH = 288, SKEW = 16;
};
template <> struct Format<GGML_TYPE_Q4_K> {
    static constexpr int BYTES = 144, ALIGN = 16, BATCH = 2, STAGES = 2, PITCH = 288, SKEW = 0;
};
template <> struct Format<GGML_TYPE_Q5_K> {
    static constexpr int BYTES = 176, ALIGN = 16, BATCH = 1, STAGES = 2, PITCH = 224, SKEW = 0;
};
template <> struct Format<GGML_TYPE_Q6_K> {
    static constexpr int BYTES = 210, ALIGN = 2, BATCH = 1, STAGES = 2, PITCH = 240, SKEW = 0;
};
template <> struct Format<GGML_TYPE_Q8_0> {
    static constexpr int BYTES = 272, ALIGN = 2, BATCH = 1, STAGES = 2, PITCH = 288, SKEW = 0;
};

template <ggml_type TYPE> __host__ __device__ constexpr int row_place(int row) {
    return row * Format<TYPE>::PITCH + row / 4 * Format<TYPE>::SKEW;
}

// Words are read whole: up to 4 bytes behind the last row's place.
template <ggml_type TYPE> constexpr int STAGE_BYTES = row_place<TYPE>(ROWS);
constexpr int SHARED_SLACK = 16;

// Pieces of 16 bytes, aligned in global memory, that a batch of a row lies in.
template <ggml_type TYPE>
constexpr int GRANULES = (16 - Format<TYPE>::ALIGN + Format<TYPE>::BATCH * Format<TYPE>::BYTES + 15) / 16;

template <ggml_type TYPE> constexpr bool HAS_MINIMA = TYPE == GGML_TYPE_Q4_K || TYPE == GGML_TYPE_Q5_K;

// Scales of a step, each for half of it or for all.
template <ggml_type TYPE> constexpr int STEP_SCALES = TYPE == GGML_TYPE_Q6_K ? 2 : 1;

template <ggml_type TYPE> __host__ __device__ constexpr int element(int step, int q, int i) {
    if (TYPE == GGML_TYPE_IQ4_XS) { // a byte has two elements, 16 apart
        return step * 32 + 4 * q + i / 2 + i % 2 * 16;
    }
    if (TYPE == GGML_TYPE_Q6_K) { // a byte of three places has four elements, 32 apart: two in each of two steps
        return step / 4 * 128 + (step % 2 * 2 + i / 4) * 32 + step / 2 % 2 * 16 + 4 * q + i % 4;
    }
    return step * 32 + 8 * q + i;
}

// One product: y[n_columns][n_rows] of x [n_columns][256 n_blocks] and w [n_rows], w_row bytes apart.
struct Node {
    const char * w;
    int64_t w_row;
    const float * x;
    float * y;
    int n_blocks, n_rows, n_columns;
    bool is_aligned; // as Format says
};

// What the kernels hand on: N4 tiles of 4 columns, an element's two digits (mul_mat_columns.cuh) in neighbouring
// columns of a product: thread (j, q) = (lane / 4, lane % 4) has digit j % 2 of column j / 2 of a tile. A thread reads
// two tiles at once if there are as many.
struct Scratch {
    uint2 * columns; // [n_blocks][STEPS][N4 / 2][32][2] or [n_blocks][STEPS][32]: two words of bytes
    uint2 * sums;    // [n_blocks] and the same, where there are minima: of sub-blocks 2q and 2q + 1, digits as f16
    float * units;   // [n_blocks][4 N4]: what a column's numbers are multiples of; NaN if one is not finite
    float2 * parts;  // sums of rows whose super-blocks are cut
    int * arrived;   // how many parts of the rows of a warp are there
};

// Where thread `lane` of a tile is, of the tiles of one step.
__host__ __device__ constexpr int place_in_step(int n_tiles, int tile, int lane) {
    return n_tiles == 1 ? lane : (tile / 2 * 32 + lane) * 2 + tile % 2;
}

} // namespace mm
} // namespace dflash
