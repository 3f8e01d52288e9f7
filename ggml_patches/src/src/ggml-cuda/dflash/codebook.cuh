#pragma once

// Rows of a codebook of select: F32, F16, BF16 or Q8_0, read as floats.

#include "kernels.cuh"

namespace dflash {

struct Codebook {
    const char * data;
    size_t row_size; // bytes from row to row
    ggml_type type;
};

inline Codebook codebook_of(const ggml_tensor * book) {
    return book ? Codebook{(const char *) book->data, book->nb[1], book->type} : Codebook{nullptr, 0, GGML_TYPE_F32};
}

template <ggml_type TYPE> __device__ __forceinline__ float code_at(const char * row, int r);

template <> __device__ __forceinline__ float code_at<GGML_TYPE_F32>(const char * row, int r) {
    return ((const float *) row)[r];
}

template <> __device__ __forceinline__ float code_at<GGML_TYPE_F16>(const char * row, int r) {
    return __half2float(((const half *) row)[r]);
}

template <> __device__ __forceinline__ float code_at<GGML_TYPE_BF16>(const char * row, int r) {
    return __int_as_float((int) ((uint32_t) ((const uint16_t *) row)[r] << 16));
}

template <> __device__ __forceinline__ float code_at<GGML_TYPE_Q8_0>(const char * row, int r) {
    const block_q8_0 & block = ((const block_q8_0 *) row)[r / QK8_0];
    return (float) block.qs[r % QK8_0] * __half2float(block.d);
}

// to[i * stride + r] = code first + r of row ids[i], times scale[r] if there is one; by a block of THREADS
template <ggml_type TYPE, int THREADS>
__device__ __forceinline__ void read_rows(const Codebook & book, const int * ids, int n_ids, int first, int n_codes,
                                          const float * scale, float * to, int stride) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n_ids * n_codes; i += THREADS) {
        const int row = i / n_codes, r = i % n_codes;
        const float code = code_at<TYPE>(book.data + (int64_t) ids[row] * book.row_size, first + r);
        to[row * stride + r] = scale ? code * scale[r] : code;
    }
}

template <int THREADS>
__device__ __forceinline__ void read_codes(const Codebook & book, const int * ids, int n_ids, int first, int n_codes,
                                           const float * scale, float * to, int stride) {
    switch (book.type) {
#define READ(TYPE)                                                                                                     \
    case TYPE:                                                                                                         \
        return read_rows<TYPE, THREADS>(book, ids, n_ids, first, n_codes, scale, to, stride);
        GGML_DFLASH_CODEBOOK_TYPES(READ)
#undef READ
    default: // refused by ggml_dflash_check
        return;
    }
}

} // namespace dflash
