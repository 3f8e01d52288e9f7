#pragma once

// Where the leading part of a row ends that weighs enough: top-k (every id weighs 1) and top-p. One work-group a row.

#include "kernels.hpp"
#include "numbers.hpp"

namespace dflash {

struct Weighed {
    uint64_t weight;
    uint64_t key;
};

// floor(exp(d) * 2^32) for d <= 0, by the recipe in ggml_patches/README.md
inline uint64_t fixed_weight(float d) {
    if (!(d > -23.0f)) {
        return 0;
    }
    const float n = sycl::rint(d * (float) 1.4426950408889634);
    const float r = (d - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = (float) (1.0 / 720) + r * (float) (1.0 / 5040);
    p = (float) (1.0 / 120) + r * p;
    p = (float) (1.0 / 24) + r * p;
    p = (float) (1.0 / 6) + r * p;
    p = 0.5f + r * p;
    p = 1.0f + r * p;
    p = 1.0f + r * p;
    return (uint64_t) (p * float_of((uint32_t) ((int32_t) n + 32 + 127) << 23)); // times 2^(n + 32)
}

// Whether the F64 with these bits is below 1; NaN is not.
inline bool is_below_one(uint64_t bits) {
    constexpr uint64_t ONE = 0x3FF0000000000000u, INFINITE = 0x7FF0000000000000u, SIGN = 0x8000000000000000u;
    return bits & SIGN ? bits - SIGN <= INFINITE : bits < ONE;
}

// max(1, ceil(p * total)), where p is the F64 below 1 with these bits, total at most 2^52 and the product is rounded to
// F64: in whole numbers, since the device may have no F64.
inline uint64_t part_of(uint64_t p_bits, uint64_t total) {
    const uint64_t exponent = p_bits >> 52 & 0x7FF, fraction = p_bits & 0xFFFFFFFFFFFFFu;
    if (p_bits >> 63 || exponent == 0) { // nothing, or next to nothing
        return 1;
    }
    const uint64_t mantissa = fraction | 1ull << 52;
    const uint64_t high = sycl::mul_hi(mantissa, total), low = mantissa * total;
    int shift = 1075 - (int) exponent; // p * total = product / 2^shift, shift >= 53, product < 2^105

    // round the product to 53 bits, half to even
    const int n_bits = high ? 128 - (int) sycl::clz(high) : 64 - (int) sycl::clz(low);
    uint64_t rounded = low;
    if (n_bits > 53) {
        const int drop = n_bits - 53; // at most 52
        const uint64_t rest = low & ((1ull << drop) - 1), half = 1ull << (drop - 1);
        rounded = high << (64 - drop) | low >> drop;
        rounded += rest > half || (rest == half && (rounded & 1)) ? 1 : 0;
        shift -= drop;
    }
    const uint64_t need = shift > 62 ? 1 : (rounded + ((1ull << shift) - 1)) >> shift;
    return need > 0 ? need : 1;
}

template <typename Weigh> uint64_t sum_weights(Item item, int n, const Weigh & weigh) {
    uint64_t sum = 0;
    for (int id = (int) item.get_local_id(2); id < n; id += GROUP_SIZE) {
        sum += weigh(id).weight;
    }
    return sycl::reduce_over_group(item.get_group(), sum, sycl::plus<uint64_t>());
}

// Sums of weights by a digit of the key, each in two words, for devices without 64-bit atomics. In COPIES, so that
// fewer work-items wait for each other.
class CutMemory {
  public:
    static constexpr int DIGITS = GROUP_SIZE, COPIES = 8, SIZE = DIGITS * COPIES;

    explicit CutMemory(sycl::handler & handler) : low_(SIZE, handler), high_(SIZE, handler), found_(2, handler) {}

    void clear(int local) const {
        for (int i = local; i < SIZE; i += GROUP_SIZE) {
            low_[i] = 0, high_[i] = 0;
        }
    }

    void add(int local, int digit, uint64_t weight) const {
        const int i = local % COPIES * DIGITS + digit;
        const uint32_t low = (uint32_t) weight;
        const uint32_t before = atomic(low_[i]).fetch_add(low);
        const uint32_t carry = before + low < low ? 1 : 0;
        const uint32_t high = (uint32_t) (weight >> 32) + carry;
        if (high != 0) {
            atomic(high_[i]).fetch_add(high);
        }
    }

    uint64_t sum(int digit) const {
        uint64_t sum = 0;
        for (int i = digit; i < SIZE; i += DIGITS) {
            sum += (uint64_t) high_[i] << 32 | low_[i];
        }
        return sum;
    }

    uint64_t & digit() const { return found_[0]; }
    uint64_t & before() const { return found_[1]; } // sum of the smaller digits

  private:
    using Atomic = sycl::atomic_ref<uint32_t, sycl::memory_order::relaxed, sycl::memory_scope::work_group,
                                    sycl::access::address_space::local_space>;
    static Atomic atomic(uint32_t & word) { return Atomic(word); }

    Local<uint32_t> low_, high_;
    Local<uint64_t> found_;
};

// The key at which the row, taken by rising key, first weighs `need` (1..total weight). weigh(id) gives the weight of
// an id and its key. A digit of the key is found per reading of the row.
template <typename Weigh>
uint64_t find_cut(Item item, const CutMemory & memory, int n, uint64_t need, const Weigh & weigh) {
    constexpr int DIGIT_BITS = 8;
    static_assert(CutMemory::DIGITS == 1 << DIGIT_BITS, "a work-item looks at one digit");
    const auto group = item.get_group();
    const int local = (int) item.get_local_id(2);
    uint64_t prefix = 0; // the digits found
    for (int shift = KEY_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        memory.clear(local);
        sycl::group_barrier(group);
        for (int id = local; id < n; id += GROUP_SIZE) {
            const Weighed x = weigh(id);
            if (x.weight != 0 && x.key >> (shift + DIGIT_BITS) == prefix) {
                memory.add(local, (int) (x.key >> shift & (CutMemory::DIGITS - 1)), x.weight);
            }
        }
        sycl::group_barrier(group);
        const uint64_t own = memory.sum(local);
        const uint64_t before = sycl::exclusive_scan_over_group(group, own, sycl::plus<uint64_t>());
        if (before < need && need <= before + own) {
            memory.digit() = (uint64_t) local;
            memory.before() = before;
        }
        sycl::group_barrier(group);
        prefix = prefix << DIGIT_BITS | memory.digit();
        need -= memory.before();
        sycl::group_barrier(group);
    }
    return prefix;
}

} // namespace dflash
