#pragma once

// mul_mat on Hopper: the functions of a weight type, chosen when it is known. Each type has a file of its own: they
// take long to compile.

#include "launch.cuh"

namespace dflash {
namespace wgmma {

#define DFLASH_TYPES(DO)                                                                                               \
    DO(GGML_TYPE_IQ4_XS) DO(GGML_TYPE_Q4_K) DO(GGML_TYPE_Q5_K) DO(GGML_TYPE_Q6_K) DO(GGML_TYPE_Q8_0)

#define DFLASH_ELSEWHERE(TYPE) DFLASH_PRODUCTS_OF(extern, TYPE)
DFLASH_TYPES(DFLASH_ELSEWHERE)
#undef DFLASH_ELSEWHERE

// Calls f with the type as a constant.
template <typename F> void by_type(ggml_type type, F f) {
    switch (type) {
#define DFLASH_CASE(TYPE)                                                                                              \
    case TYPE:                                                                                                         \
        return f(std::integral_constant<ggml_type, TYPE>());
        DFLASH_TYPES(DFLASH_CASE)
#undef DFLASH_CASE
    default:
        return; // ggml_dflash_check refuses it
    }
}

} // namespace wgmma
} // namespace dflash
