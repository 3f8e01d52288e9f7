#pragma once

// Nodes that a device may take together with the products behind them. Their numbers are the CPU's, within what the
// order of a sum and the rounding of columns change, and a column's bits do not depend on how many others there are.

#include "dflash-mul-mat-definition.h"

#include <numeric>

struct FusedCase {
    enum Pattern { ADD_NORM, NORM, SWIGLU, GATED, NORMED_HEADS, GATES, HEADS, STORE } pattern;
    BlockLayout layout;
    int64_t K, M;
};

// The graph of a pattern on one backend, for n columns; the first columns are the same whatever n is.
class FusedGraph {
  public:
    FusedGraph(Backend & on, const FusedCase & c, int64_t n, const std::vector<uint8_t> & weights) : on_(on), c_(c) {
        ctx_ = ggml_init({ggml_tensor_overhead() * 64 + ggml_graph_overhead(), nullptr, true});
        graph_ = ggml_new_graph(ctx_);
        build(n);
        buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(ctx_, ggml_backend_get_default_buffer_type(on.handle));
        for (const auto & input : inputs_) {
            ggml_backend_tensor_set(input.first, input.second.data(), 0, ggml_nbytes(input.first));
        }
        if (rows_ != nullptr) {
            Ints own(ggml_nelements(rows_));
            std::iota(own.begin(), own.end(), 0);
            ggml_backend_tensor_set(rows_, own.data(), 0, ggml_nbytes(rows_));
        }
        for (ggml_tensor * w : weights_) {
            ggml_backend_tensor_set(w, weights.data(), 0, ggml_nbytes(w));
        }
    }

    FusedGraph(const FusedGraph &) = delete;

    ~FusedGraph() {
        ggml_backend_buffer_free(buffer_);
        ggml_free(ctx_);
    }

    // Results, one behind the other.
    std::vector<Floats> run() {
        for (ggml_tensor * y : outputs_) {
            ggml_backend_tensor_memset(y, 0xFF, 0, ggml_nbytes(y));
        }
        if (ggml_backend_graph_compute(on_.handle, graph_) != GGML_STATUS_SUCCESS) {
            die("graph compute failed");
        }
        std::vector<Floats> results;
        for (ggml_tensor * y : outputs_) {
            std::vector<uint8_t> bytes(ggml_nbytes(y));
            ggml_backend_tensor_get(y, bytes.data(), 0, bytes.size());
            results.emplace_back(ggml_nelements(y));
            if (y->type == GGML_TYPE_F32) {
                std::memcpy(results.back().data(), bytes.data(), bytes.size());
            } else {
                ggml_get_type_traits(y->type)->to_float(bytes.data(), results.back().data(), ggml_nelements(y));
            }
        }
        return results;
    }

  private:
    Backend & on_;
    const FusedCase & c_;
    ggml_context * ctx_;
    ggml_cgraph * graph_;
    ggml_backend_buffer_t buffer_;
    std::vector<std::pair<ggml_tensor *, Floats>> inputs_;
    std::vector<ggml_tensor *> weights_, outputs_;
    ggml_tensor * rows_ = nullptr;

    ggml_tensor * input(int64_t ne0, int64_t ne1) {
        std::mt19937 engine((uint32_t) inputs_.size() + 1);
        std::normal_distribution<float> distribution;
        Floats values(ne0 * ne1);
        std::generate(values.begin(), values.end(), [&] { return distribution(engine); });
        inputs_.emplace_back(ggml_new_tensor_2d(ctx_, GGML_TYPE_F32, ne0, ne1), std::move(values));
        return inputs_.back().first;
    }

    ggml_tensor * output(ggml_tensor * y) {
        ggml_build_forward_expand(graph_, y);
        outputs_.push_back(y);
        return y;
    }

    ggml_tensor * product(ggml_tensor * x) {
        weights_.push_back(ggml_new_tensor_2d(ctx_, c_.layout.type, c_.K, c_.M));
        return output(ggml_dflash_mul_mat(ctx_, weights_.back(), x));
    }

    ggml_tensor * norm(ggml_tensor * x, ggml_tensor * weight) {
        return ggml_mul(ctx_, ggml_rms_norm(ctx_, x, 1e-6f), weight);
    }

    // columns of a matrix with 1.5 times as many rows
    ggml_tensor * window(int64_t rows, int64_t n) {
        ggml_tensor * all = input(rows * 3 / 2, n);
        return ggml_view_2d(ctx_, all, rows, n, all->nb[1], 0);
    }

    void build(int64_t n) {
        const int64_t K = c_.K, d = 128;
        switch (c_.pattern) {
        case FusedCase::ADD_NORM: {
            ggml_tensor * sum = output(ggml_add(ctx_, input(K, n), input(K, n)));
            ggml_tensor * h = norm(sum, input(K, 1));
            product(h);
            product(h);
            break;
        }
        case FusedCase::NORM:
            product(norm(input(K, n), input(K, 1)));
            break;
        case FusedCase::SWIGLU: {
            ggml_tensor * gate = window(K, n);
            product(ggml_swiglu_split(ctx_, gate, window(K, n)));
            break;
        }
        case FusedCase::GATED: {
            ggml_tensor * x = input(K, n);
            product(ggml_mul(ctx_, x, ggml_sigmoid(ctx_, input(K, n))));
            break;
        }
        case FusedCase::NORMED_HEADS: {
            ggml_tensor * heads = ggml_reshape_3d(ctx_, input(K, n), d, K / d, n);
            ggml_tensor * z = window(K, n);
            product(ggml_swiglu_split(ctx_, z, ggml_reshape_2d(ctx_, norm(heads, input(d, 1)), K, n)));
            break;
        }
        case FusedCase::GATES: {
            ggml_tensor * both = input(2 * c_.M, n);
            ggml_tensor * alpha = ggml_view_2d(ctx_, both, c_.M, n, both->nb[1], 0);
            ggml_tensor * plus = ggml_softplus(ctx_, ggml_add(ctx_, alpha, input(c_.M, 1)));
            output(ggml_mul(ctx_, plus, input(c_.M, 1)));
            output(ggml_sigmoid(ctx_, both));
            break;
        }
        case FusedCase::HEADS: {
            ggml_tensor * all = input(K * 3 / 2, n);
            ggml_tensor * heads = ggml_view_3d(ctx_, all, d, K / d, n, d * sizeof(float), all->nb[1], 0);
            output(norm(heads, input(d, 1)));
            break;
        }
        case FusedCase::STORE: { // a row to itself
            rows_ = ggml_new_tensor_1d(ctx_, GGML_TYPE_I32, n);
            ggml_tensor * to = ggml_new_tensor_2d(ctx_, GGML_TYPE_Q8_0, K, n);
            output(ggml_set_rows(ctx_, to, window(K, n), rows_));
            break;
        }
        }
    }
};

inline void fused_against_cpu(const FusedCase & c, const std::vector<uint8_t> & weights) {
    constexpr int64_t MOST = 70; // more than meet the weights at a time
    const std::vector<Floats> all = FusedGraph(backend(), c, MOST, weights).run();
    const std::vector<Floats> wanted = FusedGraph(cpu_backend(), c, MOST, weights).run();
    for (size_t i = 0; i < all.size(); i++) {
        double error = 0, square = 0;
        for (size_t j = 0; j < all[i].size(); j++) {
            const double e = (double) all[i][j] - wanted[i][j];
            error += e * e, square += (double) wanted[i][j] * wanted[i][j];
        }
        counter().expect(error < 4e-6 * square, "pattern %d, result %d: normalised mean square error %g",
                         (int) c.pattern, (int) i, error / square);
    }
    for (int64_t n : {1, 3, 8, 9, 24, 40, 64}) {
        const std::vector<Floats> fewer = FusedGraph(backend(), c, n, weights).run();
        for (size_t i = 0; i < all.size(); i++) {
            counter().expect(same_bits(fewer[i].data(), all[i].data(), fewer[i].size()),
                             "pattern %d, result %d: %d columns differ from the same among %d", (int) c.pattern,
                             (int) i, (int) n, (int) MOST);
        }
    }
}

inline void fused_cases() {
    for (const BlockLayout & layout : BLOCK_LAYOUTS) {
        for (int pattern = FusedCase::ADD_NORM; pattern <= FusedCase::STORE; pattern++) {
            for (int64_t K : {256, 1536}) {
                const FusedCase c = {(FusedCase::Pattern) pattern, layout, K, 200};
                fused_against_cpu(c, quantised(layout.type, c.K, c.M));
            }
        }
    }
}
