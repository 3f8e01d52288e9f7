#pragma once

// mul_mat: the launches of one weight type, up to 64 columns at a time.

#include "mul_mat_columns.cuh"
#include "mul_mat_kernel.cuh"

#include <algorithm>

namespace dflash {
namespace mm {

// Columns that meet the weights together: 64 on tensor cores.
inline int max_columns(bool has_tensor_cores) {
    return has_tensor_cores ? 64 : 8 * MAX_GENERAL_N8;
}

// Bytes of a block's rows in shared memory. The room for a table is taken whether this run has one or not: how weights
// are cut must not depend on the number of columns.
template <ggml_type TYPE> constexpr size_t shared_bytes(int height, bool has_tensor_cores) {
    return (size_t) height * Format<TYPE>::PITCH * Format<TYPE>::STAGES +
           (TYPE == GGML_TYPE_IQ4_XS && has_tensor_cores ? TABLE_BYTES : 0);
}

template <ggml_type TYPE> int max_height(size_t shared_limit, bool has_tensor_cores) {
    int height = MAX_HEIGHT;
    while (height > HEIGHT_STEP && shared_bytes<TYPE>(height, has_tensor_cores) > shared_limit) {
        height -= HEIGHT_STEP;
    }
    return height;
}

template <ggml_type TYPE, int N8, int TILES>
void launch(ggml_backend_cuda_context & ctx, const Node & node, const Cut & cut, size_t shared, size_t shared_limit) {
    const int64_t n_tiles = cut.n_units() / cut.n_blocks, blocks = node.n_blocks;
    const int n_counters = (int) (n_tiles * (MAX_HEIGHT / HEIGHT_STEP * 2));
    ggml_cuda_pool_alloc<uint4> columns(ctx.pool(), blocks * (STEPS / 2 * N8 * 32));
    ggml_cuda_pool_alloc<uint4> sums(ctx.pool(), HAS_MINIMA<TYPE> ? blocks * (N8 * 32) : 1);
    ggml_cuda_pool_alloc<float> units(ctx.pool(), 8 * N8);
    ggml_cuda_pool_alloc<float4> parts(ctx.pool(), 2 * (int64_t) cut.n_shares * cut.height * N8 * 2);
    ggml_cuda_pool_alloc<int> arrived(ctx.pool(), n_counters);
    const Scratch scratch = {columns.get(), sums.get(), units.get(), parts.get(), arrived.get()};

    const ggml_cuda_kernel_launch_params before(dim3(8 * N8), dim3(COLUMN_THREADS), (size_t) 0, ctx.stream());
    ggml_cuda_kernel_launch(prepare_columns<TYPE>, before, node, scratch, n_counters);

    const auto kernel = multiply_rows<TYPE, N8, TILES>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, (int) shared_limit);
    const ggml_cuda_kernel_launch_params work(dim3(cut.n_shares), dim3(threads_of(cut.height, TILES)), shared,
                                              ctx.stream());
    ggml_cuda_kernel_launch(kernel, work, node, cut, scratch);
}

template <ggml_type TYPE> void run(ggml_backend_cuda_context & ctx, Node node, int n_columns) {
    const auto & device = ggml_cuda_info().devices[ggml_cuda_get_device()];
    const bool has_tensor_cores = ampere_mma_available(device.cc);
    const int at_once = max_columns(has_tensor_cores), height = max_height<TYPE>(device.smpbo, has_tensor_cores);
    const Cut cut = make_cut(node, height, HEIGHT_STEP, 32, device.nsm);
    const size_t shared = shared_bytes<TYPE>(cut.height, has_tensor_cores);
    const size_t limit = shared_bytes<TYPE>(height, has_tensor_cores);
    node.is_aligned = ((uintptr_t) node.w | node.w_row) % Format<TYPE>::ALIGN == 0;
    const int64_t K = (int64_t) node.n_blocks * SUPER;
    for (int first = 0; first < n_columns; first += at_once) {
        node.n_columns = std::min(n_columns - first, at_once);
        if (node.n_columns <= 8) {
            launch<TYPE, 1, 1>(ctx, node, cut, shared, limit);
        } else if (node.n_columns <= 16) {
            launch<TYPE, 2, 2>(ctx, node, cut, shared, limit);
        } else if (node.n_columns <= 32) {
            launch<TYPE, 4, 2>(ctx, node, cut, shared, limit);
        } else {
            launch<TYPE, 8, 2>(ctx, node, cut, shared, limit);
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
