#pragma once

// Rows of logits. A row is read in groups of 32 ids, one group per thread, 16 bytes at a time. The scan kernels of
// sample and select leave a number per group, so that the kernels behind them read again only the few groups that can
// matter. Neither needs an order of sums: everything here is a maximum, exact in any order.

#include "kernels.cuh"

namespace dflash {

constexpr int SCAN_THREADS = 256;
constexpr int LOADS = 8;                        // of a thread, in flight together
constexpr int CHUNK = SCAN_THREADS * LOADS * 4; // ids that a block scans
constexpr int GROUP = LOADS * 4;                // ids that a thread scans
constexpr int ROW_THREADS = 1024;               // of the kernels that finish one row per block
constexpr uint64_t NOWHERE = UINT64_MAX;        // behind every place
constexpr int ID_BITS = 24;                     // of a place

static_assert(GGML_DFLASH_MAX_VOCABULARY <= 1 << ID_BITS, "an id must fit a place");

// A number's place in falling order: the larger x, the smaller its rank; -0 and +0 have the same. Not for NaN.
__device__ __forceinline__ uint32_t rank_of(float x) {
    const uint32_t bits = (uint32_t) __float_as_int(x + 0.0f);
    return bits >> 31 ? bits : 0x7FFFFFFFu - bits;
}

__device__ __forceinline__ float number_of(uint32_t rank) {
    return __int_as_float((int) (rank >> 31 ? rank : 0x7FFFFFFFu - rank));
}

// Rank, then id, as one integer: falling numbers, equal ones by rising id.
__device__ __forceinline__ uint64_t place_of(uint32_t rank, int id) {
    return (uint64_t) rank << ID_BITS | (uint32_t) id;
}

__device__ __forceinline__ int id_at(uint64_t place) {
    return (int) (place & ((1u << ID_BITS) - 1));
}

__device__ __forceinline__ float number_at(uint64_t place) {
    return number_of((uint32_t) (place >> ID_BITS));
}

// Groups begin at multiples of 16 bytes, so a row that does not has its first groups cut short. With the numbers of the
// groups, one per group, once a scan kernel has run.
struct Row {
    const float * logits; // of id 0
    int n;                // ids
    int skew;             // of id 0 against the 16 bytes it lies in
    int n_groups;
    float * numbers;

    __device__ Row(const float * all, int row, int n_ids, float * all_numbers, int groups)
        : logits(all + (int64_t) row * n_ids), n(n_ids), skew((int) ((uintptr_t) logits / sizeof(float) % 4)),
          n_groups(groups), numbers(all_numbers + (int64_t) row * groups) {}

    __device__ bool has(int id) const { return id >= 0 && id < n; }

    // First of the four ids of a load; neighbouring groups are neighbours in memory.
    __device__ int first_id(int group, int load) const {
        return group / SCAN_THREADS * CHUNK + (load * SCAN_THREADS + group % SCAN_THREADS) * 4 - skew;
    }
};

inline int count_groups(int64_t n_ids) {
    const int64_t most = n_ids + 3; // with the largest skew
    return (int) ((most + CHUNK - 1) / CHUNK * SCAN_THREADS);
}

// N loads of a group from `load` on; -infinity where the row has no id.
template <int N> __device__ __forceinline__ void read_group(const Row & row, int group, int load, float (&x)[N][4]) {
    if (row.first_id(group, load) >= 0 && row.first_id(group, load + N - 1) + 4 <= row.n) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float4 four = *(const float4 *) (row.logits + row.first_id(group, load + j));
            x[j][0] = four.x, x[j][1] = four.y, x[j][2] = four.z, x[j][3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int id = row.first_id(group, load + j) + e;
            x[j][e] = row.has(id) ? row.logits[id] : -INFINITY;
        }
    }
}

// visit(logit, id) for the ids of all groups whose number is wanted, by a block. A thread reads its group alone, which
// is fast if most are wanted; the code is kept short, as it may run once.
template <typename Wanted, typename Visit>
__device__ __forceinline__ void visit_many(const Row & row, Wanted wanted, Visit visit) {
    constexpr int N = 2;
    for (int group = threadIdx.x; group < row.n_groups; group += ROW_THREADS) {
        if (!wanted(row.numbers[group])) {
            continue;
        }
#pragma unroll 1
        for (int load = 0; load < LOADS; load += N) {
            float x[N][4];
            read_group(row, group, load, x);
#pragma unroll
            for (int j = 0; j < N; j++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int id = row.first_id(group, load + j) + e;
                    if (row.has(id)) {
                        visit(x[j][e], id);
                    }
                }
            }
        }
    }
}

// The same if few are wanted: 32 threads share a group.
template <typename Wanted, typename Visit>
__device__ __forceinline__ void visit_few(const Row & row, Wanted wanted, Visit visit) {
    static_assert(GROUP == 32, "an id for each of 32 threads");
    const int mine = threadIdx.x % 32;
    for (int first = threadIdx.x - mine; first < row.n_groups; first += ROW_THREADS) {
        const int is_wanted = wanted(row.numbers[first + mine]);
        if (!__any_sync(0xffffffff, is_wanted)) {
            continue;
        }
#pragma unroll 1
        for (int i = 0; i < 32; i++) {
            const int id = row.first_id(first + i, mine / 4) + mine % 4;
            if (__shfl_sync(0xffffffff, is_wanted, i, 32) && row.has(id)) {
                visit(row.logits[id], id);
            }
        }
    }
}

// The least of the numbers of 32 threads.
__device__ __forceinline__ uint64_t warp_min(unsigned long long least) {
    for (int step = 16; step > 0; step /= 2) {
        const unsigned long long other = __shfl_xor_sync(0xffffffff, least, step, 32);
        least = other < least ? other : least;
    }
    return least;
}

// The least of the numbers of a block of ROW_THREADS, in every thread.
__device__ __forceinline__ uint64_t block_min(uint64_t x) {
    __shared__ uint64_t of_warps[ROW_THREADS / 32];
    x = warp_min(x);
    __syncthreads(); // of_warps may still be read
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = x;
    }
    __syncthreads();
    return warp_min(of_warps[threadIdx.x % 32]);
}

} // namespace dflash
