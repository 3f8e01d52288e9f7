#include "mul_mat_launch.cuh"

namespace dflash {

void mul_mat_q5_k(ggml_backend_cuda_context & ctx, const mm::Node & node, int n_columns) {
    mm::run<GGML_TYPE_Q5_K>(ctx, node, n_columns);
}

} // namespace dflash
