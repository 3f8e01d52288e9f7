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
    __device__ bool has_top_k(int n) const { return (top_k > 0) & (top_k < n); }
    __device__ bool has_top_p() const { return top_p < 1.0; }
    __device__ bool has_min_p() const { return log_min_p > -INFINITY; }

    // Whether a row of n logits has to be filtered before it is drawn from. No && or ||, so that the column's words are
    // read together (an int says that it is meant).
    __device__ bool is_filtered(int n) const {
        return (temperature > 0.0f) & ((int) has_top_k(n) | has_top_p() | has_min_p());
    }
};

// logit / T + G(seed, position, id) of the tokens for one position.
class Scores {
  public:
    __device__ Scores(const Sampling & sampling, int64_t position)
        : key_(noise_key(sampling.seed, position)), temperature_(sampling.temperature) {
        const bool is_usual = temperature_ >= 1e-30f && temperature_ <= 1e30f;
        inverse_ = is_usual ? 1.0f / temperature_ : 0.0f;
        most_noise_ = is_usual ? 110.2104f : INFINITY; // (127 + 32) ln 2
    }

    __device__ float operator()(float logit, int id) const { return logit / temperature_ + gumbel(key_, id); }

    // For at_most: key_from(first), id is the same as key_from(first + n), id - n.
    __device__ uint64_t key_from(int first) const { return key_ + GOLDEN * (uint64_t) (int64_t) first; }

    // What a score is at most, but for the roundings that may_reach allows for. Costs a fraction of the score: G is at
    // most -log v, v at least bits / 2^32, and a float's own bits over 2^23 are its log2 + 127, or up to 0.09 less. The
    // last step of mix is left out: it changes bits by 1, and only if they are 2^31 or more. +infinity or NaN where the
    // temperature makes a bound hard to find; there NaN only for a logit of -infinity.
    __device__ float at_most(float logit, uint64_t key, int id) const {
        const uint32_t bits = (uint32_t) (nearly_mix(key + GOLDEN * (uint64_t) ((int64_t) id + 1)) >> 32);
        const float log2 = (float) __float_as_int((float) bits); // times 2^23
        return fmaf(log2, -0.6931472f / (1 << 23), fmaf(logit, inverse_, most_noise_));
    }

    // False only if a score that is at most `most` is less than `bound` for certain. A quotient that matters is at most
    // 23 below the bound, or above it, so its roundings are small against the bound.
    static __device__ bool may_reach(float most, float bound) {
        return !(most < bound - (fabsf(bound) * 0x1p-19f + 0.001f));
    }

  private:
    uint64_t key_;
    float temperature_, inverse_, most_noise_;
};

} // namespace dflash
