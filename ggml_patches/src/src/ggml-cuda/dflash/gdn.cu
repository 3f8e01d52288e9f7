// Gated delta rule with a replay log: gdn_verify, gdn_advance, gdn_commit. The formulas are in gdn_columns.cuh, the
// cut of a head into blocks in gdn_tile.cuh.
//
// Log rows of a verify. A block writes the deltas of its own columns as soon as it has read the old ones. Gate and keys
// are read by all blocks of a head, so the new ones may only be written when the last block has read: where a head is
// one block, a barrier of the block tells; on Hopper and later the blocks of a head are a cluster, and its barrier
// tells; elsewhere a second kernel writes them.

#include "clusters.cuh"
#include "gdn_columns.cuh"
#include "gdn_prefetch.cuh"

#include <cmath>

namespace dflash {
namespace {

enum class GdnOp { VERIFY, ADVANCE, COMMIT };

#if defined(GGML_CUDA_USE_PDL) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
constexpr bool CLUSTERS = true; // as launch() finds for the same code
#else
constexpr bool CLUSTERS = false;
#endif

// This thread has read the old log; below: so have all threads of the head's blocks.
template <int BLOCKS> __device__ __forceinline__ void arrive_at_head() {
#if defined(GGML_CUDA_USE_PDL) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    if constexpr (BLOCKS > 1) {
        __cluster_barrier_arrive_relaxed(); // what was read is in shared memory, behind __syncthreads: nothing to flush
    }
#endif
}

template <int BLOCKS> __device__ __forceinline__ void wait_for_head() {
#if defined(GGML_CUDA_USE_PDL) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= GGML_CUDA_CC_HOPPER
    if constexpr (BLOCKS > 1) {
        __cluster_barrier_wait();
    }
#endif
}

// Rows first.. of the result are zeros.
template <int S> __device__ void clear_rows(const GdnNode & node, int lane, int head, int column, int first) {
    constexpr int WIDTH = GdnTile<S>::BLOCK_COLUMNS;
    for (int t = first + threadIdx.x / WIDTH; t < node.n_out; t += GdnTile<S>::THREADS / WIDTH) {
        node.out_row<S>(lane, t, head)[column + threadIdx.x % WIDTH] = 0.0f;
    }
}

// Gate and keys of the n staged rows; the blocks of a head take turns.
template <int S>
__device__ __forceinline__ void log_keys(const GdnNode & node, const GdnShared<S> & shared, int slot, int head,
                                         int first, int n) {
    for (int t = blockIdx.x; t < n; t += GdnTile<S>::BLOCKS) {
        float * row = node.log_row<S>(slot, first + t, head);
        for (int i = threadIdx.x; i < S; i += GdnTile<S>::THREADS) {
            row[1 + i] = shared.k[t][i];
        }
        if (threadIdx.x == 0) {
            row[0] = shared.row[t].gate;
        }
    }
}

// The n staged rows, from row first of the lane on: result and, of a verify, the deltas of the log.
template <int S, bool VERIFY>
__device__ __forceinline__ void run_rows(const GdnNode & node, const GdnShared<S> & shared, GdnColumns<S> & columns,
                                         int lane, int slot, int head, int column, int first, int n) {
    const int j = column + columns.own_column();
    float * out = node.out_row<S>(lane, first, head) + j;
    float * log = node.log_row<S>(slot, VERIFY ? first : 0, head) + 1 + S + j; // an advance does not write it
    GdnScalars row = shared.row[0];
    for (int t = 0; t < n; t++) {
        const GdnScalars next = shared.row[t + 1]; // early: the decay fills the time in which a sum is under way
        const float2 o_delta = columns.run(shared, t, row, node.scale);
        if (columns.writes_own()) {
            *out = o_delta.x;
            if constexpr (VERIFY) {
                *log = o_delta.y;
            }
        }
        row = next;
        out += node.n_heads * S;
        log += node.log_row_stride<S>();
    }
}

// grid: blocks of a head, heads, lanes
template <int S, GdnOp OP>
__global__ void __launch_bounds__(GdnTile<S>::THREADS, GdnTile<S>::MIN_BLOCKS) gdn_kernel(const GdnNode node) {
    using Tile = GdnTile<S>;
    constexpr bool VERIFY = OP == GdnOp::VERIFY, HAS_ROWS = OP != GdnOp::COMMIT;
    __shared__ GdnShared<S> shared;
    const int lane = blockIdx.z, head = blockIdx.y, column = blockIdx.x * Tile::BLOCK_COLUMNS;
    ggml_cuda_pdl_lc();
    if constexpr (HAS_ROWS && CLUSTERS) {
        prefetch_early<S>(node, lane, head, column);
    }
    ggml_cuda_pdl_sync();

    const int slot = owned_slot_of(node.slots, lane, node.n_slots);
    GdnRows<S> rows;
    if constexpr (VERIFY) {
        rows.fetch(node, lane, head, column, 0, min(node.n_out, Tile::ROWS)); // does not wait for the slot
    }
    if (slot < 0) {
        if constexpr (HAS_ROWS) {
            clear_rows<S>(node, lane, head, column, 0);
        }
        return;
    }
    float * state = node.columns_of<S>(slot, head, column);
    GdnColumns<S> columns;
    if constexpr (HAS_ROWS) {
        columns.load(state, node.state_aligned); // does not wait for the counts
    }
    const GdnCounts live(node, lane, slot);
    if constexpr (HAS_ROWS) {
        clear_rows<S>(node, lane, head, column, live.ok ? live.n_rows : 0);
    }
    if (!live.ok || (!VERIFY && live.n_replay == 0 && live.n_rows == 0)) {
        return;
    }
    if constexpr (OP == GdnOp::ADVANCE) {
        rows.fetch(node, lane, head, column, 0, min(live.n_rows, Tile::ROWS));
    }
    GdnLogRows<S> log_rows;
    log_rows.fetch(node, slot, head, column, 0, min(live.n_replay, Tile::ROWS));
    if constexpr (!HAS_ROWS) {
        columns.load(state, node.state_aligned); // many slots have nothing to commit
    } else {
        rows.put(shared);
    }
    log_rows.put(shared);
    __syncthreads();
    if constexpr (HAS_ROWS) {
        columns.put_kq(shared); // while the state is on its way
    }
    for (int first = 0; first < live.n_replay; first += Tile::ROWS) {
        if (first > 0) {
            __syncthreads();
            log_rows.fetch(node, slot, head, column, first, min(live.n_replay - first, Tile::ROWS));
            log_rows.put(shared);
            __syncthreads();
        }
        columns.replay(shared, min(live.n_replay - first, Tile::ROWS));
    }
    if constexpr (VERIFY) {
        arrive_at_head<Tile::BLOCKS>();
    }
    if (OP != GdnOp::ADVANCE && live.n_replay > 0) {
        columns.store(state, node.state_aligned);
    }
    if constexpr (HAS_ROWS) {
        __syncthreads();
        for (int first = 0; first < live.n_rows; first += Tile::ROWS) {
            const int n = min(live.n_rows - first, Tile::ROWS);
            if (first > 0) {
                rows.fetch(node, lane, head, column, first, n);
                __syncthreads();
                rows.put(shared);
                __syncthreads();
                columns.put_kq(shared);
                __syncthreads();
            }
            run_rows<S, VERIFY>(node, shared, columns, lane, slot, head, column, first, n);
            if constexpr (VERIFY && (Tile::BLOCKS == 1 || CLUSTERS)) {
                if (first == 0) {
                    wait_for_head<Tile::BLOCKS>(); // here the others have long arrived
                }
                log_keys<S>(node, shared, slot, head, first, n);
            }
        }
        if constexpr (OP == GdnOp::ADVANCE) {
            columns.store(state, node.state_aligned);
        }
    }
}

// Gate and keys of a verify's log rows, behind gdn_kernel. grid: rows, heads, lanes; block: S
template <int S> __global__ void __launch_bounds__(S) log_keys_kernel(const GdnNode node) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int t = blockIdx.x, head = blockIdx.y, lane = blockIdx.z;
    const int slot = owned_slot_of(node.slots, lane, node.n_slots);
    if (slot < 0 || !GdnCounts(node, lane, slot).ok) {
        return;
    }
    float * row = node.log_row<S>(slot, t, head);
    row[1 + threadIdx.x] = ((const float *) node.k.row(head % node.n_key_heads, t, lane))[threadIdx.x];
    if (threadIdx.x == 0) {
        row[0] = exp_same(*(const float *) node.g.row(head, t, lane));
    }
}

template <int S, GdnOp OP> void launch(const GdnNode & node, int n_lanes, cudaStream_t stream) {
    using Tile = GdnTile<S>;
    const auto kernel = gdn_kernel<S, OP>;
    const ggml_cuda_kernel_launch_params params(dim3(Tile::BLOCKS, node.n_heads, n_lanes), dim3(Tile::THREADS),
                                                (size_t) 0, stream);
    if constexpr (OP == GdnOp::VERIFY && Tile::BLOCKS > 1) {
#if defined(GGML_CUDA_USE_PDL)
        if (has_clusters((const void *) kernel)) {
            launch_clusters(kernel, params, node);
            return;
        }
#endif
        ggml_cuda_kernel_launch(kernel, params, node);
        ggml_cuda_kernel_launch(
            log_keys_kernel<S>,
            ggml_cuda_kernel_launch_params(dim3(node.n_out, node.n_heads, n_lanes), dim3(S), (size_t) 0, stream), node);
    } else {
        ggml_cuda_kernel_launch(kernel, params, node);
    }
}

template <GdnOp OP> void run(ggml_backend_cuda_context & ctx, GdnNode node, const ggml_tensor * state, int n_lanes) {
    node.scale = 1.0f / std::sqrt((float) state->ne[0]);
    switch (state->ne[0]) {
#define RUN(S)                                                                                                         \
    case S:                                                                                                            \
        launch<S, OP>(node, n_lanes, ctx.stream());                                                                    \
        return;
        GGML_DFLASH_STATE_WIDTHS(RUN)
#undef RUN
    }
    GGML_ABORT("state width %d is refused by ggml_dflash_check", (int) state->ne[0]);
}

GdnSource source(const ggml_tensor * t) {
    return {(const char *) t->data, (int64_t) t->nb[1], (int64_t) t->nb[2], (int64_t) t->nb[3]};
}

// g and beta [Hv,T,L]: a head is a word
GdnSource scalars(const ggml_tensor * t) {
    return {(const char *) t->data, (int64_t) t->nb[0], (int64_t) t->nb[1], (int64_t) t->nb[2]};
}

bool is_aligned(const GdnSource & s) {
    return ((uintptr_t) s.data | s.head_stride | s.row_stride | s.lane_stride) % 16 == 0;
}

// The part that all sub-ops have, from source first on.
GdnNode memory_node(const ggml_tensor * dst, int first) {
    const ggml_tensor * state = dst->src[first];
    const ggml_tensor * log = dst->src[first + 1];
    GdnNode node = {};
    node.state = (float *) state->data;
    node.log = (float *) log->data;
    node.slots = (const int32_t *) dst->src[first + 2]->data;
    node.n_pending = (const int32_t *) dst->src[first + 3]->data;
    node.n_heads = (int) state->ne[2];
    node.n_slots = (int) state->ne[3];
    node.n_block = (int) log->ne[2];
    node.state_aligned = (uintptr_t) node.state % 16 == 0;
    return node;
}

GdnNode rows_node(ggml_tensor * dst) {
    GdnNode node = memory_node(dst, 5);
    node.q = source(dst->src[0]);
    node.k = source(dst->src[1]);
    node.v = source(dst->src[2]);
    node.g = scalars(dst->src[3]);
    node.beta = scalars(dst->src[4]);
    node.n_rows = dst->src[9] ? (const int32_t *) dst->src[9]->data : nullptr;
    node.out = (float *) dst->data;
    node.n_key_heads = (int) dst->src[0]->ne[1];
    node.n_out = (int) dst->ne[2];
    node.qk_aligned = is_aligned(node.q) && is_aligned(node.k);
    return node;
}

} // namespace

void gdn_verify(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    run<GdnOp::VERIFY>(ctx, rows_node(dst), dst->src[5], (int) dst->src[7]->ne[0]);
}

void gdn_advance(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    run<GdnOp::ADVANCE>(ctx, rows_node(dst), dst->src[5], (int) dst->src[7]->ne[0]);
}

void gdn_commit(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    run<GdnOp::COMMIT>(ctx, memory_node(dst, 0), dst->src[0], (int) dst->src[2]->ne[0]);
}

} // namespace dflash
