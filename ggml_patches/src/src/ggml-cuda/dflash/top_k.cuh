#pragma once

// The first k ids of a row, k small, by a block. Of the numbers that the scan left, the k-th largest of a sample of
// disjoint parts is a bound that at least k ids reach; few others do, so these are listed and put in order by counting.

#include "cut.cuh"

namespace dflash {

constexpr int MAX_LISTED_K = 128;
constexpr int PARTS = 128; // of a row, each 1/128 of its groups
constexpr int MAX_LISTED_GROUPS = 512, MAX_LISTED_IDS = 1024;

struct TopK { // shared memory
    uint64_t listed[MAX_LISTED_IDS];
    uint64_t first[MAX_LISTED_K]; // the result: places in order
    uint32_t parts[PARTS];
    int groups[MAX_LISTED_GROUPS];
    int n_listed, n_groups;
    uint32_t bound;
};

// NaN counts as -infinity.
__device__ __forceinline__ uint32_t rank_of_logit(float x) {
    return rank_of(x == x ? x : -INFINITY);
}

// The k-th smallest of the least ranks in each part; UINT32_MAX if fewer parts hold groups.
__device__ __forceinline__ void find_bound(const Row & row, int k, TopK & top) {
    constexpr int TEAM = ROW_THREADS / PARTS;
    uint32_t least = UINT32_MAX;
    for (int group = threadIdx.x; group < row.n_groups; group += ROW_THREADS) {
        const uint32_t rank = rank_of(row.numbers[group]);
        least = rank < least ? rank : least;
    }
    for (int step = TEAM / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(0xffffffff, least, step, 32);
        least = other < least ? other : least;
    }
    if (threadIdx.x % TEAM == 0) {
        top.parts[threadIdx.x / TEAM] = least;
    }
    __syncthreads();
    const int part = threadIdx.x;
    if (part < PARTS) {
        int n_before = 0;
        for (int other = 0; other < PARTS; other++) {
            n_before += top.parts[other] < top.parts[part] || (top.parts[other] == top.parts[part] && other < part);
        }
        if (n_before == k - 1) {
            top.bound = top.parts[part];
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void list_place(TopK & top, uint64_t place) {
    const int i = atomicAdd(&top.n_listed, 1);
    if (i < MAX_LISTED_IDS) {
        top.listed[i] = place;
    }
}

// Lists all ids that reach the bound. False if they are too many.
__device__ __forceinline__ bool list_near(const Row & row, TopK & top) {
    for (int group = threadIdx.x; group < row.n_groups; group += ROW_THREADS) {
        if (rank_of(row.numbers[group]) <= top.bound) {
            const int i = atomicAdd(&top.n_groups, 1);
            if (i < MAX_LISTED_GROUPS) {
                top.groups[i] = group;
            }
        }
    }
    __syncthreads();
    const int n_groups = top.n_groups;
    if (n_groups > MAX_LISTED_GROUPS) {
        return false;
    }
    for (int i = threadIdx.x; i < n_groups * GROUP; i += ROW_THREADS) {
        const int id = row.first_id(top.groups[i / GROUP], i % GROUP / 4) + i % 4;
        if (row.has(id)) {
            const uint32_t rank = rank_of_logit(row.logits[id]);
            if (rank <= top.bound) {
                list_place(top, place_of(rank, id));
            }
        }
    }
    __syncthreads();
    return top.n_listed <= MAX_LISTED_IDS;
}

// top.first <- the k first of the listed places
__device__ __forceinline__ void order_listed(int k, TopK & top) {
    const int n = top.n_listed, i = threadIdx.x;
    if (i < n) {
        int n_before = 0;
        for (int other = 0; other < n; other++) {
            n_before += top.listed[other] < top.listed[i];
        }
        if (n_before < k) {
            top.first[n_before] = top.listed[i];
        }
    }
    __syncthreads();
}

// top.first <- the k first places of the row, k <= MAX_LISTED_K and the row's ids. False, and nothing in `first`, if so
// many ids reach the bound that they fit no list: then they equal each other, or are sorted in an unlucky way.
__device__ __forceinline__ bool find_top_k(const Row & row, int k, TopK & top) {
    if (threadIdx.x == 0) {
        top.n_listed = top.n_groups = 0;
    }
    find_bound(row, k, top);
    if (!list_near(row, top)) {
        return false;
    }
    order_listed(k, top);
    return true;
}

// The end of the k first ids of the row, whatever the row holds.
__device__ __forceinline__ uint64_t find_top_k_end(const Row & row, int k, Search & search) {
    return find_end(
        search,
        [&](uint32_t last, auto add) {
            visit_many(
                row, [&](float largest) { return rank_of(largest) <= last; },
                [&](float x, int id) { add(place_of(rank_of_logit(x), id), 1); });
        },
        [&](uint64_t) { return (uint64_t) k; }, [](uint32_t) { return (uint64_t) 1; });
}

static_assert(2 * MAX_LISTED_K <= MAX_LISTED_IDS && MAX_LISTED_IDS <= ROW_THREADS && PARTS <= ROW_THREADS &&
                  MAX_LISTED_K <= PARTS,
              "one thread for each");

} // namespace dflash
