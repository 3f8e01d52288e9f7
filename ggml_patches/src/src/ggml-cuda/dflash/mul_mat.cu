// Quantised weights times columns: which type, and the first of them. What is computed, and by whom, is in
// mul_mat_*.cuh.

#include "mul_mat_launch.cuh"
#if defined(DFLASH_SM90A)
#include "sm90a/mul_mat.cuh"
#endif

namespace dflash {

void mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
#if defined(DFLASH_SM90A)
    if (ggml_cuda_info().devices[ctx.device].cc == GGML_CUDA_CC_HOPPER && wgmma::Product::takes(dst)) {
        return wgmma::mul_mat(ctx, dst);
    }
#endif
    const mm::Node node = mm::node_of(dst);
    const ggml_type type = dst->src[0]->type;
    const int n_columns = node.n_columns;
    switch (type) {
    case GGML_TYPE_IQ4_XS:
        return mm::run<GGML_TYPE_IQ4_XS>(ctx, node, n_columns);
    case GGML_TYPE_Q4_K:
        return mul_mat_q4_k(ctx, node, n_columns);
    case GGML_TYPE_Q5_K:
        return mul_mat_q5_k(ctx, node, n_columns);
    case GGML_TYPE_Q6_K:
        return mul_mat_q6_k(ctx, node, n_columns);
    case GGML_TYPE_Q8_0:
        return mul_mat_q8_0(ctx, node, n_columns);
    default:
        GGML_ABORT("weight type %s is refused by ggml_dflash_check", ggml_type_name(type));
    }
}

} // namespace dflash
