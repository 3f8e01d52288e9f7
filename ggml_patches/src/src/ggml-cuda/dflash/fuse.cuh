#pragma once

// Nodes that a device takes together.

#include "kernels.cuh"

namespace dflash {
namespace wgmma {

// Computes node i and some behind it, on Hopper: how many behind it, or -1 if node i begins nothing that is known.
int fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i);

} // namespace wgmma
} // namespace dflash
