// A draft's block: the anchor, then proposals. The candidates of a row are its largest logits; a walk from the anchor
// takes the best successor of what it took before.
//
// All threads look for candidates, a row at a time; the walk of a lane is one thread's.

#include "dflash/kernels.h"
#include "dflash/noise.h"

namespace dflash {
namespace {

struct Candidate {
    float logit;
    int32_t id;
};

struct Node {
    const ggml_tensor *logits, *gate, *predecessor, *successor;
    const int32_t *anchors, *base;
    const ggml_tensor * sampling;
    Candidate * candidates; // of all rows
    int64_t V, P, L, rank;
    int top_k;

    Node(const ggml_compute_params * params, const ggml_tensor * dst) {
        logits = dst->src[0], sampling = dst->src[3];
        anchors = (const int32_t *) dst->src[1]->data, base = (const int32_t *) dst->src[2]->data;
        gate = dst->src[4], predecessor = dst->src[5], successor = dst->src[6];
        candidates = (Candidate *) params->wdata;
        V = logits->ne[0], P = logits->ne[1], L = logits->ne[2];
        rank = gate ? gate->ne[0] : 0;
        top_k = dst->op_params[1];
    }

    bool is_live(int64_t lane) const { return anchors[lane] >= 0 && anchors[lane] < V; }
    Candidate * row(int64_t p, int64_t lane) const { return candidates + (lane * P + p) * top_k; }
};

// Puts x into a list of n that falls, behind those that equal it; the last one drops out.
void insert(Candidate * list, int n, Candidate x) {
    int i = n - 1;
    for (; i > 0 && list[i - 1].logit < x.logit; i--) {
        list[i] = list[i - 1];
    }
    list[i] = x;
}

// The top_k largest of x, falling, equal ones by rising id. Numbers arrive by rising id, so after the first ones only
// what is larger than the least kept one enters.
void find_candidates(const float * x, int64_t n, int top_k, Candidate * list) {
    for (int i = 0; i < top_k; i++) {
        insert(list, i + 1, {std::isnan(x[i]) ? -INFINITY : x[i], i});
    }
    constexpr int64_t AT_ONCE = 64;
    for (int64_t first = top_k; first < n; first += AT_ONCE) {
        const int64_t size = n - first < AT_ONCE ? n - first : AT_ONCE;
        const float least = list[top_k - 1].logit;
        int32_t any = 0;
        for (int64_t i = 0; i < size; i++) {
            any |= x[first + i] > least;
        }
        for (int64_t i = first; any && i < first + size; i++) {
            if (x[i] > list[top_k - 1].logit) {
                insert(list, top_k, {x[i], (int32_t) i});
            }
        }
    }
}

constexpr int64_t MAX_RANK = (GGML_DFLASH_MAX_RANK + WIDTH - 1) / WIDTH * WIDTH;

// A row of a codebook as floats, filled up with zeros to whole vectors.
void read_row(const ggml_tensor * book, int64_t id, float * to) {
    const int64_t rank = book->ne[0];
    std::memset(to + rank / WIDTH * WIDTH, 0, WIDTH * sizeof(float) * (rank % WIDTH != 0));
    if (book->type == GGML_TYPE_F32) {
        std::memcpy(to, at<float>(book, id), rank * sizeof(float));
    } else {
        ggml_get_type_traits(book->type)->to_float(at<void>(book, id), to, rank);
    }
}

// Edge scores of the successors of one token in one row.
class Edges {
  public:
    Edges(const Node & node, int64_t before, int64_t p, int64_t lane) : node_(node) {
        if (node.rank > 0) {
            const float * gate = at<float>(node.gate, p, lane);
            read_row(node.predecessor, before, gated_);
            for (int64_t r = 0; r < node.rank; r++) {
                gated_[r] *= gate[r];
            }
        }
    }

    // eight partial sums by fma, then a fixed tree
    float operator()(int64_t after) const {
        if (node_.rank == 0) {
            return 0.0f;
        }
        float row[MAX_RANK];
        read_row(node_.successor, after, row);
        Vec8 sums = Vec8::all(0.0f);
        for (int64_t r = 0; r < node_.rank; r += WIDTH) {
            sums = fma(Vec8::load(gated_ + r), Vec8::load(row + r), sums);
        }
        return sum(sums);
    }

  private:
    const Node & node_;
    float gated_[MAX_RANK];
};

void walk(const Node & node, int64_t lane, int32_t * proposals) {
    const Sampling sampling(at<int32_t>(node.sampling, lane));
    int32_t token = node.anchors[lane];
    for (int64_t p = 0; p < node.P; p++) {
        const Candidate * candidates = node.row(p, lane);
        const Edges edges(node, token, p, lane);
        const Noise noise(sampling.seed, (int64_t) node.base[lane] + p + 1);
        float best = -INFINITY;
        token = candidates[0].id;
        for (int i = 0; i < node.top_k; i++) {
            const int32_t id = candidates[i].id;
            float score = edges(id) + candidates[i].logit;
            if (!sampling.is_greedy()) {
                score = score / sampling.temperature + noise(id);
            }
            if (score > best) { // never if NaN
                best = score;
                token = id;
            }
        }
        proposals[p] = token;
    }
}

} // namespace

void select(const ggml_compute_params * params, ggml_tensor * dst) {
    const Node node(params, dst);
    const Share rows(node.P * node.L, params);
    for (int64_t i = rows.begin; i < rows.end; i++) {
        const int64_t p = i % node.P, lane = i / node.P;
        if (node.is_live(lane)) {
            find_candidates(at<float>(node.logits, p, lane), node.V, node.top_k, node.row(p, lane));
        }
    }
    ggml_barrier(params->threadpool);

    const Share lanes(node.L, params);
    for (int64_t lane = lanes.begin; lane < lanes.end; lane++) {
        int32_t * block = at<int32_t>(dst, lane);
        if (node.is_live(lane)) {
            block[0] = node.anchors[lane];
            walk(node, lane, block + 1);
        } else {
            std::memset(block, 0, (node.P + 1) * sizeof(*block));
        }
    }
}

size_t select_work_size(const ggml_tensor * node) {
    return ggml_nrows(node->src[0]) * node->op_params[1] * sizeof(Candidate);
}

} // namespace dflash
