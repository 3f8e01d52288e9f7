#pragma once

// mul_mat on Hopper: the launches of one weight type.

#include "kernel.cuh"
#include "sources.cuh"

#include <algorithm>

namespace dflash {
namespace wgmma {

// Tiles that a kernel has which takes at least so many.
inline int tiles_of_kernel(int tiles) {
    return tiles <= 5 ? tiles : MAX_N8;
}

template <ggml_type TYPE> void allocate_columns(Product & product) {
    product.columns.alloc((size_t) product.node.n_blocks * product.tiles() * COLUMN_BYTES<TYPE>);
    product.arrived.alloc(product.n_counters());
}

inline Place place_of(Product & product) {
    const int last_pass = (product.tiles() - 1) / MAX_N8;
    return {product.columns.get(), product.node.n_blocks, last_pass, product.tiles() - last_pass * MAX_N8};
}

template <ggml_type TYPE, typename Source>
void prepare_as(ggml_backend_cuda_context & ctx, Product & product, const Source & source) {
    allocate_columns<TYPE>(product);
    const ggml_cuda_kernel_launch_params params(dim3(product.node.n_blocks, product.tiles()), dim3(256), (size_t) 0,
                                                ctx.stream());
    ggml_cuda_kernel_launch(prepare<TYPE, Source>, params, source, place_of(product), product.node.n_columns,
                            Counters{product.arrived.get(), product.n_counters()});
}

template <ggml_type TYPE, int N8, typename Weights>
void launch_with(ggml_backend_cuda_context & ctx, const mm::Node & node, const mm::Cut & cut, const Buffers & buffers) {
    const auto kernel = multiply_rows<TYPE, N8, Weights>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, SHARED_LIMIT);
    const ggml_cuda_kernel_launch_params params(dim3(cut.n_shares), dim3(cut.height / mm::TILE * 32),
                                                (size_t) Room<TYPE, N8>::template bytes<Weights>(cut.height),
                                                ctx.stream());
    ggml_cuda_kernel_launch(kernel, params, node, cut, buffers);
}

template <ggml_type TYPE, int N8>
void launch(ggml_backend_cuda_context & ctx, const mm::Node & node, const mm::Cut & cut, const Buffers & buffers) {
    if constexpr (Room<TYPE, N8>::HAS_RINGS) {
        if (RowRing::takes(node)) {
            return launch_with<TYPE, N8, RowRing>(ctx, node, cut, buffers);
        }
    }
    launch_with<TYPE, N8, Stages<TYPE, Room<TYPE, N8>::WEIGHT_STAGES>>(ctx, node, cut, buffers);
}

template <ggml_type TYPE> void multiply_as(ggml_backend_cuda_context & ctx, Product & product) {
    const mm::Cut & cut = product.cut;
    const int n_columns = product.node.n_columns, most = std::min(product.tiles(), MAX_N8);
    const int n_passes = (n_columns + PASS - 1) / PASS;
    ggml_cuda_pool_alloc<float4> parts(ctx.pool(), 2 * (int64_t) cut.n_shares * cut.height * most * 2);
    for (int pass = 0; pass < n_passes; pass++) {
        mm::Node node = product.node;
        node.n_columns = std::min(n_columns - pass * PASS, PASS);
        node.y += (int64_t) pass * PASS * node.n_rows;
        const Buffers buffers = {product.columns.get() + (int64_t) pass * MAX_N8 * node.n_blocks * COLUMN_BYTES<TYPE>,
                                 parts.get(), product.arrived.get() + pass * (product.n_counters() / n_passes)};
        const int tiles = tiles_of_kernel((node.n_columns + 7) / 8);
        (tiles == 1   ? launch<TYPE, 1>
         : tiles == 2 ? launch<TYPE, 2>
         : tiles == 3 ? launch<TYPE, 3>
         : tiles == 4 ? launch<TYPE, 4>
         : tiles == 5 ? launch<TYPE, 5>
                      : launch<TYPE, MAX_N8>) (ctx, node, cut, buffers);
    }
}

#define DFLASH_PRODUCTS_OF(LINKAGE, TYPE)                                                                              \
    LINKAGE template void allocate_columns<TYPE>(Product &);                                                           \
    LINKAGE template void prepare_as<TYPE>(ggml_backend_cuda_context &, Product &, const Plain &);                     \
    LINKAGE template void prepare_as<TYPE>(ggml_backend_cuda_context &, Product &, const Swiglu &);                    \
    LINKAGE template void prepare_as<TYPE>(ggml_backend_cuda_context &, Product &, const Gated<Sigmoid> &);            \
    LINKAGE template void prepare_as<TYPE>(ggml_backend_cuda_context &, Product &, const NormedHeads &);               \
    LINKAGE template void multiply_as<TYPE>(ggml_backend_cuda_context &, Product &);

} // namespace wgmma
} // namespace dflash
