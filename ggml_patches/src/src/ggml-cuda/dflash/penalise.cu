// What the logits of a row lose or gain before its token is drawn: a bias of single ids, then the penalties of every id
// that the row's past holds. A row is one block's. An id of the past counts once: a bitmap in shared memory remembers
// which have been met, a window of ids at a time, and whoever meets an id first changes its logit.

#include "kernels.cuh"

namespace dflash {
namespace {

constexpr int THREADS = 1024;
constexpr int WINDOW = 1 << 18; // ids of the bitmap, 32 KiB
constexpr int AT_ONCE = 8;      // ids of the past that a thread has in flight

struct Node {
    float * logits;
    const int32_t *block, *base, *n_rows, *slots, *history;
    const float * penalties;
    const int32_t * bias;
    int V, T, n_slots, n_history, n_bias;
};

// Adds the pairs (id, F32 bits) before the first whose id is negative.
__device__ __forceinline__ void add_bias(float * x, int V, const int32_t * pairs, int n_pairs) {
    __shared__ int end;
    if (threadIdx.x == 0) {
        end = n_pairs;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_pairs; i += THREADS) {
        if (pairs[2 * i] < 0) {
            atomicMin(&end, i);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < end; i += THREADS) {
        const int id = pairs[2 * i];
        if (id < V) {
            x[id] = __fadd_rn(x[id], __int_as_float(pairs[2 * i + 1]));
        }
    }
}

// visit(id) for a list of ids, by a block.
template <typename Visit> __device__ __forceinline__ void visit_ids(const int32_t * ids, int n, Visit visit) {
    for (int first = threadIdx.x; first < n; first += THREADS * AT_ONCE) {
        int mine[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = first + j * THREADS;
            mine[j] = i < n ? ids[i] : -1;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            visit(mine[j]);
        }
    }
}

struct Penalty {
    float repetition, presence;

    __device__ bool is_neutral() const { return repetition == 1.0f && presence == 0.0f; }
    __device__ float operator()(float x) const {
        x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
        return __fsub_rn(x, presence);
    }
};

__global__ void __launch_bounds__(THREADS) penalise_rows(const Node node) {
    ggml_cuda_pdl_sync();
    __shared__ uint32_t met[WINDOW / 32];
    const int t = blockIdx.x, lane = blockIdx.y, V = node.V;
    const int slot = slot_of(node.slots, lane, node.n_slots), n_rows = node.n_rows[lane], base = node.base[lane];
    if (slot < 0 || n_rows > node.T || t >= n_rows || base < 0) {
        return;
    }
    float * x = node.logits + ((int64_t) lane * node.T + t) * V;
    const int32_t * pairs = node.bias + (int64_t) slot * node.n_bias * 2;
    if (pairs[0] >= 0) {
        add_bias(x, V, pairs, node.n_bias);
    }
    const Penalty penalty = {node.penalties[2 * slot], node.penalties[2 * slot + 1]};
    if (penalty.is_neutral()) {
        return;
    }
    const int32_t * history = node.history + (int64_t) slot * node.n_history;
    const int n_past = base < node.n_history ? base + 1 : node.n_history;
    for (int first = 0; first < V; first += WINDOW) {
        const int n_ids = V - first < WINDOW ? V - first : WINDOW;
        __syncthreads(); // the biases are in, the window before is done
        for (int i = threadIdx.x; i < (n_ids + 31) / 32; i += THREADS) {
            met[i] = 0;
        }
        __syncthreads();
        const auto visit = [&](int id) {
            const uint32_t i = (uint32_t) id - (uint32_t) first, bit = 1u << i % 32;
            if (i < (uint32_t) n_ids && !(atomicOr(&met[i / 32], bit) & bit)) {
                x[id] = penalty(x[id]);
            }
        };
        visit_ids(history, n_past, visit);
        visit_ids(node.block + lane * node.T + 1, t, visit); // the row's own block up to the row; 0 is the anchor
    }
}

} // namespace

void penalise(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor *logits = dst->src[0], *history = dst->src[5];
    const auto ints = [&](int i) { return (const int32_t *) dst->src[i]->data; };
    const int T = (int) logits->ne[1], L = (int) logits->ne[2];
    const Node node = {(float *) logits->data,
                       ints(1),
                       ints(2),
                       ints(3),
                       ints(4),
                       ints(5),
                       (const float *) dst->src[6]->data,
                       ints(7),
                       (int) logits->ne[0],
                       T,
                       (int) history->ne[1],
                       (int) history->ne[0],
                       (int) dst->src[7]->ne[1]};
    ggml_cuda_kernel_launch(penalise_rows, ggml_cuda_kernel_launch_params(dim3(T, L), dim3(THREADS), 0, ctx.stream()),
                            node);
}

} // namespace dflash
