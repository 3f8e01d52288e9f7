#pragma once

// Rows of stored numbers: element i of a row as F32, exactly.

#include "kernels.hpp"
#include "numbers.hpp"

namespace dflash {

template <ggml_type TYPE> inline float element(const char * row, int i);

template <> inline float element<GGML_TYPE_F32>(const char * row, int i) {
    return ((const float *) row)[i];
}

template <> inline float element<GGML_TYPE_F16>(const char * row, int i) {
    return (float) ((const sycl::half *) row)[i];
}

template <> inline float element<GGML_TYPE_BF16>(const char * row, int i) {
    return float_of((uint32_t) ((const uint16_t *) row)[i] << 16);
}

template <> inline float element<GGML_TYPE_Q8_0>(const char * row, int i) {
    const block_q8_0 & block = ((const block_q8_0 *) row)[i / QK8_0];
    return (float) block.d * (float) block.qs[i % QK8_0];
}

template <ggml_type TYPE> struct Stored {
    static constexpr ggml_type type = TYPE;
};

// do_it(Stored<type>()), for a type that is one of TYPES.
template <ggml_type... TYPES, typename Do> inline void with_type(ggml_type type, const Do & do_it) {
    ((type == TYPES ? do_it(Stored<TYPES>()) : void()), ...);
}

} // namespace dflash
