#pragma once

// Launches whose blocks form clusters, on Hopper and later.

#include "../common.cuh"

#if defined(GGML_CUDA_USE_PDL)
namespace dflash {

// Whether the device code has clusters: it has them where it has programmatic launches.
inline bool has_clusters(const void * kernel) {
    return ggml_cuda_kernel_can_use_pdl(kernel);
}

// All blocks along x are one cluster.
template <typename Node>
void launch_clusters(void (*kernel)(Node), const ggml_cuda_kernel_launch_params & params, const Node & node) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = params.block_nums.x;
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = params.block_nums;
    config.blockDim = params.block_dims;
    config.stream = params.stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, node));
}

} // namespace dflash
#endif
