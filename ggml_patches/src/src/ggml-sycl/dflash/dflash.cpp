#include "dflash.hpp"

#include "ggml-dflash-kernels.h"
#include "kernels.hpp"

void ggml_sycl_op_dflash(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    switch (ggml_dflash_get_op(dst)) {
#define RUN(SUFFIX, function)                                                                                          \
    case GGML_DFLASH_OP_##SUFFIX:                                                                                      \
        return dflash::function(ctx, dst);
        GGML_DFLASH_SYCL_KERNELS(RUN)
#undef RUN
    default:
        GGML_ABORT("DFLASH sub-op %d is refused by ggml_dflash_supported", (int) ggml_dflash_get_op(dst));
    }
}

bool ggml_sycl_dflash_supported(const ggml_tensor * op) {
    return ggml_dflash_supported(GGML_DFLASH_BACKEND_SYCL, op);
}
