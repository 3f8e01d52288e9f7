#pragma once

// A row of logits: its largest, and the threshold that the leading part of it in falling order ends at. Nothing is
// sorted or stored: a row is read a few times.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace dflash {

// The largest number of a row and the lowest id that has it; a row with a NaN has none.
struct Largest {
    float value = -INFINITY;
    int64_t id = 0;
    bool has_nan = false;

    Largest(const float * x, int64_t n) {
        constexpr int64_t BLOCK = 1024;
        int64_t from = 0;
        for (int64_t first = 0; first < n; first += BLOCK) {
            const int64_t size = n - first < BLOCK ? n - first : BLOCK;
            const float most = largest_of(x + first, size);
            if (most > value) {
                value = most;
                from = first;
            }
        }
        id = from;
        while (id < n - 1 && x[id] != value) {
            id++;
        }
    }

  private:
    float largest_of(const float * x, int64_t n) {
        constexpr int64_t AT_ONCE = 32; // independent maxima, which the compiler keeps in vectors
        float most[AT_ONCE];
        int32_t nan[AT_ONCE] = {};
        for (float & m : most) {
            m = -INFINITY;
        }
        int64_t i = 0;
        for (; i + AT_ONCE <= n; i += AT_ONCE) {
            for (int64_t l = 0; l < AT_ONCE; l++) {
                most[l] = x[i + l] > most[l] ? x[i + l] : most[l];
                nan[l] |= x[i + l] != x[i + l];
            }
        }
        for (int64_t l = 0; i < n; i++, l++) {
            most[l] = x[i] > most[l] ? x[i] : most[l];
            nan[l] |= x[i] != x[i];
        }
        for (int64_t l = 0; l < AT_ONCE; l++) {
            most[0] = most[l] > most[0] ? most[l] : most[0];
            has_nan |= nan[l] != 0;
        }
        return most[0];
    }
};

// A number's place in falling order: the larger x, the smaller its rank; -0 and +0 have the same.
inline uint32_t rank_of(float x) {
    x += 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits >> 31 ? bits : 0x7FFFFFFFu - bits;
}

// The end of the leading part: ids of a lower rank are in it, and those of this rank up to `last`.
struct Cut {
    uint32_t rank = UINT32_MAX;
    int64_t last = INT64_MAX;

    bool keeps(uint32_t its_rank, int64_t id) const { return its_rank < rank || (its_rank == rank && id <= last); }
};

// Shortest leading part, by rank and then by id, that weighs at least `need` (1..total weight). weigh(id, rank) gives
// the weight of an id, and its rank if that is not zero. A digit of the rank is found per reading.
template <typename Weigh> Cut find_cut(int64_t n, uint64_t need, const Weigh & weigh) {
    constexpr int DIGIT = 11, TOP = 33;
    uint64_t sums[1 << DIGIT];
    Cut cut;
    uint64_t prefix = 0; // of the rank, the digits found
    uint32_t rank = 0;
    for (int shift = TOP - DIGIT; shift >= 0; shift -= DIGIT) {
        std::memset(sums, 0, sizeof(sums));
        for (int64_t id = 0; id < n; id++) {
            const uint64_t weight = weigh(id, rank);
            if (weight != 0 && (uint64_t) rank >> (shift + DIGIT) == prefix) {
                sums[rank >> shift & ((1 << DIGIT) - 1)] += weight;
            }
        }
        uint64_t digit = 0;
        while (sums[digit] < need) {
            need -= sums[digit++];
        }
        prefix = prefix << DIGIT | digit;
    }
    cut.rank = (uint32_t) prefix;
    for (int64_t id = 0; id < n; id++) {
        const uint64_t weight = weigh(id, rank);
        if (weight == 0 || rank != cut.rank) {
            continue;
        }
        cut.last = id;
        if (weight >= need) {
            break;
        }
        need -= weight;
    }
    return cut;
}

} // namespace dflash
