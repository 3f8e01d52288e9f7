#pragma once

// What the cases about tokens (select, sample, accept, place, penalise) share: reading them, and the rules of drawing
// from ggml_patches/README.md one step at a time. A double operation on floats, rounded to float, is the float
// operation, so no compiler flag changes the numbers here.

#include "dflash-harness.h"

#include <numeric>

inline bool all_dead(const int32_t * tokens, size_t n) {
    return std::all_of(tokens, tokens + n, [](int32_t token) { return token == -1; });
}

inline bool all_zero(const int32_t * tokens, size_t n) {
    return std::all_of(tokens, tokens + n, [](int32_t token) { return token == 0; });
}

// How a lane draws: a column of the sampling tensor.
struct Drawing {
    uint64_t seed = 0;
    float temperature = 0;
    int32_t top_k = 0;
    double top_p = 1;
    float log_min_p = -INFINITY;

    void append_to(Ints & columns) const {
        int32_t column[GGML_DFLASH_SAMPLING_WORDS] = {};
        std::memcpy(&column[GGML_DFLASH_SAMPLING_SEED_LOW], &seed, 8); // both machines count from the low word
        std::memcpy(&column[GGML_DFLASH_SAMPLING_TEMPERATURE], &temperature, 4);
        column[GGML_DFLASH_SAMPLING_TOP_K] = top_k;
        std::memcpy(&column[GGML_DFLASH_SAMPLING_TOP_P_LOW], &top_p, 8);
        std::memcpy(&column[GGML_DFLASH_SAMPLING_LOG_MIN_P], &log_min_p, 4);
        columns.insert(columns.end(), column, column + GGML_DFLASH_SAMPLING_WORDS);
    }
};

inline Ints sampling_columns(const std::vector<Drawing> & lanes) {
    Ints columns;
    for (const Drawing & lane : lanes) {
        lane.append_to(columns);
    }
    return columns;
}

inline float rounded(double x) {
    return (float) x;
}

inline uint64_t mixed(uint64_t z) {
    z ^= z >> 30;
    z *= 0xBF58476D1CE4E5B9u;
    z ^= z >> 27;
    z *= 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

// log(y); small > 0 says that y is 1 - small
inline float slow_log(float y, float small = 0) {
    int32_t bits;
    std::memcpy(&bits, &y, 4);
    const int32_t k = (int32_t) std::floor((bits - 0x3F3504F3) / 8388608.0);
    float f = rounded(std::ldexp((double) y, -k) - 1.0);
    if (small > 0 && k == 0) {
        f = -small;
    }
    const float s = rounded(f / (double) rounded(2.0 + f)), z = rounded((double) s * s);
    float p = rounded(1.0 / 9);
    for (int n : {7, 5, 3}) {
        p = rounded((double) rounded(1.0 / n) + rounded((double) z * p));
    }
    const float t = rounded((double) s + s), zp = rounded((double) z * p);
    const float tail = rounded((double) t + rounded((double) t * zp));
    return rounded((double) rounded(k * (double) rounded(std::log(2.0))) + tail);
}

inline float slow_noise(uint64_t seed, int64_t position, int64_t token) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    const uint64_t key = mixed(mixed(seed) + golden * ((uint64_t) position + 1));
    const uint64_t fraction = mixed(key + golden * ((uint64_t) token + 1)) >> 32;
    const float v = std::min(rounded(std::ldexp((double) rounded(2.0 * fraction + 1), -33)), 1 - 0x1p-24f);
    return -slow_log(-slow_log(rounded(1.0 - v), v));
}

inline uint64_t slow_weight(float d) {
    if (!(d > -23)) {
        return 0;
    }
    const float n = (float) std::nearbyint((double) rounded((double) d * rounded(1.4426950408889634)));
    const float high = rounded((double) d - rounded((double) n * 0.693359375f));
    const float rest = rounded((double) high + rounded((double) n * 2.12194440e-4f));
    float p = rounded(1.0 / 5040);
    for (double c : {1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0}) {
        p = rounded((double) rounded(c) + rounded((double) rest * p));
    }
    return (uint64_t) std::floor(std::ldexp((double) p, (int) n + 32));
}

// Ids by falling value, equal ones by rising id.
inline Ints falling_order(const Floats & values, Ints ids) {
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return values[a] > values[b]; });
    return ids;
}

inline Ints rising_ids(size_t n) {
    Ints ids(n);
    std::iota(ids.begin(), ids.end(), 0);
    return ids;
}

// What top-k, top-p and min-p leave of a row whose largest logit is finite; ids rise.
inline Ints slow_kept(const Floats & row, const Drawing & how) {
    const float best = *std::max_element(row.begin(), row.end());
    Ints ids = rising_ids(row.size());
    if (how.top_k > 0 && how.top_k < (int64_t) row.size()) {
        ids = falling_order(row, ids);
        ids.resize(how.top_k);
        std::sort(ids.begin(), ids.end());
    }
    if (how.top_p < 1) {
        Floats away(row.size());
        uint64_t total = 0, held = 0;
        for (int32_t id : ids) {
            away[id] = rounded((double) row[id] - best);
            total += slow_weight(away[id]);
        }
        const double need = std::max(1.0, std::ceil(how.top_p * (double) total));
        ids = falling_order(away, ids);
        size_t n = 0;
        while (held < need) {
            held += slow_weight(away[ids[n++]]);
        }
        ids.resize(n);
        std::sort(ids.begin(), ids.end());
    }
    if (how.log_min_p > -INFINITY) {
        const float least = rounded((double) best + how.log_min_p);
        ids.erase(std::remove_if(ids.begin(), ids.end(), [&](int32_t id) { return row[id] < least; }), ids.end());
    }
    return ids;
}

inline float scaled_with_noise(float score, const Drawing & how, int64_t position, int64_t token) {
    const float scaled = rounded((double) score / how.temperature);
    return rounded((double) scaled + slow_noise(how.seed, position, token));
}

// The token at a position, -1 for a row that has none.
inline int32_t slow_draw(const Floats & row, const Drawing & how, int64_t position) {
    float best = -INFINITY;
    for (float x : row) {
        if (std::isnan(x)) {
            return -1;
        }
        best = std::max(best, x);
    }
    if (!std::isfinite(best)) {
        return -1;
    }
    if (!(how.temperature > 0)) {
        return (int32_t) (std::find(row.begin(), row.end(), best) - row.begin());
    }
    const Ints ids = slow_kept(row, how);
    int32_t token = ids[0];
    float most = scaled_with_noise(row[token], how, position, token);
    for (int32_t id : ids) {
        const float value = scaled_with_noise(row[id], how, position, id);
        if (value > most) {
            most = value;
            token = id;
        }
    }
    return token;
}

// The published bits of the noise: a reference that is off is told apart.
inline void check_noise_reference() {
    const struct {
        uint64_t seed;
        int64_t position, token;
        uint32_t bits;
    } table[] = {
        {0, 0, 0, 0xBD627313u},
        {1, 0, 0, 0x3F657B0Eu},
        {0, 1, 0, 0x3F908A28u},
        {0, 0, 1, 0xBE4184F9u},
        {UINT64_MAX, (int64_t) 1 << 31, 248319, 0x3F1671A6u},
    };
    for (const auto & row : table) {
        const float noise = slow_noise(row.seed, row.position, row.token);
        uint32_t bits;
        std::memcpy(&bits, &noise, 4);
        counter().expect(bits == row.bits, "noise of the reference is %08x, not %08x", bits, row.bits);
    }
}
