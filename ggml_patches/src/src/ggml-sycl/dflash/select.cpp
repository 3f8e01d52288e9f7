// A draft's block, the anchor and its proposals: the candidates of every row, which are its largest logits, then a walk
// from the anchor that takes the best successor of what it took before.
//
// Candidates are found as keys (numbers.hpp), smallest first: the top_k of every piece of a row, then of all pieces. No
// two keys of a row are equal, so where a row is cut makes no difference.

#include "elements.hpp"
#include "kernels.hpp"
#include "numbers.hpp"

namespace dflash {

constexpr int SELECT_PIECE = 4096; // logits of a work-group

template <typename Do> inline void with_codebook_type(ggml_type type, const Do & do_it) {
    with_type<GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0>(type, do_it);
}

struct Select {
    const float * logits;
    const int32_t *anchors, *base;
    View sampling, gate, predecessor, successor, out;
    ggml_type predecessor_type = GGML_TYPE_F32, successor_type = GGML_TYPE_F32;
    int V, P, L, rank = 0, top_k, n_pieces;
    uint64_t *found = nullptr, *candidates = nullptr; // [top_k, n_pieces, P, L], [top_k, P, L]

    explicit Select(const ggml_tensor * dst)
        : logits((const float *) dst->src[0]->data), anchors(ints_of(dst->src[1])), base(ints_of(dst->src[2])),
          sampling(dst->src[3]), gate(dst->src[4]), predecessor(dst->src[5]), successor(dst->src[6]), out(dst) {
        if (dst->src[4]) {
            rank = (int) dst->src[4]->ne[0];
            predecessor_type = dst->src[5]->type, successor_type = dst->src[6]->type;
        }
        V = (int) dst->src[0]->ne[0], P = (int) dst->src[0]->ne[1], L = (int) dst->src[0]->ne[2];
        top_k = dst->op_params[1];
        n_pieces = (V + SELECT_PIECE - 1) / SELECT_PIECE;
    }

    bool is_live(int lane) const { return anchors[lane] >= 0 && anchors[lane] < V; }
    int64_t row(int lane, int p) const { return (int64_t) lane * P + p; }

    // NaN counts as -infinity.
    float logit(int lane, int p, int id) const {
        const float x = logits[row(lane, p) * V + id];
        return is_nan(x) ? -INFINITY : x;
    }
};

// Writes the top_k smallest of the keys that the group's work-items have; key_at(i), i < N, gives a work-item's.
template <int N, typename KeyAt> void find_smallest(Item item, int top_k, uint64_t * to, const KeyAt & key_at) {
    uint64_t keys[N];
    for (int i = 0; i < N; i++) {
        keys[i] = key_at(i);
    }
    for (int k = 0; k < top_k; k++) {
        uint64_t least = NO_KEY;
        for (int i = 0; i < N; i++) {
            least = keys[i] < least ? keys[i] : least;
        }
        least = sycl::reduce_over_group(item.get_group(), least, sycl::minimum<uint64_t>());
        for (int i = 0; i < N; i++) {
            keys[i] = keys[i] == least ? NO_KEY : keys[i];
        }
        if (item.get_local_id(2) == 0) {
            to[k] = least;
        }
    }
}

struct SelectPieces {
    Select node;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), p = (int) item.get_group(1), piece = (int) item.get_group(2);
        if (!node.is_live(lane)) {
            return;
        }
        const int first = piece * SELECT_PIECE + (int) item.get_local_id(2);
        uint64_t * to = node.found + (node.row(lane, p) * node.n_pieces + piece) * node.top_k;
        find_smallest<SELECT_PIECE / GROUP_SIZE>(item, node.top_k, to, [&](int i) {
            const int id = first + i * GROUP_SIZE;
            return id < node.V ? key_of(node.logit(lane, p, id), id) : NO_KEY;
        });
    }
};

struct SelectMerge {
    static constexpr int MOST_PIECES = (GGML_DFLASH_MAX_VOCABULARY + SELECT_PIECE - 1) / SELECT_PIECE;
    static constexpr int MOST = (MOST_PIECES * GGML_DFLASH_MAX_TOP_K + GROUP_SIZE - 1) / GROUP_SIZE;

    Select node;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), p = (int) item.get_group(1);
        if (!node.is_live(lane)) {
            return;
        }
        const int n = node.n_pieces * node.top_k;
        const uint64_t * found = node.found + node.row(lane, p) * n;
        find_smallest<MOST>(item, node.top_k, node.candidates + node.row(lane, p) * node.top_k, [&](int i) {
            const int at = i * GROUP_SIZE + (int) item.get_local_id(2);
            return at < n ? found[at] : NO_KEY;
        });
    }
};

// The walk of a lane is one work-group's: WIDTH work-items a candidate.
struct SelectWalk {
    static constexpr int SIZE = GGML_DFLASH_MAX_TOP_K * WIDTH;

    Select node;
    Local<float> parts;  // of the edge scores
    Local<float> scores; // of the candidates
    Local<int32_t> taken;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), local = (int) item.get_local_id(2);
        int32_t * block = node.out.at<int32_t>(lane);
        if (!node.is_live(lane)) {
            if (local <= node.P) {
                block[local] = 0;
            }
            return;
        }
        if (local == 0) {
            block[0] = node.anchors[lane];
        }
        const Sampling sampling(node.sampling.at<int32_t>(lane));
        int token = node.anchors[lane];
        for (int p = 0; p < node.P; p++) {
            const uint64_t * candidates = node.candidates + node.row(lane, p) * node.top_k;
            if (local / WIDTH < node.top_k) {
                parts[local] = part_of_edge(lane, p, token, id_of(candidates[local / WIDTH]), local % WIDTH);
            }
            sycl::group_barrier(item.get_group());
            if (local < node.top_k) {
                scores[local] = score(sampling, lane, p, id_of(candidates[local]), tree(parts, local * WIDTH));
            }
            sycl::group_barrier(item.get_group());
            if (local == 0) {
                taken[0] = id_of(candidates[first_best()]);
                block[1 + p] = taken[0];
            }
            sycl::group_barrier(item.get_group());
            token = taken[0];
        }
    }

  private:
    // sum of predecessor[r,before] * gate[r,p] * successor[r,after] over every WIDTH-th r
    float part_of_edge(int lane, int p, int before, int after, int part) const {
        float sum = 0.0f;
        if (node.rank == 0) {
            return sum;
        }
        const char *from = node.predecessor.at<char>(before), *to = node.successor.at<char>(after);
        const float * gate = node.gate.at<float>(p, lane);
        with_codebook_type(node.predecessor_type, [&](auto stored_from) {
            with_codebook_type(node.successor_type, [&](auto stored_to) {
                for (int r = part; r < node.rank; r += WIDTH) {
                    const float gated = element<decltype(stored_from)::type>(from, r) * gate[r];
                    sum = sycl::fma(gated, element<decltype(stored_to)::type>(to, r), sum);
                }
            });
        });
        return sum;
    }

    float score(const Sampling & sampling, int lane, int p, int id, float edge) const {
        const float score = edge + node.logit(lane, p, id);
        if (sampling.is_greedy()) {
            return score;
        }
        const uint64_t key = noise_key(sampling.seed, (int64_t) node.base[lane] + p + 1);
        return divide(score, sampling.temperature) + noise(key, id);
    }

    int first_best() const {
        int best = 0;
        float most = -INFINITY;
        for (int i = 0; i < node.top_k; i++) {
            if (!is_nan(scores[i]) && scores[i] > most) {
                most = scores[i];
                best = i;
            }
        }
        return best;
    }
};

void select(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    Select node(dst);
    const size_t n_kept = (size_t) node.L * node.P * node.top_k;
    ggml_sycl_pool_alloc<uint64_t> found(ctx.pool(), n_kept * node.n_pieces), candidates(ctx.pool(), n_kept);
    node.found = found.get(), node.candidates = candidates.get();

    launch(ctx, node.L, node.P, node.n_pieces, GROUP_SIZE, [&](sycl::handler &) { return SelectPieces{node}; });
    launch(ctx, node.L, node.P, 1, GROUP_SIZE, [&](sycl::handler &) { return SelectMerge{node}; });
    launch(ctx, node.L, 1, 1, SelectWalk::SIZE, [&](sycl::handler & handler) {
        return SelectWalk{node, Local<float>(SelectWalk::SIZE, handler), Local<float>(GGML_DFLASH_MAX_TOP_K, handler),
                          Local<int32_t>(1, handler)};
    });
}

} // namespace dflash
