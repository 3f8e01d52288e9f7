#include "dflash.cuh"

#include "ggml-dflash-kernels.h"
#include "kernels.cuh"
#if defined(DFLASH_SM90A)
#include "fuse.cuh"
#endif

void ggml_cuda_op_dflash(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    switch (ggml_dflash_get_op(dst)) {
#define RUN(SUFFIX, function)                                                                                          \
    case GGML_DFLASH_OP_##SUFFIX:                                                                                      \
        return dflash::function(ctx, dst);
        GGML_DFLASH_CUDA_KERNELS(RUN)
#undef RUN
    default:
        GGML_ABORT("DFLASH sub-op %d is refused by ggml_dflash_supported", (int) ggml_dflash_get_op(dst));
    }
}

bool ggml_cuda_dflash_supported(const ggml_tensor * op) {
#if defined(GGML_USE_HIP)
    return ggml_dflash_supported(GGML_DFLASH_BACKEND_HIP, op);
#else
    return ggml_dflash_supported(GGML_DFLASH_BACKEND_CUDA, op);
#endif
}

int ggml_cuda_dflash_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
#if defined(DFLASH_SM90A)
    if (ggml_cuda_info().devices[ctx.device].cc == GGML_CUDA_CC_HOPPER) {
        return dflash::wgmma::fuse(ctx, graph, i);
    }
#endif
    GGML_UNUSED_VARS(ctx, graph, i);
    return -1;
}
