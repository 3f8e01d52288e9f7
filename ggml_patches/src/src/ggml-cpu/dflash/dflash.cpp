#include "dflash/dflash.h"

#include "dflash/kernels.h"
#include "ggml-dflash-kernels.h"

void ggml_compute_forward_dflash(const ggml_compute_params * params, ggml_tensor * dst) {
    switch (ggml_dflash_get_op(dst)) {
#define RUN(SUFFIX, function)                                                                                          \
    case GGML_DFLASH_OP_##SUFFIX:                                                                                      \
        return dflash::function(params, dst);
        GGML_DFLASH_CPU_KERNELS(RUN)
#undef RUN
    }
    GGML_ABORT("DFLASH sub-op %d is refused by ggml_dflash_check", (int) ggml_dflash_get_op(dst));
}

size_t ggml_dflash_work_size(const ggml_tensor * node, int n_tasks) {
    switch (ggml_dflash_get_op(node)) {
    case GGML_DFLASH_OP_ATTENTION:
        return dflash::attention_work_size(node, n_tasks);
    case GGML_DFLASH_OP_MUL_MAT:
        return dflash::mul_mat_work_size(node);
    case GGML_DFLASH_OP_SELECT:
        return dflash::select_work_size(node);
    case GGML_DFLASH_OP_PENALISE:
        return dflash::penalise_work_size(node, n_tasks);
    default:
        return 0;
    }
}
