// Causal depthwise convolution of K taps + SiLU with the kept rows of a slot: conv_verify, conv_advance, conv_commit.
//
// Per channel: in = window ++ x, y[t] = silu(w[0]*in[t] + ... + w[K-1]*in[t+K-1]), summed in this order. A thread has
// one channel and TILE rows. Kept rows of a channel are touched by one thread alone, that of the first tile: it reads
// the window before it writes. Later tiles find all they need in x.

#include "kernels.cuh"
#include "numbers.cuh"

namespace dflash {
namespace {

constexpr int K = GGML_DFLASH_CONV_TAPS;
constexpr int TILE = 16; // rows of a thread; a block that may be rejected is one tile
constexpr int PIECE = 8; // rows read before the first of them is waited for
constexpr int THREADS = 64;
static_assert(TILE >= GGML_DFLASH_MAX_BLOCK && TILE % PIECE == 0 && TILE >= K - 1);

// A node of any of the three conv sub-ops.
struct ConvNode {
    const char * x;
    int64_t row_stride, lane_stride; // of x, in bytes
    const float * w;
    float * rows;
    const int32_t * slots;
    const int32_t * n_pending;
    const int32_t * n_rows; // NULL: all rows are live
    float * out;
    int n_channels, n_kept, n_slots, n_out; // n_kept: K-1+B rows of a slot, n_out: rows T of the result

    __device__ __forceinline__ float x_at(int channel, int t, int lane) const {
        return ((const float *) (x + t * row_stride + lane * lane_stride))[channel];
    }
    __device__ __forceinline__ float * kept_at(int channel, int row, int slot) const {
        return rows + ((int64_t) slot * n_kept + row) * n_channels + channel;
    }
    __device__ __forceinline__ float * out_at(int channel, int t, int lane) const {
        return out + ((int64_t) lane * n_out + t) * n_channels + channel;
    }
};

// Counts of a lane, checked; slot is -1 if the lane is padded.
struct ConvLane {
    int slot, n_pending, n_rows;

    __device__ ConvLane(const ConvNode & node, int lane)
        : slot(owned_slot_of(node.slots, lane, node.n_slots)), n_pending(0), n_rows(0) {
        if (slot < 0) {
            return;
        }
        n_pending = node.n_pending[slot];
        n_rows = node.n_rows ? node.n_rows[lane] : node.n_out;
        if (n_pending < 0 || n_pending > node.n_kept - (K - 1) || n_rows < 0 || n_rows > node.n_out) {
            slot = -1;
        }
    }
};

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + exp_same(-x));
}

// Row j of the K-1 that stay when n rows x of a channel are final: the last ones of window ++ x.
__device__ __forceinline__ float last_row(const ConvNode & node, int channel, int lane, const float * window, int n,
                                          int j) {
    if (n + j >= K - 1) {
        return node.x_at(channel, n + j - (K - 1), lane);
    }
    float row = window[0];
#pragma unroll
    for (int i = 1; i < K - 1; i++) {
        row = n + j == i ? window[i] : row;
    }
    return row;
}

// Rows begin.. of a channel, PIECE or fewer, before end. window: the K-1 rows before them, then the last of them.
template <bool KEEPS_BLOCK>
__device__ __forceinline__ void run_piece(const ConvNode & node, int channel, int lane, int slot, int begin, int end,
                                          const float * w, float * window) {
    float in[K - 1 + PIECE];
#pragma unroll
    for (int j = 0; j < K - 1; j++) {
        in[j] = window[j];
    }
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        in[K - 1 + i] = begin + i < end ? node.x_at(channel, begin + i, lane) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        float sum = w[0] * in[i];
#pragma unroll
        for (int j = 1; j < K; j++) {
            sum = fmaf(w[j], in[i + j], sum);
        }
        if (begin + i < end) {
            *node.out_at(channel, begin + i, lane) = silu(sum);
            if constexpr (KEEPS_BLOCK) {
                *node.kept_at(channel, K - 1 + begin + i, slot) = in[K - 1 + i];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < K - 1; j++) {
        window[j] = in[PIECE + j];
    }
}

// KEEPS_BLOCK: verify, all rows are kept behind the window; else the last K-1 are. grid: tiles, channels, lanes
template <bool KEEPS_BLOCK> __global__ void __launch_bounds__(THREADS) conv_kernel(const ConvNode node) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int channel = blockIdx.y * THREADS + threadIdx.x, lane = blockIdx.z;
    if (channel >= node.n_channels) {
        return;
    }
    const ConvLane live(node, lane);
    const int n_live = live.slot < 0 ? 0 : live.n_rows;
    const int begin = blockIdx.x * TILE, end = min(begin + TILE, node.n_out), live_end = min(end, n_live);
    for (int t = max(begin, n_live); t < end; t++) {
        *node.out_at(channel, t, lane) = 0.0f;
    }
    if (live.slot < 0 || (begin > 0 && begin >= live_end)) {
        return;
    }

    float w[K], window[K - 1], kept[K - 1];
#pragma unroll
    for (int j = 0; j < K - 1; j++) {
        window[j] = begin > 0 ? node.x_at(channel, begin - (K - 1) + j, lane)
                              : *node.kept_at(channel, live.n_pending + j, live.slot);
        kept[j] = window[j];
    }
#pragma unroll
    for (int j = 0; j < K; j++) {
        w[j] = node.w[(int64_t) channel * K + j];
    }
    for (int t = begin; t < live_end; t += PIECE) {
        run_piece<KEEPS_BLOCK>(node, channel, lane, live.slot, t, live_end, w, window);
    }
    if (begin == 0) {
#pragma unroll
        for (int j = 0; j < K - 1; j++) {
            *node.kept_at(channel, j, live.slot) =
                KEEPS_BLOCK ? kept[j] : last_row(node, channel, lane, kept, live.n_rows, j);
        }
    }
}

// grid: 1, channels, lanes
__global__ void __launch_bounds__(THREADS) conv_commit_kernel(const ConvNode node) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int channel = blockIdx.y * THREADS + threadIdx.x;
    if (channel >= node.n_channels) {
        return;
    }
    const ConvLane live(node, blockIdx.z);
    if (live.slot < 0 || live.n_pending == 0) {
        return;
    }
    float window[K - 1];
#pragma unroll
    for (int j = 0; j < K - 1; j++) {
        window[j] = *node.kept_at(channel, live.n_pending + j, live.slot);
    }
#pragma unroll
    for (int j = 0; j < K - 1; j++) {
        *node.kept_at(channel, j, live.slot) = window[j];
    }
}

template <typename Kernel>
void launch(Kernel kernel, ggml_backend_cuda_context & ctx, const ConvNode & node, int n_tiles, int64_t n_lanes) {
    const dim3 grid(n_tiles, (node.n_channels + THREADS - 1) / THREADS, n_lanes);
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(grid, dim3(THREADS), (size_t) 0, ctx.stream()),
                            node);
}

// The part that all sub-ops have, from source first on.
ConvNode memory_node(const ggml_tensor * dst, int first) {
    const ggml_tensor * rows = dst->src[first];
    ConvNode node = {};
    node.rows = (float *) rows->data;
    node.slots = (const int32_t *) dst->src[first + 1]->data;
    node.n_pending = (const int32_t *) dst->src[first + 2]->data;
    node.n_channels = (int) rows->ne[0];
    node.n_kept = (int) rows->ne[1];
    node.n_slots = (int) rows->ne[2];
    return node;
}

ConvNode rows_node(ggml_tensor * dst) {
    ConvNode node = memory_node(dst, 2);
    node.x = (const char *) dst->src[0]->data;
    node.row_stride = (int64_t) dst->src[0]->nb[1];
    node.lane_stride = (int64_t) dst->src[0]->nb[2];
    node.w = (const float *) dst->src[1]->data;
    node.n_rows = dst->src[5] ? (const int32_t *) dst->src[5]->data : nullptr;
    node.out = (float *) dst->data;
    node.n_out = (int) dst->ne[1];
    return node;
}

template <bool KEEPS_BLOCK> void run(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ConvNode node = rows_node(dst);
    launch(conv_kernel<KEEPS_BLOCK>, ctx, node, (node.n_out + TILE - 1) / TILE, dst->src[3]->ne[0]);
}

} // namespace

void conv_verify(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    run<true>(ctx, dst);
}

void conv_advance(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    run<false>(ctx, dst);
}

void conv_commit(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    launch(conv_commit_kernel, ctx, memory_node(dst, 0), 1, dst->src[1]->ne[0]);
}

} // namespace dflash
