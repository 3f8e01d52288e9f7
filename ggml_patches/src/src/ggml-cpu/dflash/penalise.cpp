// Biases and penalties in the logits themselves. A row is one thread's.

#include "dflash/kernels.h"

namespace dflash {
namespace {

constexpr int64_t WORD = 32; // tokens of a word of a set

int64_t words_of(int64_t n_tokens) {
    return (n_tokens + WORD - 1) / WORD;
}

struct Penalise {
    const ggml_tensor *logits, *block, *history, *penalties, *bias;
    const int32_t *base, *n_rows, *slots;
    int64_t V, T, L, C, N, n_bias;

    explicit Penalise(const ggml_tensor * dst) {
        logits = dst->src[0], block = dst->src[1];
        const auto ints = [&](int i) { return (const int32_t *) dst->src[i]->data; };
        base = ints(2), n_rows = ints(3), slots = ints(4);
        history = dst->src[5], penalties = dst->src[6], bias = dst->src[7];
        V = logits->ne[0], T = logits->ne[1], L = logits->ne[2];
        C = history->ne[0], N = history->ne[1], n_bias = bias->ne[1];
    }

    // slot of a lane whose row t is to be changed, or -1
    int64_t slot_of_row(int64_t t, int64_t lane) const {
        const bool live = n_rows[lane] <= T && t < n_rows[lane] && base[lane] >= 0;
        return live ? slot_of(slots, lane, N) : -1;
    }
};

void add_biases(const Penalise & node, int64_t slot, float * x) {
    for (int64_t i = 0; i < node.n_bias; i++) {
        const int32_t * pair = at<int32_t>(node.bias, i, slot);
        if (pair[0] < 0) {
            return;
        }
        if (pair[0] < node.V) {
            float b;
            std::memcpy(&b, &pair[1], sizeof(b));
            x[pair[0]] += b;
        }
    }
}

// Takes each of the tokens that is not in `seen` yet, a set of V bits.
class Penalty {
  public:
    Penalty(float repetition, float presence, int64_t vocabulary, float * x, uint32_t * seen)
        : repetition_(repetition), presence_(presence), vocabulary_(vocabulary), x_(x), seen_(seen) {
        std::memset(seen, 0, words_of(vocabulary) * sizeof(*seen));
    }

    void take(const int32_t * tokens, int64_t n) {
        for (int64_t i = 0; i < n; i++) {
            const int32_t v = tokens[i];
            if (v < 0 || v >= vocabulary_ || (seen_[v / WORD] >> v % WORD & 1)) {
                continue;
            }
            seen_[v / WORD] |= 1u << v % WORD;
            const float repeated = x_[v] > 0 ? x_[v] / repetition_ : x_[v] * repetition_;
            x_[v] = repeated - presence_;
        }
    }

  private:
    float repetition_, presence_;
    int64_t vocabulary_;
    float * x_;
    uint32_t * seen_;
};

void penalise_row(const Penalise & node, int64_t t, int64_t lane, int64_t slot, uint32_t * seen) {
    float * x = at<float>(node.logits, t, lane);
    add_biases(node, slot, x);

    const float * penalties = at<float>(node.penalties, slot);
    if (penalties[0] == 1.0f && penalties[1] == 0.0f) {
        return;
    }
    Penalty penalty(penalties[0], penalties[1], node.V, x, seen);
    penalty.take(at<int32_t>(node.history, slot), node.base[lane] < node.C ? node.base[lane] + 1 : node.C);
    penalty.take(at<int32_t>(node.block, lane) + 1, t);
}

} // namespace

void penalise(const ggml_compute_params * params, ggml_tensor * dst) {
    const Penalise node(dst);
    uint32_t * seen = (uint32_t *) params->wdata + params->ith * words_of(node.V);
    const Share rows(node.T * node.L, params);
    for (int64_t i = rows.begin; i < rows.end; i++) {
        const int64_t t = i % node.T, lane = i / node.T, slot = node.slot_of_row(t, lane);
        if (slot >= 0) {
            penalise_row(node, t, lane, slot, seen);
        }
    }
}

size_t penalise_work_size(const ggml_tensor * node, int n_tasks) {
    return n_tasks * words_of(node->src[0]->ne[0]) * sizeof(uint32_t);
}

} // namespace dflash
