#pragma once

// mul_mat on Hopper: the kernel. A block has one share of mul_mat_cut.cuh. Each warp fetches and decodes 16 rows of
// weights; four such warps multiply them with columns in shared memory, so that these cost neither registers nor
// instructions, however many there are.

#include "columns.cuh"
#include "iq4_xs.cuh"
#include "result.cuh"
#include "weights.cuh"

namespace dflash {
namespace wgmma {

constexpr int PAIRS = mm::STEPS / 2; // of a super-block: its steps, two at a time
constexpr int MAX_THREADS = MAX_HEIGHT / mm::TILE * 32;
constexpr int SHARED_LIMIT = 227 * 1024; // of a block
constexpr int MAX_STAGES = 4;

struct Barriers {
    attn::Barrier full[MAX_STAGES], empty[MAX_STAGES];
};

constexpr int at_most(int a, int b) {
    return a < b ? a : b;
}

// What lies in shared memory, from its begin: table, barriers, columns, weights. Sums do not depend on it.
template <ggml_type TYPE, int N8> struct Room {
    static constexpr int BARRIERS = TYPE == GGML_TYPE_IQ4_XS ? TABLE_BYTES : 0;
    static constexpr int COLUMNS = BARRIERS + (int) sizeof(Barriers), COLUMN_BYTES = wgmma::COLUMN_BYTES<TYPE> * N8;
    static constexpr int MAX_WARPS = MAX_HEIGHT / mm::TILE, FREE = SHARED_LIMIT - COLUMNS; // for columns and weights

    static constexpr int WEIGHT_STAGES =
        at_most((FREE - 2 * COLUMN_BYTES) / (MAX_WARPS * Pieces<TYPE>::STAGE_BYTES), 4);
    static constexpr bool HAS_RINGS = TYPE == GGML_TYPE_IQ4_XS && 2 * COLUMN_BYTES + MAX_WARPS * RowRing::BYTES <= FREE;
    static_assert(WEIGHT_STAGES >= 2, "weights come while others are read");

    template <typename Weights>
    static constexpr int COLUMN_STAGES = at_most((FREE - MAX_WARPS * Weights::BYTES) / COLUMN_BYTES, MAX_STAGES);
    template <typename Weights> static constexpr int WEIGHTS = COLUMNS + COLUMN_STAGES<Weights> * COLUMN_BYTES;

    template <typename Weights> static constexpr int bytes(int height) {
        return WEIGHTS<Weights> + height / mm::TILE * Weights::BYTES;
    }
};

// Copies `bytes` to shared memory, and completes the barrier's phase with them. Both ends are aligned to 16.
__device__ __forceinline__ void copy_bulk(char * to, const void * from, int bytes, attn::Barrier & barrier) {
    const uint32_t at = attn::shared_address(&barrier);
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(at), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     attn::shared_address(to)),
                 "l"(from), "r"(bytes), "r"(at)
                 : "memory");
}

// The columns of a share's super-blocks, in order. The block's first thread keeps them coming: when it turns to a
// stage, it fills the one before, which all warps have left or soon will.
template <ggml_type TYPE, int N8, int STAGES> struct Ring {
    static_assert(STAGES >= 2, "columns come while others are read");
    using R = Room<TYPE, N8>;
    Barriers & barriers;
    char * columns;
    const char * from; // columns in memory
    int n_blocks;
    int stage = 0;
    uint32_t parity = 0;

    __device__ void fill(int to, int block) const {
        while (block >= n_blocks) {
            block -= n_blocks;
        }
        copy_bulk(columns + to * R::COLUMN_BYTES, from + (int64_t) block * R::COLUMN_BYTES, R::COLUMN_BYTES,
                  barriers.full[to]);
    }

    // By the first thread, before anything else.
    __device__ void begin(int block, int left) const {
        for (int i = 0; i < min(STAGES - 1, left); i++) {
            fill(i, block + i);
        }
    }

    // A super-block's columns, once they are there. `left` super-blocks of the share come from this one on.
    __device__ const char * await(int block, int left) const {
        if (threadIdx.x == 0 && left >= STAGES) {
            const int before = stage == 0 ? STAGES - 1 : stage - 1;
            attn::wait(barriers.empty[before], stage == 0 ? parity ^ 1 : parity);
            fill(before, block + STAGES - 1);
        }
        __syncwarp();
        attn::wait(barriers.full[stage], parity);
        return columns + stage * R::COLUMN_BYTES;
    }

    __device__ void release() {
        if (threadIdx.x % 32 == 0) {
            attn::arrive(barriers.empty[stage]);
        }
        if (++stage == STAGES) {
            stage = 0, parity ^= 1;
        }
    }
};

// sums += unit of row * (unit of column * products)
template <int N8>
__device__ __forceinline__ void take(mm::Sums<1, N8> & sums, const float (&products)[N8][4], float unit_0, float unit_1,
                                     const float * column_units) {
#pragma unroll
    for (int tile = 0; tile < N8; tile++) {
        const float2 units = *(const float2 *) (column_units + tile * 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float & sum = sums.of[0][tile][i];
            sum = fmaf(i < 2 ? unit_0 : unit_1, products[tile][i] * (i % 2 == 0 ? units.x : units.y), sum);
        }
    }
}

// Fragments of rows g and g + 8 of a super-block; AT_ONCE pairs of steps.
template <ggml_type TYPE, int AT_ONCE> struct Fragments {
    typename RowOf<TYPE>::Type rows[2];
    uint32_t raw[AT_ONCE][2][4];

    __device__ Fragments(const char * shared, const int (&at)[2]) {
        rows[0].open(shared, at[0]);
        rows[1].open(shared, at[1]);
    }

    __device__ void look_up(int first) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            rows[0].look_up(first + i, raw[i][0]);
            rows[1].look_up(first + i, raw[i][1]);
        }
    }

    __device__ void finish(int first, uint32_t (&a)[2 * AT_ONCE][4]) const {
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++) {
            uint32_t steps[2][2];
            rows[i % 2].finish(first + i / 2, raw[i / 2][i % 2], steps);
#pragma unroll
            for (int step = 0; step < 2; step++) {
                a[i / 2 * 2 + step][i % 2] = steps[step][0];
                a[i / 2 * 2 + step][i % 2 + 2] = steps[step][1];
            }
        }
    }
};

// One super-block of a warp's rows, which begin at at[], and of all columns. While steps are multiplied, the next are
// finished and those behind them looked up: as many as registers allow.
template <ggml_type TYPE, int N8, typename Columns>
__device__ __forceinline__ void meet(mm::Sums<1, N8> & sums, const char * shared, const int (&at)[2], Columns & ring,
                                     int block, int left) {
    constexpr bool OFTEN = mm::UNIT_STEPS<TYPE> == 2; // a unit serves two steps, or a super-block
    constexpr uint64_t STEP = N8 * STEP_BYTES / 16;
    constexpr int AT_ONCE = N8 == 1 && !OFTEN ? 2 : 1;
    Fragments<TYPE, AT_ONCE> fragments(shared, at);
    float products[N8][4] = {};
    uint32_t a[2][2 * AT_ONCE][4];
    fragments.look_up(0);
    const char * columns = ring.await(block, left);
    const float * units = (const float *) (columns + ALL_STEPS<TYPE> * N8 * STEP_BYTES) + threadIdx.x % 4 * 2;
    uint64_t b = descriptor(attn::shared_address(columns));
    if constexpr (mm::HAS_MINIMA<TYPE>) {
        const auto & rows = fragments.rows;
        const uint32_t minima[4] = {rows[0].minima, rows[1].minima, rows[0].minima, rows[1].minima};
        pin(products);
        fence();
        multiply<N8>(products, minima, b, 0);
        commit();
        wait<0>();
        pin(products);
        take(sums, products, -rows[0].min_unit(), -rows[1].min_unit(), units);
        b += STEP;
    }
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair += AT_ONCE) {
        auto & steps = a[pair / AT_ONCE % 2];
        fragments.finish(pair, steps);
        if (pair + AT_ONCE < PAIRS) {
            fragments.look_up(pair + AT_ONCE);
        }
        pin(products);
        fence();
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++) {
            multiply<N8>(products, steps[i], b + (2 * pair + i) * STEP, i > 0 || (!OFTEN && pair > 0));
        }
        commit();
        wait<OFTEN ? 0 : 1>();
        if constexpr (OFTEN) {
            pin(products);
            take(sums, products, fragments.rows[0].unit_of(pair), fragments.rows[1].unit_of(pair), units);
        }
    }
    if constexpr (!OFTEN) {
        wait<0>();
        pin(products);
        take(sums, products, fragments.rows[0].unit(), fragments.rows[1].unit(), units);
    }
    ring.release();
}

template <ggml_type TYPE, int N8, typename Weights>
__global__ void __launch_bounds__(MAX_THREADS, 1)
    multiply_rows(const mm::Node node, const mm::Cut cut, const Buffers buffers) {
    using R = Room<TYPE, N8>;
    constexpr int COLUMN_STAGES = R::template COLUMN_STAGES<Weights>;
    extern __shared__ __align__(128) char shared[];
    const int warp = __shfl_sync(0xffffffff, (int) threadIdx.x / 32, 0); // the compiler sees that all threads have one
    const int lane = (int) threadIdx.x % 32, share = (int) blockIdx.x;
    const int ring_of_warp = R::template WEIGHTS<Weights> + warp * Weights::BYTES;
    Barriers & barriers = *(Barriers *) (shared + R::BARRIERS);
    Weights weights(node, cut, warp, shared + ring_of_warp, share);
    for (int i = 0; i < Weights::AHEAD; i++) {
        weights.fetch(); // while columns are prepared
    }
    if (threadIdx.x < COLUMN_STAGES) {
        attn::make_barrier(barriers.full[threadIdx.x], 1);
        attn::make_barrier(barriers.empty[threadIdx.x], blockDim.x / 32);
    }
    if constexpr (TYPE == GGML_TYPE_IQ4_XS) {
        fill_table(shared);
    }
    __syncthreads();
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();

    mm::Batch<1> now(cut, share);
    Ring<TYPE, N8, COLUMN_STAGES> ring = {barriers, shared + R::COLUMNS, buffers.columns, node.n_blocks};
    if (threadIdx.x == 0) {
        ring.begin(now.block, now.left);
    }
    const Result<N8> result = {node, cut, buffers, warp, lane};
    mm::Sums<1, N8> sums;
    while (now.left > 0) {
        wait_for_stages<Weights::AHEAD - 1>();
        weights.fetch();
        const int at[2] = {ring_of_warp + weights.place(now, lane / 4),
                           ring_of_warp + weights.place(now, 8 + lane / 4)};
        meet<TYPE, N8>(sums, shared, at, ring, now.block, now.left);
        if (now.ends_part()) {
            result.put(sums, now.tile, share);
            sums = mm::Sums<1, N8>();
        }
        // Not behind the loop: the compiler would no longer see that a warp's threads leave it together.
        if (now.left == 1) {
            result.finish(share);
        }
        now.advance();
        weights.leave();
    }
}

} // namespace wgmma
} // namespace dflash
