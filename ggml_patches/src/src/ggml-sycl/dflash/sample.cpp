// The target's token of every row: the largest logit, or the largest logit / T + noise of the tokens that the lane's
// filters leave.
//
// Everything is a search among keys (numbers.hpp), smallest first, over pieces of a row that any number of work-groups
// take: the largest logit, then (one group a row) where top-k and top-p end, then the best draw. Weights are whole
// numbers, so sums do not depend on their order.

#include "cut.hpp"
#include "kernels.hpp"
#include "numbers.hpp"

namespace dflash {

constexpr int SAMPLE_PIECE = 4096; // logits of a work-group

// What a row's filters look like when they are known.
struct SampleRow {
    int32_t token; // of a row that is done, else NOT_DONE
    int32_t best;  // id of the largest logit, which is always kept
    float largest;
    uint64_t top_k, top_p; // cuts, by logit and by distance from the largest
    static constexpr int32_t NOT_DONE = -2;
};

struct Sample {
    const float * logits;
    const int32_t *base, *n_rows;
    View sampling;
    int32_t * out;
    int V, T, L, n_pieces;
    uint64_t * found = nullptr; // [n_pieces, T, L]
    SampleRow * rows = nullptr; // [T, L]

    explicit Sample(const ggml_tensor * dst)
        : logits((const float *) dst->src[0]->data), base(ints_of(dst->src[1])), n_rows(ints_of(dst->src[2])),
          sampling(dst->src[3]), out((int32_t *) dst->data) {
        V = (int) dst->src[0]->ne[0], T = (int) dst->ne[0], L = (int) dst->ne[1];
        n_pieces = (V + SAMPLE_PIECE - 1) / SAMPLE_PIECE;
    }

    bool is_live(int lane, int t) const { return base[lane] >= 0 && n_rows[lane] <= T && t < n_rows[lane]; }
    int64_t row(int lane, int t) const { return (int64_t) lane * T + t; }
    const float * logits_of(int lane, int t) const { return logits + row(lane, t) * V; }
    uint64_t * found_of(int lane, int t) const { return found + row(lane, t) * n_pieces; }
};

// The smallest key of a piece of a row; key_at(id) gives the keys.
template <typename KeyAt> void search_piece(Item item, const Sample & node, const KeyAt & key_at) {
    const int lane = (int) item.get_group(0), t = (int) item.get_group(1), piece = (int) item.get_group(2);
    const int end = (piece + 1) * SAMPLE_PIECE < node.V ? (piece + 1) * SAMPLE_PIECE : node.V;
    uint64_t least = NO_KEY;
    for (int id = piece * SAMPLE_PIECE + (int) item.get_local_id(2); id < end; id += GROUP_SIZE) {
        const uint64_t key = key_at(id);
        least = key < least ? key : least;
    }
    least = sycl::reduce_over_group(item.get_group(), least, sycl::minimum<uint64_t>());
    if (item.get_local_id(2) == 0) {
        node.found_of(lane, t)[piece] = least;
    }
}

// The smallest key of a row whose pieces have been searched.
inline uint64_t search_found(Item item, const Sample & node, int lane, int t) {
    uint64_t least = NO_KEY;
    for (int i = (int) item.get_local_id(2); i < node.n_pieces; i += GROUP_SIZE) {
        const uint64_t key = node.found_of(lane, t)[i];
        least = key < least ? key : least;
    }
    return sycl::reduce_over_group(item.get_group(), least, sycl::minimum<uint64_t>());
}

constexpr uint64_t NAN_KEY = 0; // smaller than that of any number: a NaN shows in the smallest key of its row

struct SampleLargest {
    Sample node;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), t = (int) item.get_group(1);
        if (!node.is_live(lane, t)) {
            return;
        }
        const float * logits = node.logits_of(lane, t);
        search_piece(item, node, [=](int id) { return is_nan(logits[id]) ? NAN_KEY : key_of(logits[id], id); });
    }
};

struct SampleFilter {
    Sample node;
    CutMemory memory;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), t = (int) item.get_group(1);
        SampleRow row = {-1, 0, 0.0f, NO_KEY, NO_KEY};
        if (node.is_live(lane, t)) {
            const uint64_t key = search_found(item, node, lane, t);
            const float * logits = node.logits_of(lane, t);
            row.best = id_of(key);
            row.largest = logits[row.best];
            if (key != NAN_KEY && (bits_of(row.largest) & 0x7F800000u) != 0x7F800000u) {
                fill(item, logits, Sampling(node.sampling.at<int32_t>(lane)), row);
            }
        }
        if (item.get_local_id(2) == 0) {
            node.rows[node.row(lane, t)] = row;
        }
    }

  private:
    void fill(Item item, const float * logits, const Sampling & sampling, SampleRow & row) const {
        if (sampling.is_greedy()) {
            row.token = row.best;
            return;
        }
        row.token = SampleRow::NOT_DONE;
        if (sampling.top_k > 0 && sampling.top_k < node.V) {
            row.top_k = find_cut(item, memory, node.V, (uint64_t) sampling.top_k,
                                 [=](int id) { return Weighed{1, key_of(logits[id], id)}; });
        }
        if (is_below_one(sampling.top_p)) {
            const float largest = row.largest;
            const uint64_t top_k = row.top_k;
            const auto weigh = [=](int id) {
                const float distance = logits[id] - largest;
                const bool is_kept = key_of(logits[id], id) <= top_k;
                return Weighed{is_kept ? fixed_weight(distance) : 0, key_of(distance, id)};
            };
            const uint64_t total = sum_weights(item, node.V, weigh);
            row.top_p = find_cut(item, memory, node.V, part_of(sampling.top_p, total), weigh);
        }
    }
};

struct SampleDraw {
    Sample node;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), t = (int) item.get_group(1);
        const SampleRow row = node.rows[node.row(lane, t)];
        if (row.token != SampleRow::NOT_DONE) {
            return;
        }
        const float * logits = node.logits_of(lane, t);
        const Sampling sampling(node.sampling.at<int32_t>(lane));
        const uint64_t key = noise_key(sampling.seed, (int64_t) node.base[lane] + t + 1);
        const float least = row.largest + sampling.log_min_p;
        const uint32_t least_rank = is_nan(least) ? UINT32_MAX : rank_of(least);
        // Against the draw of the largest logit most others need no noise: not even the most of it would do.
        const float bar = divide(row.largest, sampling.temperature) + noise(key, row.best);

        search_piece(item, node, [=](int id) {
            const float x = logits[id];
            const bool is_kept = key_of(x, id) <= row.top_k && rank_of(x) <= least_rank &&
                                 (row.top_p == NO_KEY || key_of(x - row.largest, id) <= row.top_p);
            const float scaled = divide(x, sampling.temperature);
            if (id != row.best && (!is_kept || scaled + MOST_NOISE < bar)) {
                return NO_KEY;
            }
            const float value = scaled + noise(key, id);
            return is_nan(value) ? NO_KEY : key_of(value, id);
        });
    }
};

struct SampleTake {
    Sample node;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), t = (int) item.get_group(1);
        int32_t token = node.rows[node.row(lane, t)].token;
        if (token == SampleRow::NOT_DONE) {
            token = id_of(search_found(item, node, lane, t));
        }
        if (item.get_local_id(2) == 0) {
            node.out[node.row(lane, t)] = token;
        }
    }
};

void sample(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    Sample node(dst);
    const size_t n_rows = (size_t) node.L * node.T;
    ggml_sycl_pool_alloc<uint64_t> found(ctx.pool(), n_rows * node.n_pieces);
    ggml_sycl_pool_alloc<SampleRow> rows(ctx.pool(), n_rows);
    node.found = found.get(), node.rows = rows.get();

    launch(ctx, node.L, node.T, node.n_pieces, GROUP_SIZE, [&](sycl::handler &) { return SampleLargest{node}; });
    launch(ctx, node.L, node.T, 1, GROUP_SIZE,
           [&](sycl::handler & handler) { return SampleFilter{node, CutMemory(handler)}; });
    launch(ctx, node.L, node.T, node.n_pieces, GROUP_SIZE, [&](sycl::handler &) { return SampleDraw{node}; });
    launch(ctx, node.L, node.T, 1, GROUP_SIZE, [&](sycl::handler &) { return SampleTake{node}; });
}

} // namespace dflash
