// Attention over paged keys and values: which kernel, how much at a time, how much scratch memory.

#include "attention_general.cuh"

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
#include "attention_mma_kernel.cuh"
#define DFLASH_HAS_MMA
#endif

#include <algorithm>
#include <cstring>

namespace dflash {
namespace {

using namespace attn;

Node read_node(ggml_tensor * dst) {
    const ggml_tensor *q = dst->src[0], *k = dst->src[1], *v = dst->src[2], *table = dst->src[3];
    Node node = {};
    node.q = (const char *) q->data, node.k = (const char *) k->data, node.v = (const char *) v->data;
    node.out = (float *) dst->data;
    node.table = (const int32_t *) table->data;
    node.slots = (const int32_t *) dst->src[4]->data;
    node.base = (const int32_t *) dst->src[5]->data;
    node.n_rows = (const int32_t *) dst->src[6]->data;
    node.q_head = q->nb[1], node.q_row = q->nb[2], node.q_lane = q->nb[3];
    node.k_head = k->nb[1], node.k_row = k->nb[2], node.v_head = v->nb[1], node.v_row = v->nb[2];
    node.k_type = k->type, node.v_type = v->type;
    node.T = (int) q->ne[2], node.L = (int) q->ne[3];
    node.n_q_heads = (int) q->ne[1], node.n_kv_heads = (int) k->ne[1], node.gqa = node.n_q_heads / node.n_kv_heads;
    node.n_slots = (int) table->ne[1], node.max_pages = (int) table->ne[0], node.n_pages = (int) (k->ne[2] / PAGE);
    std::memcpy(&node.scale, &dst->op_params[1], sizeof(node.scale));
    node.window = dst->op_params[2];
    node.causal = dst->op_params[3] != 0;
    return node;
}

// Units of so many positions that a job can have.
int64_t max_units(const Node & node, int64_t unit) {
    const int64_t in_table = (node.n_positions() + unit - 1) / unit;
    const int64_t in_window = ((int64_t) node.window + node.T + unit - 1) / unit + 1;
    return node.window > 0 && in_window < in_table ? in_window : in_table;
}

// Runs a kernel and the one that combines its units, for as many jobs at a time as scratch memory is meant for. The
// number of places follows from shapes alone and always suffices for units at the top level.
template <typename Shape, typename Kernel>
void launch(ggml_backend_cuda_context & ctx, const Node & node, int n_blocks, size_t shared, Kernel kernel) {
    constexpr int split = Shape::SPLIT;
    static_assert((split & (split - 1)) == 0, "a power of two");
    constexpr int64_t PLACES = 2048, BYTES_FOR_EVEN_LOAD = 48 << 20;
    constexpr int64_t PLACES_FOR_EVEN_LOAD = BYTES_FOR_EVEN_LOAD / (4 * Shape::D * Shape::TILE_ROWS);
    Cut cut = {};
    cut.tile_rows = Shape::TILE_ROWS;
    cut.n_tiles = (node.rows_per_kv_head() + cut.tile_rows - 1) / cut.tile_rows;
    while (1 << cut.split_bits < split) {
        cut.split_bits++;
    }
    const int64_t total = (int64_t) cut.n_tiles * node.L;
    const int64_t of_job = node.n_kv_heads * max_units(node, (int64_t) splits_of(SUPER_LEVEL) * split);
    const int64_t at_once = std::max<int64_t>(1, std::min({PLACES / of_job, (int64_t) MAX_JOBS, total}));
    const int64_t all_splits = at_once * node.n_kv_heads * max_units(node, split);
    cut.capacity = (int) std::max(at_once * of_job, std::min(all_splits, PLACES_FOR_EVEN_LOAD));

    ggml_cuda_pool_alloc<int> plan(ctx.pool(), PLAN_WORDS);
    ggml_cuda_pool_alloc<float2> sums(ctx.pool(), (size_t) cut.capacity * cut.tile_rows);
    ggml_cuda_pool_alloc<float2> values(ctx.pool(), (size_t) cut.capacity * cut.tile_rows * Shape::D / 2);
    const Scratch scratch = {plan.get(), sums.get(), values.get()};

    for (int64_t first = 0; first < total; first += at_once) {
        cut.first_job = (int) first;
        cut.n_jobs = (int) std::min(at_once, total - first);
        const int64_t most = (int64_t) cut.n_jobs * node.n_kv_heads * max_units(node, split);
        const dim3 blocks((unsigned) std::min<int64_t>(n_blocks, most));
        const ggml_cuda_kernel_launch_params work(blocks, dim3(Shape::THREADS), shared, ctx.stream());
        ggml_cuda_kernel_launch(kernel, work, node, cut, scratch);

        const dim3 rows((unsigned) (cut.n_jobs * node.n_kv_heads * cut.tile_rows));
        const ggml_cuda_kernel_launch_params ends(rows, dim3(Shape::Layout::THREADS), (size_t) 0, ctx.stream());
        ggml_cuda_kernel_launch(combine<typename Shape::Layout>, ends, node, cut, scratch);
    }
}

const auto & device() {
    return ggml_cuda_info().devices[ggml_cuda_get_device()];
}

template <int D> void run_general(ggml_backend_cuda_context & ctx, const Node & node) {
    launch<General<D>>(ctx, node, 4 * device().nsm, 0, general<General<D>>);
}

#if defined(DFLASH_HAS_MMA)

// With tiles of TILES * 16 rows, or the next smaller ones that fit into the device's shared memory.
template <int D, ggml_type K, ggml_type V, int TILES, bool LARGE>
bool run_tiles(ggml_backend_cuda_context & ctx, const Node & node) {
    using M = Mma<D, K, V, TILES, LARGE>;
    constexpr size_t SHARED = sizeof(typename M::Memory);
    if (SHARED > device().smpbo) {
        if constexpr (TILES > 1) {
            return run_tiles<D, K, V, TILES - 1, LARGE>(ctx, node);
        }
        return false;
    }
    const auto kernel = mma<D, K, V, TILES>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, (int) SHARED);
    int blocks_per_sm = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_per_sm, kernel, M::THREADS, SHARED));
    launch<M>(ctx, node, std::max(blocks_per_sm, 1) * device().nsm, SHARED, kernel);
    return true;
}

template <int D, ggml_type K, ggml_type V, bool LARGE>
bool run_mma(ggml_backend_cuda_context & ctx, const Node & node) {
    const int rows = node.rows_per_kv_head();
    return rows <= 16   ? run_tiles<D, K, V, 1, LARGE>(ctx, node)
           : rows <= 32 ? run_tiles<D, K, V, 2, LARGE>(ctx, node)
                        : run_tiles<D, K, V, 3, LARGE>(ctx, node);
}

// False if the device or the shape is none for tensor cores; that does not depend on the number of rows.
bool run_on_tensor_cores(ggml_backend_cuda_context & ctx, const Node & node, int D) {
    const int cc = device().cc;
    if (!ampere_mma_available(cc)) {
        return false;
    }
    const bool is_large = has_large_memory(ggml_cuda_highest_compiled_arch(cc));
#define TRY(WIDTH, K, V)                                                                                               \
    if (D == WIDTH && node.k_type == K && node.v_type == V) {                                                          \
        return is_large ? run_mma<WIDTH, K, V, true>(ctx, node) : run_mma<WIDTH, K, V, false>(ctx, node);              \
    }
    TRY(128, GGML_TYPE_F16, GGML_TYPE_F16)
    TRY(128, GGML_TYPE_F16, GGML_TYPE_Q8_0)
    TRY(128, GGML_TYPE_Q8_0, GGML_TYPE_F16)
    TRY(128, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0)
    TRY(256, GGML_TYPE_F16, GGML_TYPE_F16)
    TRY(256, GGML_TYPE_F16, GGML_TYPE_Q8_0)
    TRY(256, GGML_TYPE_Q8_0, GGML_TYPE_F16)
    TRY(256, GGML_TYPE_Q8_0, GGML_TYPE_Q8_0)
#undef TRY
    return false;
}

#endif

} // namespace

void attention(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const Node node = read_node(dst);
    const int D = (int) dst->ne[0];
#if defined(DFLASH_HAS_MMA)
    if (run_on_tensor_cores(ctx, node, D)) {
        return;
    }
#endif
    switch (D) {
#define RUN(WIDTH)                                                                                                     \
    case WIDTH:                                                                                                        \
        return run_general<WIDTH>(ctx, node);
        GGML_DFLASH_HEAD_DIMS(RUN)
#undef RUN
    }
    GGML_ABORT("head width %d is refused by ggml_dflash_check", D);
}

} // namespace dflash
