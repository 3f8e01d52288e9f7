// The target's token of every row: the largest logit, or the largest logit / T + noise of the tokens that the lane's
// filters leave. A row is one thread's.

#include "dflash/kernels.h"
#include "dflash/noise.h"
#include "dflash/row.h"
#include "dflash/weights.h"

namespace dflash {
namespace {

// What top-k, top-p and min-p leave of a row. All look at the logits before the temperature.
class Filter {
  public:
    Filter(const float * logits, int64_t n, float largest, const Sampling & sampling)
        : logits_(logits), largest_(largest), least_(largest + sampling.log_min_p) {
        if (sampling.top_k > 0 && sampling.top_k < n) {
            top_k_ = find_cut(n, sampling.top_k, [&](int64_t id, uint32_t & rank) {
                rank = rank_of(logits[id]);
                return (uint64_t) 1;
            });
            has_top_k_ = true;
        }
        if (sampling.top_p < 1.0) {
            const auto weigh = [&](int64_t id, uint32_t & rank) { return weight_of(id, rank); };
            uint64_t total = 0;
            uint32_t rank;
            for (int64_t id = 0; id < n; id++) {
                total += weigh(id, rank);
            }
            const double need = std::ceil(sampling.top_p * (double) total);
            top_p_ = find_cut(n, need > 1.0 ? (uint64_t) need : 1, weigh);
            has_top_p_ = true;
        }
    }

    bool keeps(int64_t id) const {
        return in_top_k(id) && (!has_top_p_ || top_p_.keeps(rank_of(logits_[id] - largest_), id)) &&
               !(logits_[id] < least_); // off when min-p is NaN
    }

  private:
    bool in_top_k(int64_t id) const { return !has_top_k_ || top_k_.keeps(rank_of(logits_[id]), id); }

    // in top-p, where ids are ordered by their rounded distance from the largest
    uint64_t weight_of(int64_t id, uint32_t & rank) const {
        const float distance = logits_[id] - largest_;
        const uint64_t weight = distance > -23.0f && in_top_k(id) ? fixed_weight(distance) : 0;
        rank = rank_of(distance);
        return weight;
    }

    const float * logits_;
    float largest_, least_;
    bool has_top_k_ = false, has_top_p_ = false;
    Cut top_k_, top_p_;
};

// The token at `position`, or -1 if the row is bad.
int32_t draw(const float * logits, int64_t n, const Sampling & sampling, int64_t position) {
    const Largest largest(logits, n);
    if (largest.has_nan || !std::isfinite(largest.value)) {
        return -1;
    }
    if (sampling.is_greedy()) {
        return (int32_t) largest.id;
    }
    const Filter filter(logits, n, largest.value, sampling);
    const Noise noise(sampling.seed, position);

    // The largest logit is always kept. Against it most others need no noise: not even the most of it would do.
    int64_t token = largest.id;
    float best = largest.value / sampling.temperature + noise(token);
    for (int64_t id = 0; id < n; id++) {
        const float scaled = logits[id] / sampling.temperature;
        if (scaled + Noise::MOST < best || !filter.keeps(id)) {
            continue;
        }
        const float value = scaled + noise(id);
        if (value > best || (value == best && id < token)) {
            best = value;
            token = id;
        }
    }
    return (int32_t) token;
}

} // namespace

void sample(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor *logits = dst->src[0], *columns = dst->src[3];
    const int32_t *base = (const int32_t *) dst->src[1]->data, *n_rows = (const int32_t *) dst->src[2]->data;
    const int64_t V = logits->ne[0], T = logits->ne[1], L = logits->ne[2];
    const Share share(T * L, params);
    for (int64_t i = share.begin; i < share.end; i++) {
        const int64_t lane = i / T, t = i % T;
        const bool live = base[lane] >= 0 && n_rows[lane] <= T && t < n_rows[lane];
        const Sampling sampling(at<int32_t>(columns, lane));
        ((int32_t *) dst->data)[i] =
            live ? draw(at<float>(logits, t, lane), V, sampling, (int64_t) base[lane] + t + 1) : -1;
    }
}

} // namespace dflash
