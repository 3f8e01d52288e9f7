// A draft's block, the anchor and its proposals, in four kernels: the scan reads all logits once, on all
// multiprocessors; a block per row finds its candidates; a block per row finds for each candidate of the row before the
// one that follows it best; a block per lane then only follows these from the anchor.

#include "codebook.cuh"
#include "draw.cuh"
#include "top_k.cuh"

namespace dflash {
namespace {

constexpr int MAX_K = GGML_DFLASH_MAX_TOP_K;
constexpr int MAX_P = GGML_DFLASH_MAX_BLOCK - 1;

struct Node {
    const float * logits;
    const int32_t *anchors, *base, *sampling;
    const float * gate; // NULL: no edge scores
    Codebook predecessor, successor;
    float * numbers;       // of the groups: the largest logit
    uint64_t * candidates; // places [MAX_K, P, L]
    uint8_t * successors;  // [MAX_K, P, L]: which candidate follows candidate a of the row before
    int32_t * block;       // [1 + P, L]
    int V, P, rank, top_k, n_groups;

    __device__ bool is_live(int lane) const { return anchors[lane] >= 0 && anchors[lane] < V; }
    __device__ Row at(int row) const { return Row(logits, row, V, numbers, n_groups); }
};

__global__ void __launch_bounds__(SCAN_THREADS, 4) scan(const Node node) {
    ggml_cuda_pdl_sync();
    const int at = blockIdx.y;
    if (!node.is_live(at / node.P)) {
        return;
    }
    const Row row = node.at(at);
    const int group = blockIdx.x * SCAN_THREADS + threadIdx.x;
    float x[LOADS][4];
    read_group(row, group, 0, x);
    float largest = -INFINITY;
#pragma unroll
    for (int j = 0; j < LOADS; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            largest = fmaxf(largest, x[j][e]); // without NaN
        }
    }
    row.numbers[group] = largest;
}

__global__ void __launch_bounds__(ROW_THREADS) find_candidates(const Node node) {
    ggml_cuda_pdl_sync();
    __shared__ TopK top;
    __shared__ Search search;
    const int at = blockIdx.x, k = node.top_k;
    if (!node.is_live(at / node.P)) {
        return;
    }
    const Row row = node.at(at);
    if (!find_top_k(row, k, top)) {
        const uint64_t end = find_top_k_end(row, k, search);
        if (threadIdx.x == 0) {
            top.n_listed = 0;
        }
        __syncthreads();
        visit_few(
            row, [&](float largest) { return place_of(rank_of(largest), 0) <= end; },
            [&](float x, int id) {
                const uint64_t place = place_of(rank_of_logit(x), id);
                if (place <= end) {
                    list_place(top, place);
                }
            });
        __syncthreads();
        order_listed(k, top);
    }
    if ((int) threadIdx.x < k) {
        node.candidates[at * MAX_K + threadIdx.x] = top.first[threadIdx.x];
    }
}

constexpr int EDGE_THREADS = 512;
constexpr int WIDTH = 8; // partial sums of an edge, a thread each
constexpr int PAIRS_AT_ONCE = EDGE_THREADS / WIDTH;
constexpr int PAIRS = MAX_K * MAX_K / PAIRS_AT_ONCE; // of a thread
constexpr int TILE = 256, STRIDE = TILE + WIDTH;     // codes at a time; rows apart so that banks differ

struct Edges {                    // shared memory
    float before[MAX_K * STRIDE]; // times gate
    float after[MAX_K * STRIDE];
    float scores[MAX_K][MAX_K];
    float logits[MAX_K], noise[MAX_K];
    int before_ids[MAX_K], after_ids[MAX_K];
};

// Adds the codes of a tile to the partial sums: sum w of an edge takes the codes w, w + 8, ...
__device__ __forceinline__ void add_tile(const Edges & edges, int n_pairs, int top_k, int n_codes,
                                         float (&sums)[PAIRS]) {
    const int w = threadIdx.x % WIDTH;
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        const int pair = i * PAIRS_AT_ONCE + threadIdx.x / WIDTH;
        if (pair < n_pairs) {
            const float * before = edges.before + pair / top_k * STRIDE;
            const float * after = edges.after + pair % top_k * STRIDE;
            for (int r = w; r < n_codes; r += WIDTH) {
                sums[i] = fmaf(before[r], after[r], sums[i]);
            }
        }
    }
}

// edges.scores[a][b] <- what the walk maximises, for the row's candidate b after candidate a of the row before
__device__ __forceinline__ void score_edges(const Node & node, int at, int n_before, const Sampling & sampling,
                                            Edges & edges) {
    const int n_pairs = n_before * node.top_k;
    float sums[PAIRS] = {};
    for (int first = 0; first < node.rank; first += TILE) {
        const int n_codes = node.rank - first < TILE ? node.rank - first : TILE;
        const float * gate = node.gate + (int64_t) at * node.rank + first;
        __syncthreads();
        read_codes<EDGE_THREADS>(node.predecessor, edges.before_ids, n_before, first, n_codes, gate, edges.before,
                                 STRIDE);
        read_codes<EDGE_THREADS>(node.successor, edges.after_ids, node.top_k, first, n_codes, nullptr, edges.after,
                                 STRIDE);
        __syncthreads();
        add_tile(edges, n_pairs, node.top_k, n_codes, sums);
    }
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
        float sum = sums[i]; // ((0+4) + (2+6)) + ((1+5) + (3+7)), as everywhere
        sum += __shfl_xor_sync(0xffffffff, sum, 4, 32);
        sum += __shfl_xor_sync(0xffffffff, sum, 2, 32);
        sum += __shfl_xor_sync(0xffffffff, sum, 1, 32);
        const int pair = i * PAIRS_AT_ONCE + threadIdx.x / WIDTH;
        if (pair < n_pairs && threadIdx.x % WIDTH == 0) {
            const int a = pair / node.top_k, b = pair % node.top_k;
            const float score = sum + edges.logits[b];
            edges.scores[a][b] = sampling.is_greedy() ? score : score / sampling.temperature + edges.noise[b];
        }
    }
}

__global__ void __launch_bounds__(EDGE_THREADS) link_candidates(const Node node) {
    ggml_cuda_pdl_sync();
    __shared__ Edges edges;
    const int at = blockIdx.x, lane = at / node.P, p = at % node.P, i = threadIdx.x;
    if (!node.is_live(lane)) {
        return;
    }
    const Sampling sampling(node.sampling, lane);
    const int n_before = p == 0 ? 1 : node.top_k;
    if (i < node.top_k) {
        const uint64_t place = node.candidates[at * MAX_K + i];
        edges.logits[i] = number_at(place);
        edges.after_ids[i] = id_at(place);
        edges.before_ids[i] = p == 0 ? node.anchors[lane] : id_at(node.candidates[(at - 1) * MAX_K + i]);
        edges.noise[i] = gumbel(noise_key(sampling.seed, (int64_t) node.base[lane] + p + 1), id_at(place));
    }
    __syncthreads();
    score_edges(node, at, n_before, sampling, edges);
    __syncthreads();
    if (i < n_before) {
        float best = -INFINITY;
        int follows = 0;
        for (int b = 0; b < node.top_k; b++) {
            if (edges.scores[i][b] > best) { // the first of equals; never NaN
                best = edges.scores[i][b];
                follows = b;
            }
        }
        node.successors[at * MAX_K + i] = (uint8_t) follows;
    }
}

constexpr int WALK_THREADS = 256;
static_assert(MAX_P * MAX_K <= WALK_THREADS, "one thread for each candidate of a lane");

__global__ void __launch_bounds__(WALK_THREADS) walk(const Node node) {
    ggml_cuda_pdl_sync();
    __shared__ int ids[MAX_P * MAX_K], successors[MAX_P * MAX_K];
    const int lane = blockIdx.x, P = node.P, i = threadIdx.x, first = lane * P * MAX_K;
    const bool is_live = node.is_live(lane);
    if (is_live && i < P * MAX_K && i % MAX_K < node.top_k) {
        ids[i] = id_at(node.candidates[first + i]);
        successors[i] = i < MAX_K && i > 0 ? 0 : node.successors[first + i]; // before row 0 there is only the anchor
    }
    __syncthreads();
    if (i == 0) {
        int32_t * block = node.block + lane * (1 + P);
        int taken = 0;
        block[0] = is_live ? node.anchors[lane] : 0;
        for (int p = 0; p < P; p++) {
            taken = is_live ? successors[p * MAX_K + taken] : 0;
            block[1 + p] = is_live ? ids[p * MAX_K + taken] : 0;
        }
    }
}

} // namespace

void select(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor *logits = dst->src[0], *gate = dst->src[4];
    const auto ints = [&](int i) { return (const int32_t *) dst->src[i]->data; };
    const int V = (int) logits->ne[0], P = (int) logits->ne[1], L = (int) logits->ne[2];
    const int n_rows = P * L, n_groups = count_groups(V);
    ggml_cuda_pool_alloc<float> numbers(ctx.pool(), (size_t) n_rows * n_groups);
    ggml_cuda_pool_alloc<uint64_t> candidates(ctx.pool(), n_rows * MAX_K);
    ggml_cuda_pool_alloc<uint8_t> successors(ctx.pool(), n_rows * MAX_K);

    const Node node = {(const float *) logits->data,
                       ints(1),
                       ints(2),
                       ints(3),
                       gate ? (const float *) gate->data : nullptr,
                       codebook_of(dst->src[5]),
                       codebook_of(dst->src[6]),
                       numbers.get(),
                       candidates.get(),
                       successors.get(),
                       (int32_t *) dst->data,
                       V,
                       P,
                       gate ? (int) gate->ne[0] : 0,
                       dst->op_params[1],
                       n_groups};
    const auto launch = [&](void (*kernel)(Node), dim3 blocks, int n_threads) {
        ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(blocks, dim3(n_threads), 0, ctx.stream()), node);
    };
    launch(scan, dim3(n_groups / SCAN_THREADS, n_rows), SCAN_THREADS);
    launch(find_candidates, dim3(n_rows), ROW_THREADS);
    launch(link_candidates, dim3(n_rows), EDGE_THREADS);
    launch(walk, dim3(L), WALK_THREADS);
}

} // namespace dflash
