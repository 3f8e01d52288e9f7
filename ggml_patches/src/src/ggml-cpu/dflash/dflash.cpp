#include "dflash/dflash.h"

#include "dflash/kernels.h"

void ggml_compute_forward_dflash(const ggml_compute_params * params, ggml_tensor * dst) {
    switch (ggml_dflash_get_op(dst)) {
    case GGML_DFLASH_OP_GDN_VERIFY:
        dflash::gdn_verify(params, dst);
        return;
    case GGML_DFLASH_OP_GDN_ADVANCE:
        dflash::gdn_advance(params, dst);
        return;
    case GGML_DFLASH_OP_GDN_COMMIT:
        dflash::gdn_commit(params, dst);
        return;
    case GGML_DFLASH_OP_CONV_VERIFY:
        dflash::conv_verify(params, dst);
        return;
    case GGML_DFLASH_OP_CONV_ADVANCE:
        dflash::conv_advance(params, dst);
        return;
    case GGML_DFLASH_OP_CONV_COMMIT:
        dflash::conv_commit(params, dst);
        return;
    case GGML_DFLASH_OP_ATTENTION:
        dflash::attention(params, dst);
        return;
    case GGML_DFLASH_OP_MUL_MAT:
        dflash::mul_mat(params, dst);
        return;
    }
    GGML_ABORT("DFLASH sub-op %d is refused by ggml_dflash_check", (int) ggml_dflash_get_op(dst));
}

size_t ggml_dflash_work_size(const ggml_tensor * node, int n_tasks) {
    switch (ggml_dflash_get_op(node)) {
    case GGML_DFLASH_OP_ATTENTION:
        return dflash::attention_work_size(node, n_tasks);
    case GGML_DFLASH_OP_MUL_MAT:
        return dflash::mul_mat_work_size(node);
    default:
        return 0;
    }
}
