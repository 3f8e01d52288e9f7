#pragma once

// mul_mat: what of a weight type the kernel has to know, and where the elements of a super-block go.
//
// A super-block of 256 elements is 16 steps of 16, each one product of tensor cores. The elements of a step may be any
// 16, as long as weights and columns agree, so every type takes them as its bytes hold them: a thread decodes only what
// it multiplies itself. In a step, thread q of four has the pairs r = 0 and r = 1, of which half h is
// element<TYPE>(step, q, r, h) of the super-block. Steps 4t..4t+3 are quarter t.

#include "kernels.cuh"

namespace dflash {
namespace mm {

constexpr int SUPER = 256, STEPS = 16, TILE = 16; // elements of a super-block, its steps; rows of a product
constexpr int MAX_HEIGHT = 256;                   // rows that a block takes at a time
constexpr int HEIGHT_STEP = 32;

// BYTES of a super-block, its alignment in every tensor whose rows have that of a block; BATCH super-blocks of a row
// arrive together, in one of STAGES places. Rows in shared memory are PITCH bytes apart: chosen so that what the 32
// threads of a warp read at a time, of 8 rows, lies in different banks.
template <ggml_type TYPE> struct Format;
template <> struct Format<GGML_TYPE_IQ4_XS> {
    static constexpr int BYTES = 136, ALIGN = 8, BATCH = 2, STAGES = 2, PITCH = 288;
};
template <> struct Format<GGML_TYPE_Q4_K> {
    static constexpr int BYTES = 144, ALIGN = 8, BATCH = 2, STAGES = 2, PITCH = 352;
};
template <> struct Format<GGML_TYPE_Q5_K> {
    static constexpr int BYTES = 176, ALIGN = 8, BATCH = 1, STAGES = 3, PITCH = 224;
};
template <> struct Format<GGML_TYPE_Q6_K> {
    static constexpr int BYTES = 210, ALIGN = 2, BATCH = 1, STAGES = 3, PITCH = 240;
};
template <> struct Format<GGML_TYPE_Q8_0> {
    static constexpr int BYTES = 272, ALIGN = 2, BATCH = 1, STAGES = 2, PITCH = 304;
};

// Pieces of 16 bytes, aligned in global memory, that a batch of a row lies in.
template <ggml_type TYPE>
constexpr int GRANULES = (16 - Format<TYPE>::ALIGN + Format<TYPE>::BATCH * Format<TYPE>::BYTES + 15) / 16;

template <ggml_type TYPE> constexpr bool HAS_MINIMA = TYPE == GGML_TYPE_Q4_K || TYPE == GGML_TYPE_Q5_K;

// Steps that share the float that their weights are multiples of.
template <ggml_type TYPE> constexpr int UNIT_STEPS = TYPE == GGML_TYPE_Q8_0 ? 2 : STEPS;

template <ggml_type TYPE> __host__ __device__ constexpr int element(int step, int q, int r, int h) {
    const int t = step / 4, i = step % 4;
    if (TYPE == GGML_TYPE_IQ4_XS) { // 8 bytes a quarter, a pair each; a half sub-block is 8 bytes
        const int piece = q + 4 * t;
        return piece / 2 * 32 + piece % 2 * 8 + 2 * i + r + 16 * h;
    }
    if (TYPE == GGML_TYPE_Q6_K) { // 4 bytes of three places a quarter: quarters of 32 elements, i of them
        return t / 2 * 128 + i * 32 + t % 2 * 16 + 4 * q + 2 * r + h;
    }
    if (TYPE == GGML_TYPE_Q8_0) { // 8 bytes of two blocks a quarter
        return t * 64 + i / 2 * 32 + i % 2 * 16 + 4 * q + 2 * r + h;
    }
    return t * 64 + i % 2 * 32 + 8 * q + i / 2 * 4 + r + 2 * h; // 8 bytes a quarter: low nibbles, then high ones
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

// Of all columns of a mul_mat; whether rows are aligned the general kernel finds out.
inline Node node_of(const ggml_tensor * dst) {
    const ggml_tensor *w = dst->src[0], *x = dst->src[1];
    Node node = {};
    node.w = (const char *) w->data, node.w_row = (int64_t) w->nb[1];
    node.x = (const float *) x->data, node.y = (float *) dst->data;
    node.n_blocks = (int) (w->ne[0] / SUPER), node.n_rows = (int) w->ne[1];
    node.n_columns = (int) ggml_nrows(x);
    return node;
}

// What the kernels hand on. N8 tiles of 8 columns.
struct Scratch {
    uint4 * columns; // [n_blocks][STEPS / 2][N8][32]: of two steps, the pairs of column lane / 4, q = lane % 4
    uint4 * sums;    // [n_blocks][N8][32]: the same for the sums of each 32 elements, where there are minima
    float * units;   // [8 N8]: what a column's numbers are multiples of; NaN if it is not finite
    float4 * parts;  // sums of rows whose super-blocks are cut
    int * arrived;   // how many parts of the rows of a warp are there
};

} // namespace mm
} // namespace dflash
