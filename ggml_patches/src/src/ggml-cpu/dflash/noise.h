#pragma once

// How a lane draws its tokens: its column of the sampling tensor, and the noise. Every step is one IEEE operation that
// is written out, so the bits are those of every other backend and of the host's draw (ggml_patches/README.md).

#include "ggml-dflash.h"

#include <cstdint>
#include <cstring>

namespace dflash {

struct Sampling {
    uint64_t seed;
    float temperature, log_min_p;
    int32_t top_k;
    double top_p;

    // column: GGML_DFLASH_SAMPLING_WORDS numbers
    explicit Sampling(const int32_t * column) {
        const auto words = [&](int low, int high) {
            return (uint64_t) (uint32_t) column[high] << 32 | (uint32_t) column[low];
        };
        const uint64_t top_p_bits = words(GGML_DFLASH_SAMPLING_TOP_P_LOW, GGML_DFLASH_SAMPLING_TOP_P_HIGH);
        seed = words(GGML_DFLASH_SAMPLING_SEED_LOW, GGML_DFLASH_SAMPLING_SEED_HIGH);
        std::memcpy(&temperature, &column[GGML_DFLASH_SAMPLING_TEMPERATURE], sizeof(temperature));
        std::memcpy(&log_min_p, &column[GGML_DFLASH_SAMPLING_LOG_MIN_P], sizeof(log_min_p));
        std::memcpy(&top_p, &top_p_bits, sizeof(top_p));
        top_k = column[GGML_DFLASH_SAMPLING_TOP_K];
    }

    bool is_greedy() const { return !(temperature > 0.0f); }
};

constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

inline uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

// log(1 + f) for sqrt(1/2) <= 1 + f < sqrt(2)
inline float log_tail(float f) {
    const float s = f / (2.0f + f), z = s * s;
    float p = (float) (1.0 / 7) + z * (float) (1.0 / 9);
    p = (float) (1.0 / 5) + z * p;
    p = (float) (1.0 / 3) + z * p;
    const float t = s + s;
    return t + t * (z * p);
}

// y = 2^k (1 + f)
struct Split {
    int32_t k;
    float f;

    explicit Split(float y) {
        int32_t bits;
        std::memcpy(&bits, &y, sizeof(bits));
        k = (bits - 0x3F3504F3) >> 23;
        bits -= (int32_t) ((uint32_t) k << 23);
        std::memcpy(&y, &bits, sizeof(y));
        f = y - 1.0f;
    }
};

constexpr float LN2 = (float) 0.6931471805599453;

// -log(-log(1 - v)) of the 32-bit fraction v
inline float gumbel(uint32_t fraction) {
    float v = (float) (2 * (int64_t) fraction + 1) * 0x1p-33f;
    v = v < 1.0f - 0x1p-24f ? v : 1.0f - 0x1p-24f;
    const Split u(1.0f - v);
    const float e = -((float) u.k * LN2 + log_tail(u.k == 0 ? -v : u.f));
    const Split s(e);
    return -((float) s.k * LN2 + log_tail(s.f));
}

// G(seed, position, token) for the tokens of one row. At most MOST.
class Noise {
  public:
    static constexpr float MOST = 22.88f;

    Noise(uint64_t seed, int64_t position) : key_(mix(mix(seed) + GOLDEN * ((uint64_t) position + 1))) {}

    float operator()(int64_t token) const {
        return gumbel((uint32_t) (mix(key_ + GOLDEN * ((uint64_t) token + 1)) >> 32));
    }

  private:
    uint64_t key_;
};

} // namespace dflash
