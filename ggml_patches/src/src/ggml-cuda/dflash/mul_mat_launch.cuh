#pragma once

// mul_mat: the launches of one weight type, up to 64 columns at a time.

#include "mul_mat_columns.cuh"
#include "mul_mat_kernel.cuh"

#include <algorithm>

namespace dflash {
namespace mm {

// Columns that meet the weights together: 64 on tensor cores.
inline int max_columns(bool has_tensor_cores) {
    return has_tensor_cores ? 64 : 4 * MAX_GENERAL_N4;
}

template <ggml_type TYPE> constexpr size_t shared_bytes(int height) {
    return (size_t) (height / ROWS) * Format<TYPE>::STAGES * STAGE_BYTES<TYPE> + SHARED_SLACK;
}

// Rows of which BLOCKS_PER_SM blocks have room in an SM's shared memory. Of that, a block may not have 1 KB, and each
// block takes 1 KB more than it asks for.
template <ggml_type TYPE> int max_height(size_t shared_limit) {
    const size_t of_block = (shared_limit + 1024) / BLOCKS_PER_SM - 1024;
    int height = MAX_HEIGHT;
    while (height > ROWS && shared_bytes<TYPE>(height) > of_block) {
        height -= ROWS;
    }
    return height;
}

template <ggml_type TYPE, int N4>
void launch(ggml_backend_cuda_context & ctx, const Node & node, const Cut & cut, size_t shared_limit) {
    const int64_t n_tiles = cut.n_units / cut.n_blocks, blocks = node.n_blocks, warps = cut.height / ROWS;
    const int n_counters = (int) (n_tiles * MAX_WARPS);
    ggml_cuda_pool_alloc<uint2> columns(ctx.pool(), blocks * (STEPS * N4 * 32));
    ggml_cuda_pool_alloc<uint2> sums(ctx.pool(), HAS_MINIMA<TYPE> ? blocks * (N4 * 32) : 1);
    ggml_cuda_pool_alloc<float> units(ctx.pool(), blocks * (4 * N4));
    ggml_cuda_pool_alloc<float2> parts(ctx.pool(), 2 * cut.n_shares * warps * (N4 * 32));
    ggml_cuda_pool_alloc<int> arrived(ctx.pool(), n_counters);
    const Scratch scratch = {columns.get(), sums.get(), units.get(), parts.get(), arrived.get()};

    const ggml_cuda_kernel_launch_params before(dim3((unsigned) blocks * N4), dim3(COLUMN_THREADS), (size_t) 0,
                                                ctx.stream());
    ggml_cuda_kernel_launch(prepare_columns<TYPE>, before, node, scratch, (int) N4, n_counters);

    const auto kernel = multiply_rows<TYPE, N4>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, (int) shared_limit);
    const ggml_cuda_kernel_launch_params work(dim3(cut.n_shares), dim3((unsigned) warps * 32),
                                              shared_bytes<TYPE>(cut.height), ctx.stream());
    ggml_cuda_kernel_launch(kernel, work, node, cut, scratch);
}

template <ggml_type TYPE> void run(ggml_backend_cuda_context & ctx, Node node, int n_columns) {
    const auto & device = ggml_cuda_info().devices[ggml_cuda_get_device()];
    const bool has_tensor_cores = ampere_mma_available(device.cc);
    const int at_once = max_columns(has_tensor_cores), height = max_height<TYPE>(device.smpbo);
    const Cut cut = make_cut(node, height, BLOCKS_PER_SM * device.nsm);
    const size_t limit = shared_bytes<TYPE>(height);
    node.is_aligned = ((uintptr_t) node.w | node.w_row) % Format<TYPE>::ALIGN == 0;
    const int64_t K = (int64_t) node.n_blocks * SUPER;
    for (int first = 0; first < n_columns; first += at_once) {
        node.n_columns = std::min(n_columns - first, at_once);
        if (node.n_columns <= 4) {
            launch<TYPE, 1>(ctx, node, cut, limit);
        } else if (node.n_columns <= 8) {
            launch<TYPE, 2>(ctx, node, cut, limit);
        } else if (node.n_columns <= 16) {
            launch<TYPE, 4>(ctx, node, cut, limit);
        } else if (node.n_columns <= 32) {
            launch<TYPE, 8>(ctx, node, cut, limit);
        } else {
            launch<TYPE, 16>(ctx, node, cut, limit);
        }
        node.x += at_once * K;
        node.y += at_once * (int64_t) node.n_rows;
    }
}

} // namespace mm

// The other types have a file each: they take long to compile.
void mul_mat_q4_k(ggml_backend_cuda_context & ctx, const mm::Node & node, int n_columns);
void mul_mat_q5_k(ggml_backend_cuda_context & ctx, const mm::Node & node, int n_columns);
void mul_mat_q6_k(ggml_backend_cuda_context & ctx, const mm::Node & node, int n_columns);
void mul_mat_q8_0(ggml_backend_cuda_context & ctx, const mm::Node & node, int n_columns);

} // namespace dflash
