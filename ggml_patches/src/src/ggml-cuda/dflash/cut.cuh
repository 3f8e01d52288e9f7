#pragma once

// Where the leading part of a row in falling order ends. A block finds the end's place 8 bits at a time: it sums the
// weights of the ids per value of the next 8 bits, and the first value at which the sum reaches what is needed is it.
// Weights are whole numbers, so the sums are exact in any order. An end is the place of the last id that is in.

#include "row.cuh"

namespace dflash {

constexpr int DIGIT = 8, BINS = 1 << DIGIT;
constexpr int COPIES = 16; // of the bins: the threads of a warp mostly meet in the same few

struct Search { // shared memory
    uint32_t low[BINS * COPIES], high[BINS * COPIES];
    uint64_t sums[BINS];
    uint64_t need, here; // still needed from the bin that was found; what is in it
    int bin;
};

// floor(exp(d) * 2^32) for d <= 0, by the recipe in ggml_patches/README.md
__device__ __forceinline__ uint64_t fixed_weight(float d) {
    if (!(d > -23.0f)) {
        return 0;
    }
    const float n = rintf(d * 1.4426950408889634f);
    const float r = (d - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = (float) (1.0 / 720) + r * (float) (1.0 / 5040);
    p = (float) (1.0 / 120) + r * p;
    p = (float) (1.0 / 24) + r * p;
    p = (float) (1.0 / 6) + r * p;
    p = 0.5f + r * p;
    p = 1.0f + r * p;
    p = 1.0f + r * p;
    return (uint64_t) (p * __int_as_float(((int) n + 32 + 127) << 23)); // the bits of 2^(n + 32)
}

// What top-p needs of a total weight.
__device__ __forceinline__ uint64_t needed_of(uint64_t total, double top_p) {
    const double need = ceil(top_p * (double) total);
    return need > 1.0 ? (uint64_t) need : 1;
}

__device__ __forceinline__ void add_weight(Search & search, int bin, uint64_t weight) {
    const int at = bin * COPIES + threadIdx.x % COPIES;
    const uint32_t low = (uint32_t) weight;
    const uint32_t before = atomicAdd(&search.low[at], low);
    const uint32_t high = (uint32_t) (weight >> 32) + (before + low < before);
    if (high != 0) {
        atomicAdd(&search.high[at], high);
    }
}

__device__ __forceinline__ void clear_bins(Search & search) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS * COPIES; i += ROW_THREADS) {
        search.low[i] = search.high[i] = 0;
    }
    __syncthreads();
}

// Finds the bin at which the sum reaches need_of(sum of all); need_of is called by the first 32 threads.
template <typename NeedOf> __device__ __forceinline__ void find_bin(Search & search, NeedOf need_of) {
    __syncthreads();
    if (threadIdx.x < BINS) {
        uint64_t sum = 0;
        for (int i = 0; i < COPIES; i++) {
            const int at = threadIdx.x * COPIES + (i + threadIdx.x) % COPIES;
            sum += ((uint64_t) search.high[at] << 32) + search.low[at];
        }
        search.sums[threadIdx.x] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        constexpr int MINE = BINS / 32;
        const uint64_t * mine = search.sums + threadIdx.x * MINE;
        unsigned long long upto = 0; // the sum of bins 0 .. last of mine
        for (int i = 0; i < MINE; i++) {
            upto += mine[i];
        }
        uint64_t before = upto;
        for (int step = 1; step < 32; step *= 2) {
            const unsigned long long lower = __shfl_up_sync(0xffffffff, upto, step, 32);
            upto += (int) threadIdx.x >= step ? lower : 0;
        }
        before = upto - before;
        const uint64_t need = need_of(__shfl_sync(0xffffffff, upto, 31, 32));
        if (before < need && need <= upto) {
            int i = 0;
            while (before + mine[i] < need) {
                before += mine[i++];
            }
            search.bin = threadIdx.x * MINE + i;
            search.need = need - before;
            search.here = mine[i];
        }
    }
    __syncthreads();
}

// The end of the shortest leading part that weighs at least need_of(weight of all), which is 1 .. weight of all.
// each(last, add) calls add(place, weight) for all ids whose rank is at most `last` (others do no harm); unit_of(rank)
// is what an id of that rank weighs.
template <typename Each, typename NeedOf, typename UnitOf>
__device__ __forceinline__ uint64_t find_end(Search & search, Each each, NeedOf need_of, UnitOf unit_of) {
    uint64_t prefix = 0, need = 0; // the bits of the end that are known
#pragma unroll 1
    for (int shift = 32 + ID_BITS - DIGIT;; shift -= DIGIT) {
        clear_bins(search);
        const uint64_t end = ((prefix + 1) << (shift + DIGIT)) - 1;
        each((uint32_t) (end >> ID_BITS), [&](uint64_t place, uint64_t weight) {
            if (weight != 0 && place >> (shift + DIGIT) == prefix) {
                add_weight(search, (int) (place >> shift) & (BINS - 1), weight);
            }
        });
        const bool first = need == 0;
        find_bin(search, [&](uint64_t total) { return first ? need_of(total) : need; });
        prefix = prefix << DIGIT | (uint32_t) search.bin;
        need = search.need;
        if (shift == ID_BITS) { // all in the bin weigh the same: round up to whole ids
            const uint64_t unit = unit_of((uint32_t) prefix);
            need = (need + unit - 1) / unit * unit;
        }
        // A bin of one rank that is needed as a whole ends it. A bin of more might end with ids that weigh nothing.
        if (shift == 0 || (shift <= ID_BITS && need == search.here)) {
            return ((prefix + 1) << shift) - 1;
        }
    }
}

} // namespace dflash
