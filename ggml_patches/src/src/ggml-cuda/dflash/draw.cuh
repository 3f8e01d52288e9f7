#pragma once

// How a lane draws its tokens: its column of the sampling tensor, and the scores of a draw.

#include "kernels.cuh"
#include "numbers.cuh"

namespace dflash {

struct Sampling {
    uint64_t seed;
    double top_p;
    float temperature, log_min_p;
    int top_k;

    __device__ Sampling(const int32_t * columns, int lane) {
        const int32_t * column = columns + lane * GGML_DFLASH_SAMPLING_WORDS;
        const auto words = [&](int low, int high) {
            return (uint64_t) (uint32_t) column[high] << 32 | (uint32_t) column[low];
        };
        seed = words(GGML_DFLASH_SAMPLING_SEED_LOW, GGML_DFLASH_SAMPLING_SEED_HIGH);
        top_p =
            __longlong_as_double((long long) words(GGML_DFLASH_SAMPLING_TOP_P_LOW, GGML_DFLASH_SAMPLING_TOP_P_HIGH));
        temperature = __int_as_float(column[GGML_DFLASH_SAMPLING_TEMPERATURE]);
        log_min_p = __int_as_float(column[GGML_DFLASH_SAMPLING_LOG_MIN_P]);
        top_k = column[GGML_DFLASH_SAMPLING_TOP_K];
    }

    __device__ bool is_greedy() const { return !(temperature > 0.0f); }
    __device__ bool has_top_k(int n) const { return top_k > 0 && top_k < n; }
    __device__ bool has_top_p() const { return top_p < 1.0; }
    __device__ bool has_min_p() const { return log_min_p > -INFINITY; }

    // Whether a row of n logits has to be filtered before it is drawn from.
    __device__ bool is_filtered(int n) const { return !is_greedy() && (has_top_k(n) || has_top_p() || has_min_p()); }
};

// logit / T + G(seed, position, id) of the tokens for one position.
class Scores {
  public:
    __device__ Scores(const Sampling & sampling, int64_t position)
        : key_(noise_key(sampling.seed, position)), temperature_(sampling.temperature),
          inverse_(1.0f / sampling.temperature) {}

    __device__ float operator()(float logit, int id) const { return logit / temperature_ + gumbel(key_, id); }

    // False only if the score is less than `bound` for certain; costs a fraction of the score. G is at most -log v,
    // and n leading zeros in v's 32 bits mean v >= 2^-(n+1). The quotient is bounded by a product with room for the
    // roundings of both; where that gives infinity or NaN the answer is true. A sum rounds monotonically, so bounds of
    // its terms bound it.
    __device__ bool may_reach(float logit, int id, float bound) const {
        const uint32_t bits = (uint32_t) (mix(key_ + GOLDEN * (uint64_t) ((int64_t) id + 1)) >> 32);
        const float most_noise = (float) (__clz((int) bits) + 1) * 0.6932f + 0.001f;
        const float product = logit * inverse_;
        return !(fmaf(fabsf(product), 0x1p-20f, product) + most_noise < bound);
    }

  private:
    uint64_t key_;
    float temperature_, inverse_;
};

} // namespace dflash
