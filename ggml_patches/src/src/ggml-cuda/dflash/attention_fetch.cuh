#pragma once

// The warps that fetch keys and values, a split ahead of the warps that meet them.
//
// Shared memory holds one split, in parts: the keys of each warp, and the values of each stage. A part has a barrier
// for "arrived" and one for "free", on which a phase ends once per split. So a part is fetched again as soon as it is
// done with, across splits and across units, while the others are still at work. Rows that do not exist become zeros.

#include "attention_mma.cuh"

namespace dflash {
namespace attn {

// Where row `row` of a few comes from, given that of row i by lane i.
__device__ __forceinline__ const char * of_lane(const char * from, int row) {
    return (const char *) __shfl_sync(0xffffffff, (unsigned long long) from, row, 32);
}

// Rows to[0 .. N - 1]; lane i says where row i comes from, or null. `any` is an address that exists. Every lane arrives
// once at the barrier, as its copies do.
template <typename Row, int N>
__device__ __forceinline__ void fetch_rows(char (*to)[Row::PITCH], const char * from, const char * any,
                                           Barrier & arrived, int lane) {
    constexpr int CHUNK = Row::CHUNK, LANES = Row::CHUNKS < 32 ? 16 : 32; // that copy one row
    static_assert(N <= 32 && N % (32 / LANES) == 0, "a lane per row, and all lanes take part in each step");
    static_assert(Row::CHUNKS / LANES == 1 && Row::CHUNKS % LANES < 2, "a chunk for each, and perhaps one more");
    const uint32_t exist = __ballot_sync(0xffffffff, from != nullptr) >> (lane / LANES);
    const char * source = from != nullptr ? from : any;
    char * column = to[lane / LANES] + lane % LANES * CHUNK;
#pragma unroll 8
    for (int row = 0; row < N; row += 32 / LANES) {
        const char * of_row = of_lane(source, row + lane / LANES) + lane % LANES * CHUNK;
        copy_async<CHUNK>(column + row * Row::PITCH, of_row, exist >> row & 1);
    }
    if (Row::CHUNKS > LANES && lane < N) {
        copy_async<CHUNK>(to[lane] + LANES * CHUNK, source + LANES * CHUNK, from != nullptr);
    }
    arrive_after_copies(arrived);
}

// The same for rows at any address.
template <typename Row, int N>
__device__ __forceinline__ void fetch_unaligned_rows(char (*to)[Row::PITCH], const char * from, Barrier & arrived,
                                                     int lane) {
#pragma unroll 1
    for (int row = 0; row < N; row++) {
        const char * source = of_lane(from, row);
        for (int i = lane; i < Row::BYTES / 2; i += 32) {
            ((uint16_t *) to[row])[i] = source != nullptr ? ((const uint16_t *) source)[i] : 0;
        }
    }
    arrive(arrived);
}

// The rows of one kv head in keys or values.
template <typename Row> struct HeadRows {
    const char * first;
    int64_t stride;
    bool is_aligned;

    __device__ HeadRows(const char * pages, int64_t row_stride, int64_t head_stride, int kv_head)
        : first(pages + kv_head * head_stride), stride(row_stride),
          is_aligned(((uintptr_t) pages | row_stride | head_stride) % Row::CHUNK == 0) {}

    __device__ const char * at(int page, int position) const {
        return page >= 0 ? first + ((int64_t) page * PAGE + position % PAGE) * stride : nullptr;
    }

    template <int N>
    __device__ void fetch(char (*to)[Row::PITCH], const char * from, Barrier & arrived, int lane) const {
        if (is_aligned) {
            fetch_rows<Row, N>(to, from, first, arrived, lane);
        } else {
            fetch_unaligned_rows<Row, N>(to, from, arrived, lane);
        }
    }
};

// Of page `lane` of a split: its number, or -1 if it is missing, out of range or seen by no row.
template <typename M>
__device__ __forceinline__ int page_number(const Node & node, const Job & job, int split, int lane) {
    const int index = split * (M::SPLIT / PAGE) + lane;
    if (lane >= M::SPLIT / PAGE || !job.seen.meets(index * PAGE, (index + 1) * PAGE)) {
        return -1;
    }
    const int page = node.table[(int64_t) job.lane.slot * node.max_pages + index];
    return page < node.n_pages ? page : -1;
}

// Where row `row` of a split comes from, given its page numbers by lane. By all lanes.
template <typename M, typename Row>
__device__ __forceinline__ const char * source(const HeadRows<Row> & rows, const Job & job, int pages, int split,
                                               int row) {
    const int page = __shfl_sync(0xffffffff, pages, row / PAGE, 32), position = split * M::SPLIT + row;
    return position >= job.seen.first && position < job.seen.end ? rows.at(page, position) : nullptr;
}

// Keys and values of all splits of a unit; the parts are dealt to the fetching warps, of which this is number
// `fetcher`. `turn` is the number of splits that this block has fetched before.
template <typename M>
__device__ __forceinline__ void fetch_unit(typename M::Memory & memory, const Node & node, const Job & job,
                                           const Unit & unit, uint32_t & turn, int fetcher, int lane) {
    const HeadRows<typename M::KeyRow> keys(node.k, node.k_row, node.k_head, unit.kv_head);
    const HeadRows<typename M::ValueRow> values(node.v, node.v_row, node.v_head, unit.kv_head);
    int next_pages = page_number<M>(node, job, unit.first_split, lane);
#pragma unroll 1
    for (int split = unit.first_split; split < unit.end_split; split++, turn++) {
        const int pages = next_pages;
        next_pages = split + 1 < unit.end_split ? page_number<M>(node, job, split + 1, lane) : -1;
#pragma unroll 1
        for (int warp = fetcher; warp < M::WARPS; warp += M::FETCHERS) {
            const int row = warp * M::WARP_POSITIONS;
            const char * from = source<M>(keys, job, pages, split, row + lane % M::WARP_POSITIONS);
            wait(memory.keys_free[warp], ~turn & 1);
            keys.template fetch<M::WARP_POSITIONS>(memory.keys + row, from, memory.keys_arrived[warp], lane);
        }
#pragma unroll 1
        for (int run = fetcher; run < M::STAGES * M::STAGE_RUNS; run += M::FETCHERS) {
            const int row = run * M::RUN, stage = run / M::STAGE_RUNS;
            const char * from = source<M>(values, job, pages, split, row + lane % M::RUN);
            wait(memory.values_free[stage], ~turn & 1);
            values.template fetch<M::RUN>(memory.values + row, from, memory.values_arrived[stage], lane);
        }
    }
}

} // namespace attn
} // namespace dflash
