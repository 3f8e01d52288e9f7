// What each backend's kernels take: the predicate of the ops, narrowed by the backend's list.

#include "ggml-dflash-kernels.h"
#include "ggml-dflash.h"

#include <stddef.h>

#define LISTED(SUFFIX, function) 1u << GGML_DFLASH_OP_##SUFFIX |

static const unsigned KERNELS[] = {
    [GGML_DFLASH_BACKEND_CPU] = GGML_DFLASH_CPU_KERNELS(LISTED) 0u,
    [GGML_DFLASH_BACKEND_CUDA] = GGML_DFLASH_CUDA_KERNELS(LISTED) 0u,
    [GGML_DFLASH_BACKEND_HIP] = GGML_DFLASH_CUDA_KERNELS(LISTED) 0u,
    [GGML_DFLASH_BACKEND_SYCL] = GGML_DFLASH_SYCL_KERNELS(LISTED) 0u,
};

bool ggml_dflash_supported(enum ggml_dflash_backend backend, const struct ggml_tensor * op) {
    const size_t n = sizeof(KERNELS) / sizeof(KERNELS[0]);
    return (size_t) backend < n && ggml_dflash_check(op) == NULL && (KERNELS[backend] >> ggml_dflash_get_op(op) & 1);
}
