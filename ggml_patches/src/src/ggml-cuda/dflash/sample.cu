// The target's token of every row, in two kernels: the scan reads all logits once, on all multiprocessors; then a block
// per row finds the token from the numbers that the scan left, and reads again the groups that can hold it.

#include "draw.cuh"
#include "top_k.cuh"

namespace dflash {
namespace {

struct Node {
    const float * logits;
    const int32_t *base, *n_rows, *sampling;
    float * numbers; // of the groups
    int32_t * tokens;
    int V, T, n_groups;

    __device__ bool is_live(int row) const {
        const int lane = row / T;
        return base[lane] >= 0 && n_rows[lane] <= T && row % T < n_rows[lane];
    }
    __device__ Row at(int row) const { return Row(logits, row, V, numbers, n_groups); }
    __device__ Sampling sampling_of(int row) const { return Sampling(sampling, row / T); }
    __device__ Scores scores_of(int row, const Sampling & lane_sampling) const {
        return Scores(lane_sampling, (int64_t) base[row / T] + row % T + 1);
    }
};

// Of a group: the best score if it is above everything that the warp saw, else anything that is not larger. The logits
// come from the cache once more, so that the code for one id is there 4 times and not 32.
__device__ __forceinline__ float best_score(const Row & row, int group, const Scores & scores) {
    float best = -INFINITY, bound = -INFINITY;
#pragma unroll 1
    for (int load = 0; load < LOADS; load++) {
        float x[1][4];
        read_group(row, group, load, x);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int id = row.first_id(group, load) + e;
            if (x[0][e] > -INFINITY && scores.may_reach(x[0][e], id, bound)) {
                best = fmaxf(best, scores(x[0][e], id));
                bound = fmaxf(best, bound);
            }
        }
        for (int step = 16; step > 0; step /= 2) {
            bound = fmaxf(bound, __shfl_xor_sync(0xffffffff, bound, step, 32));
        }
    }
    return best;
}

// Number of a group: its largest logit or, where a row is drawn from unfiltered, its best score; NaN if the group makes
// the row bad.
__global__ void __launch_bounds__(SCAN_THREADS, 4) scan(const Node node) {
    ggml_cuda_pdl_sync();
    const int at = blockIdx.y;
    if (!node.is_live(at)) {
        return;
    }
    const Row row = node.at(at);
    const int group = blockIdx.x * SCAN_THREADS + threadIdx.x;
    float x[LOADS][4];
    read_group(row, group, 0, x);

    float largest = -INFINITY;
    bool is_bad = false;
#pragma unroll
    for (int j = 0; j < LOADS; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            largest = fmaxf(largest, x[j][e]);
            is_bad |= !(x[j][e] < INFINITY);
        }
    }
    const Sampling sampling = node.sampling_of(at);
    if (!sampling.is_greedy() && !sampling.is_filtered(node.V)) {
        largest = best_score(row, group, node.scores_of(at, sampling));
    }
    row.numbers[group] = is_bad ? NAN : largest;
}

// The lowest id whose number is the best of all groups; -1 if these groups hold nothing but -infinity.
template <typename NumberOf>
__device__ __forceinline__ int lowest_of_best(const Row & row, float best, NumberOf number_of_id) {
    uint64_t token = NOWHERE, nothing = 1;
    visit_few(
        row, [&](float number) { return number == best; },
        [&](float x, int id) {
            nothing = x > -INFINITY ? 0 : nothing;
            if (number_of_id(x, id) == best && (uint64_t) id < token) {
                token = (uint64_t) id;
            }
        });
    token = block_min(token);
    return best > -INFINITY || block_min(nothing) == 0 ? (int) token : -1;
}

// What top-k, top-p and min-p leave of a row. All look at the logits before the temperature.
struct Filter {
    float largest, least;
    uint64_t top_k_end, top_p_end;

    __device__ bool in_top_k(float x, int id) const { return place_of(rank_of(x), id) <= top_k_end; }

    // Top-p orders ids by their rounded distance from the largest.
    __device__ bool keeps(float x, int id) const {
        return x >= least && in_top_k(x, id) && place_of(rank_of(x - largest), id) <= top_p_end;
    }
    __device__ bool may_keep(float largest_of_group) const { return keeps(largest_of_group, 0); }
};

__device__ __forceinline__ uint64_t find_top_p_end(const Row & row, double top_p, const Filter & filter,
                                                   Search & search) {
    return find_end(
        search,
        [&](uint32_t last, auto add) {
            visit_many(
                row,
                [&](float x) {
                    const float distance = x - filter.largest;
                    return distance > -23.0f && rank_of(distance) <= last && filter.in_top_k(x, 0);
                },
                [&](float x, int id) {
                    const float distance = x - filter.largest;
                    if (distance > -23.0f && rank_of(distance) <= last && filter.in_top_k(x, id)) {
                        add(place_of(rank_of(distance), id), fixed_weight(distance));
                    }
                });
        },
        [&](uint64_t total) { return needed_of(total, top_p); },
        [](uint32_t rank) { return fixed_weight(number_of(rank)); });
}

// The token of a row whose filters may leave any number of ids.
__device__ __forceinline__ int draw_any(const Row & row, const Sampling & sampling, Filter filter,
                                        const Scores & scores, Search & search) {
    if (sampling.has_top_k(row.n)) {
        filter.top_k_end = find_top_k_end(row, sampling.top_k, search);
    }
    if (sampling.has_top_p()) {
        filter.top_p_end = find_top_p_end(row, sampling.top_p, filter, search);
    }
    uint64_t token = NOWHERE;
    float bound = -INFINITY;
    visit_few(
        row, [&](float x) { return filter.may_keep(x); },
        [&](float x, int id) {
            if (filter.keeps(x, id) && scores.may_reach(x, id, bound)) {
                const float score = scores(x, id);
                const uint64_t place = score == score ? place_of(rank_of(score), id) : NOWHERE;
                token = place < token ? place : token;
                bound = fmaxf(bound, score);
            }
        });
    return id_at(block_min(token));
}

// The same when top-k left the places `top.first`: the weight before an id decides whether top-p keeps it.
__device__ __forceinline__ int draw_listed(TopK & top, const Sampling & sampling, const Filter & filter,
                                           const Scores & scores) {
    const uint64_t * first = top.first;
    uint64_t *places = top.listed, *weights = top.listed + MAX_LISTED_K; // in top-p; the list has done its work
    const int i = threadIdx.x, k = sampling.top_k;
    if (i < k) {
        const float distance = number_at(first[i]) - filter.largest;
        places[i] = place_of(rank_of(distance), id_at(first[i]));
        weights[i] = fixed_weight(distance);
    }
    __syncthreads();
    uint64_t token = NOWHERE;
    if (i < k) {
        uint64_t before = 0, total = 0;
        for (int other = 0; other < k; other++) {
            total += weights[other];
            before += places[other] < places[i] ? weights[other] : 0;
        }
        const float x = number_at(first[i]);
        const int id = id_at(first[i]);
        const bool in_top_p = !sampling.has_top_p() || before < needed_of(total, sampling.top_p);
        if (in_top_p && x >= filter.least) {
            const float score = scores(x, id);
            token = score == score ? place_of(rank_of(score), id) : NOWHERE;
        }
    }
    return id_at(block_min(token));
}

// The best number of the row's groups; NaN if one of them is.
__device__ __forceinline__ float best_number(const Row & row) {
    uint64_t best = NOWHERE;
    for (int group = threadIdx.x; group < row.n_groups; group += ROW_THREADS) {
        const float number = row.numbers[group];
        const uint64_t place = number == number ? (uint64_t) rank_of(number) + 1 : 0;
        best = place < best ? place : best;
    }
    best = block_min(best);
    return best == 0 ? NAN : number_of((uint32_t) (best - 1));
}

// The token of a live row whose best number is `best`, in every thread.
__device__ __forceinline__ int find_token(const Row & row, float best, const Sampling & sampling, const Scores & scores,
                                          TopK & top, Search & search) {
    if (!sampling.is_greedy() && !sampling.is_filtered(row.n)) {
        return lowest_of_best(row, best, scores);
    }
    const Filter filter = {best, sampling.has_min_p() ? best + sampling.log_min_p : -INFINITY, NOWHERE, NOWHERE};
    if (sampling.is_greedy() || best == -INFINITY || filter.least > best) { // one token is always kept
        return lowest_of_best(row, best, [](float x, int) { return x; });
    }
    const bool is_small = sampling.has_top_k(row.n) && sampling.top_k <= MAX_LISTED_K;
    if (is_small && find_top_k(row, sampling.top_k, top)) {
        return draw_listed(top, sampling, filter, scores);
    }
    return draw_any(row, sampling, filter, scores, search);
}

__global__ void __launch_bounds__(ROW_THREADS) finish(const Node node) {
    ggml_cuda_pdl_sync();
    __shared__ TopK top;
    __shared__ Search search;
    const int at = blockIdx.x;
    int token = -1;
    if (node.is_live(at)) {
        const Row row = node.at(at);
        const Sampling sampling = node.sampling_of(at);
        const float best = best_number(row);
        if (best == best) {
            token = find_token(row, best, sampling, node.scores_of(at, sampling), top, search);
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
    ggml_cuda_pool_alloc<float> numbers(ctx.pool(), (size_t) n_rows * n_groups);

    const Node node = {(const float *) logits->data,
                       ints(1),
                       ints(2),
                       ints(3),
                       numbers.get(),
                       (int32_t *) dst->data,
                       (int) logits->ne[0],
                       (int) logits->ne[1],
                       n_groups};
    const cudaStream_t stream = ctx.stream();
    ggml_cuda_kernel_launch(
        scan, ggml_cuda_kernel_launch_params(dim3(n_groups / SCAN_THREADS, n_rows), dim3(SCAN_THREADS), 0, stream),
        node);
    ggml_cuda_kernel_launch(finish, ggml_cuda_kernel_launch_params(dim3(n_rows), dim3(ROW_THREADS), 0, stream), node);
}

} // namespace dflash
