// The target's token of every row, in two kernels: the scan reads all logits once, on all multiprocessors, and leaves
// the best id of each chunk; then a block per row takes the best of these. Where the lane filters, that is only the
// largest logit, and the block finds the token from the numbers that the scan left of the groups, reading again the
// groups that can hold it.

#include "draw.cuh"
#include "sample_filters.cuh"
#include "top_k.cuh"

namespace dflash {
namespace {

constexpr uint64_t BAD = 0; // before every place: the row has no token

struct Node {
    const float * logits;
    const int32_t *base, *n_rows, *sampling;
    float * numbers;   // of the groups of filtered rows: the largest logit
    uint64_t * places; // [chunks, rows]: of the best id of a chunk
    int32_t * tokens;
    int V, T, n_groups;

    __device__ bool is_live(int row) const {
        const int lane = row / T;
        return (base[lane] >= 0) & (n_rows[lane] <= T) & (row % T < n_rows[lane]); // & reads both at once
    }
    __device__ Row at(int row) const { return Row(logits, row, V, numbers, n_groups); }
    __device__ Sampling sampling_of(int row) const { return Sampling(sampling, row / T); }
    __device__ Scores scores_of(int row, const Sampling & lane_sampling) const {
        return Scores(lane_sampling, (int64_t) base[row / T] + row % T + 1);
    }
    __device__ int n_chunks() const { return n_groups / SCAN_THREADS; }
    __device__ uint64_t * places_of(int row) const { return places + (int64_t) row * n_chunks(); }
};

// The largest of the numbers of a scan block, in every thread.
__device__ __forceinline__ float scan_max(float x) {
    constexpr int WARPS = SCAN_THREADS / 32;
    __shared__ float of_warps[WARPS];
    for (int step = 16; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step, 32));
    }
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = x;
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        x = fmaxf(x, of_warps[warp]);
    }
    return x;
}

// Which of a thread's numbers are wanted, a bit each, by rising id.
template <typename Wanted> __device__ __forceinline__ uint32_t which(const float (&x)[LOADS][4], Wanted wanted) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        bits |= wanted(x[i / 4][i % 4]) ? 1u << i : 0;
    }
    return bits;
}

// x <- what the scores of a thread's ids are at most; returns the largest of these
__device__ __forceinline__ float bound_scores(const Scores & scores, int first_id, float (&x)[LOADS][4]) {
    const uint64_t key = scores.key_from(first_id);
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < LOADS; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[j][e] = scores.at_most(x[j][e], key, j * SCAN_THREADS * 4 + e);
            most = fmaxf(most, x[j][e]);
        }
    }
    return most;
}

// best <- the place of the best score, among the ids of a group whose bounds `most` let them reach `bound`. A logit of
// -infinity is no choice. The few logits come from the cache once more.
__device__ __forceinline__ void try_scores(const Row & row, int group, const Scores & scores,
                                           const float (&most)[LOADS][4], float bound, unsigned long long & best) {
    uint32_t reach = which(most, [&](float at_most) { return scores.may_reach(at_most, bound); });
    while (reach != 0) {
        const int i = __ffs((int) reach) - 1, id = row.first_id(group, i / 4) + i % 4;
        reach &= reach - 1;
        const float x = row.has(id) ? row.logits[id] : -INFINITY;
        if (x > -INFINITY) {
            const float score = scores(x, id);
            if (score == score) {
                atomicMin(&best, (unsigned long long) place_of(rank_of(score), id));
            }
        }
    }
}

// The place of a chunk's best id: of its largest logit or, where a row is drawn from unfiltered, of its best score.
// NOWHERE if there is no choice, BAD if the chunk makes the row bad. Of a dead row it is anything.
__global__ void __launch_bounds__(SCAN_THREADS, 4) scan(const Node node) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    __shared__ unsigned long long best;
    const int at = blockIdx.y, group = blockIdx.x * SCAN_THREADS + threadIdx.x;
    const Row row = node.at(at);
    float x[LOADS][4];
    read_group(row, group, 0, x); // on its way before it is known whether the row is live: the check takes as long
    const Sampling sampling = node.sampling_of(at);
    const bool is_filtered = sampling.is_filtered(node.V);
    const bool is_drawn = (int) node.is_live(at) & !sampling.is_greedy() & !is_filtered;
    if (threadIdx.x == 0) {
        best = NOWHERE;
    }
    float largest = -INFINITY;
    bool is_bad = false;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        largest = fmaxf(largest, x[i / 4][i % 4]);
        is_bad |= !(x[i / 4][i % 4] < INFINITY);
    }
    is_bad = __any_sync(0xffffffff, is_bad); // now, while x holds the logits
    if (is_filtered) {
        row.numbers[group] = largest;
    }
    if (!is_drawn) {
        const float bound = scan_max(largest);
        if (largest == bound && bound > -INFINITY) {
            const int i = __ffs((int) which(x, [&](float logit) { return logit == bound; })) - 1;
            atomicMin(&best, (unsigned long long) place_of(rank_of(bound), row.first_id(group, i / 4) + i % 4));
        }
    } else {
        const Scores scores = node.scores_of(at, sampling);
        const float most = bound_scores(scores, row.first_id(group, 0), x);
        float bound = scan_max(most);
#pragma unroll 1
        for (int round = 0; round < 2; round++) { // the most promising, then those that may reach what these reached
            if (scores.may_reach(most, bound)) {
                try_scores(row, group, scores, x, bound, best);
            }
            __syncthreads();
            bound = number_at(best);
        }
    }
    if (is_bad) {
        atomicMin(&best, (unsigned long long) BAD);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        node.places_of(at)[blockIdx.x] = best;
    }
}

// The best of the places that the scan left of a row; every warp finds it for itself.
__device__ __forceinline__ uint64_t best_place(const Node & node, int at) {
    uint64_t best = NOWHERE;
#pragma unroll 1
    for (int chunk = threadIdx.x % 32; chunk < node.n_chunks(); chunk += 32) {
        const uint64_t place = node.places_of(at)[chunk];
        best = place < best ? place : best;
    }
    return warp_min(best);
}

__global__ void __launch_bounds__(ROW_THREADS) finish(const Node node) {
    ggml_cuda_pdl_sync();
    __shared__ TopK top;
    __shared__ Search search;
    const int at = blockIdx.x;
    const Sampling sampling = node.sampling_of(at);
    const bool is_live = node.is_live(at), is_filtered = sampling.is_filtered(node.V);
    const uint64_t best = best_place(node, at);
    int token = -1;
    if (is_live && best != BAD && best != NOWHERE) {
        if (is_filtered) {
            token = find_token(node.at(at), best, sampling, node.scores_of(at, sampling), top, search);
        } else { // where the best score is -infinity, all are, those of the logits that were no choice too
            token = number_at(best) > -INFINITY ? id_at(best) : 0;
        }
    }
    if (threadIdx.x == 0) {
        node.tokens[at] = token;
    }
}

} // namespace

void sample(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * logits = dst->src[0];
    const auto ints = [&](int i) { return (const int32_t *) dst->src[i]->data; };
    const int n_rows = (int) (logits->ne[1] * logits->ne[2]), n_groups = count_groups(logits->ne[0]);
    const int n_chunks = n_groups / SCAN_THREADS;
    ggml_cuda_pool_alloc<float> numbers(ctx.pool(), (size_t) n_rows * n_groups);
    ggml_cuda_pool_alloc<uint64_t> places(ctx.pool(), (size_t) n_rows * n_chunks);

    const Node node = {(const float *) logits->data,
                       ints(1),
                       ints(2),
                       ints(3),
                       numbers.get(),
                       places.get(),
                       (int32_t *) dst->data,
                       (int) logits->ne[0],
                       (int) logits->ne[1],
                       n_groups};
    const cudaStream_t stream = ctx.stream();
    ggml_cuda_kernel_launch(scan, ggml_cuda_kernel_launch_params(dim3(n_chunks, n_rows), dim3(SCAN_THREADS), 0, stream),
                            node);
    ggml_cuda_kernel_launch(finish, ggml_cuda_kernel_launch_params(dim3(n_rows), dim3(ROW_THREADS), 0, stream), node);
}

} // namespace dflash
