#pragma once

// What upstream's dispatch sees of our CUDA (and HIP) kernels. Everything else is in kernels.cuh.

#include "../common.cuh"
#include "ggml-dflash.h"

void ggml_cuda_op_dflash(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
bool ggml_cuda_dflash_supported(const ggml_tensor * op);

// Computes node i of a graph and some behind it: how many behind it, or -1 if nothing is known that begins there.
int ggml_cuda_dflash_fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i);
