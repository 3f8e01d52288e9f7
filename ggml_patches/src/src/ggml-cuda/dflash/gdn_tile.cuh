#pragma once

// Gated delta rule: how a head is cut, and what a block stages in shared memory.
//
// A block has up to 64 value columns of one head of one lane, a thread COLUMNS columns by S / KEY_THREADS keys, in
// registers from the first pending row to the last new one. k, q, v and log rows are the same for many threads: they go
// through shared memory, ROWS at a time. A fetch (into registers) and its put (into shared memory) are two calls, so
// that everything a block reads can be under way before anything of it is waited for.
//
// KEY_THREADS is part of the numbers: it says in which order a sum over keys is taken. COLUMNS and BLOCK_COLUMNS only
// say who computes what. Few columns a thread mean more warps, which hide the chain of a row (dots, sum, delta,
// update); many mean fewer reads of k and q from shared memory.

#include "kernels.cuh"
#include "numbers.cuh"

namespace dflash {

template <int S> struct GdnTile {
    static constexpr int KEY_THREADS = S < 32 ? 4 : S < 128 ? 8 : 16; // neighbours that share their columns
    static constexpr int VECS = S / KEY_THREADS / 4;     // of a thread: keys 4 * (key_thread + KEY_THREADS * c) + 0..3
    static constexpr int COLUMNS = 4;                    // of a thread
    static constexpr int OWNERS = KEY_THREADS / COLUMNS; // threads that end up with the same sum
    static constexpr int BLOCK_COLUMNS = S < 64 ? S : 64;
    static constexpr int BLOCKS = S / BLOCK_COLUMNS; // of a head
    static constexpr int GROUPS = BLOCK_COLUMNS / COLUMNS;
    static constexpr int THREADS = GROUPS * KEY_THREADS;
    static constexpr int ROWS = 8; // staged at a time
#if defined(GGML_USE_HIP)
    static constexpr int MIN_BLOCKS = 1; // waves there, and registers are no limit
#else
    static constexpr int MIN_BLOCKS = S < 128 ? 4 : 768 / THREADS; // of a multiprocessor: 80 registers a thread
#endif
    static constexpr unsigned WARP_MASK = THREADS < 32 ? (1u << THREADS) - 1 : 0xFFFFFFFFu;
};

// A source [ne0, heads, T, L] with contiguous rows; strides in bytes.
struct GdnSource {
    const char * data;
    int64_t head_stride, row_stride, lane_stride;

    __device__ __forceinline__ const char * row(int head, int t, int lane) const {
        return data + head * head_stride + t * row_stride + lane * lane_stride;
    }
};

// A node of any of the three GDN sub-ops.
struct GdnNode {
    GdnSource q, k, v, g, beta;
    float * state;
    float * log;
    const int32_t * slots;
    const int32_t * n_pending;
    const int32_t * n_rows; // NULL: all rows are live
    float * out;
    int n_heads, n_key_heads, n_block, n_slots, n_out; // n_out: rows T of the result
    float scale;
    bool qk_aligned, state_aligned; // to 16 bytes

    template <int S> __device__ __forceinline__ float * columns_of(int slot, int head, int column) const {
        return state + (((int64_t) slot * n_heads + head) * S + column) * S;
    }
    template <int S> __device__ __forceinline__ int log_row_stride() const { return n_heads * (2 * S + 1); }
    template <int S> __device__ __forceinline__ float * log_row(int slot, int row, int head) const {
        return log + (((int64_t) slot * n_block + row) * n_heads + head) * (2 * S + 1);
    }
    template <int S> __device__ __forceinline__ float * out_row(int lane, int row, int head) const {
        return out + (((int64_t) lane * n_out + row) * n_heads + head) * S;
    }
};

// Counts of a lane that has a slot, checked.
struct GdnCounts {
    int n_replay, n_rows;
    bool ok;

    __device__ __forceinline__ GdnCounts(const GdnNode & node, int lane, int slot)
        : n_replay(node.n_pending[slot]), n_rows(node.n_rows ? node.n_rows[lane] : node.n_out),
          ok(n_replay >= 0 && n_replay <= node.n_block && n_rows >= 0 && n_rows <= node.n_out) {}
};

struct alignas(16) GdnScalars { // of a row
    float gate, beta, kq;
};

template <int S> struct GdnShared {
    using Tile = GdnTile<S>;
    alignas(16) float q[Tile::ROWS][S];
    alignas(16) float k[Tile::ROWS][S];
    alignas(16) float log_k[Tile::ROWS][S];
    alignas(16) float log_delta[Tile::ROWS][Tile::BLOCK_COLUMNS];
    float v[Tile::ROWS][Tile::BLOCK_COLUMNS];
    GdnScalars row[Tile::ROWS + 1]; // the last is read ahead and not used
    float log_gate[Tile::ROWS];
};

template <bool ALIGNED> __device__ __forceinline__ float4 load4(const float * p) {
    if constexpr (ALIGNED) {
        return *(const float4 *) p;
    } else {
        return make_float4(p[0], p[1], p[2], p[3]);
    }
}

template <bool ALIGNED> __device__ __forceinline__ void store4(float * p, float4 x) {
    if constexpr (ALIGNED) {
        *(float4 *) p = x;
    } else {
        p[0] = x.x, p[1] = x.y, p[2] = x.z, p[3] = x.w;
    }
}

// Where a thread stands when a block goes through rows of WIDTH items, PASS rows at a time.
template <int S, int WIDTH> struct GdnWalk {
    static constexpr int PASS = GdnTile<S>::THREADS / WIDTH, N = GdnTile<S>::ROWS / PASS;
    static_assert(GdnTile<S>::THREADS % WIDTH == 0 && GdnTile<S>::ROWS % PASS == 0);
    const int t = threadIdx.x / WIDTH, item = threadIdx.x % WIDTH;
};

// Up to ROWS new rows of a block's columns.
template <int S> class GdnRows {
    using Tile = GdnTile<S>;
    using Vecs = GdnWalk<S, S / 4>;
    using Columns = GdnWalk<S, Tile::BLOCK_COLUMNS>;
    float4 q[Vecs::N], k[Vecs::N];
    float v[Columns::N], g, beta;

    template <bool ALIGNED>
    static __device__ __forceinline__ void fetch_vecs(float4 * to, const GdnSource & source, int lane, int head,
                                                      int first, int n) {
        const Vecs walk;
        const char * from = source.row(head, first + walk.t, lane) + 16 * walk.item;
#pragma unroll
        for (int i = 0; i < Vecs::N; i++) {
            const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            to[i] = walk.t + i * Vecs::PASS < n ? load4<ALIGNED>((const float *) from) : zero;
            from += Vecs::PASS * source.row_stride;
        }
    }

  public:
    __device__ __forceinline__ void fetch(const GdnNode & node, int lane, int head, int column, int first, int n) {
        const int key_head = head % node.n_key_heads;
        if (node.qk_aligned) {
            fetch_vecs<true>(q, node.q, lane, key_head, first, n);
            fetch_vecs<true>(k, node.k, lane, key_head, first, n);
        } else {
            fetch_vecs<false>(q, node.q, lane, key_head, first, n);
            fetch_vecs<false>(k, node.k, lane, key_head, first, n);
        }
        const Columns walk;
        const char * from = node.v.row(head, first + walk.t, lane) + 4 * (column + walk.item);
#pragma unroll
        for (int i = 0; i < Columns::N; i++) {
            v[i] = walk.t + i * Columns::PASS < n ? *(const float *) from : 0.0f;
            from += Columns::PASS * node.v.row_stride;
        }
        g = beta = 0.0f;
        if ((int) threadIdx.x < n) {
            g = *(const float *) node.g.row(head, first + threadIdx.x, lane);
            beta = *(const float *) node.beta.row(head, first + threadIdx.x, lane);
        }
    }

    __device__ __forceinline__ void put(GdnShared<S> & shared) const {
#pragma unroll
        for (int i = 0; i < Vecs::N; i++) {
            ((float4 *) shared.q)[threadIdx.x + i * Tile::THREADS] = q[i];
            ((float4 *) shared.k)[threadIdx.x + i * Tile::THREADS] = k[i];
        }
#pragma unroll
        for (int i = 0; i < Columns::N; i++) {
            ((float *) shared.v)[threadIdx.x + i * Tile::THREADS] = v[i];
        }
        if (threadIdx.x < Tile::ROWS) {
            shared.row[threadIdx.x].gate = exp_same(g);
            shared.row[threadIdx.x].beta = beta;
        }
    }
};

// Up to ROWS log rows of a block's columns. A row is no multiple of 16 bytes long, so words are read one by one.
template <int S> class GdnLogRows {
    using Tile = GdnTile<S>;
    using Keys = GdnWalk<S, S>;
    using Columns = GdnWalk<S, Tile::BLOCK_COLUMNS>;
    float k[Keys::N], delta[Columns::N], gate;

    template <typename Walk>
    static __device__ __forceinline__ void fetch_words(float * to, const float * rows, int row_stride, int n) {
        const Walk walk;
        rows += walk.t * row_stride + walk.item;
#pragma unroll
        for (int i = 0; i < Walk::N; i++) {
            to[i] = walk.t + i * Walk::PASS < n ? rows[i * Walk::PASS * row_stride] : 0.0f;
        }
    }

  public:
    __device__ __forceinline__ void fetch(const GdnNode & node, int slot, int head, int column, int first, int n) {
        const float * rows = node.log_row<S>(slot, first, head);
        const int row_stride = node.log_row_stride<S>();
        fetch_words<Keys>(k, rows + 1, row_stride, n);
        fetch_words<Columns>(delta, rows + 1 + S + column, row_stride, n);
        gate = (int) threadIdx.x < n ? rows[threadIdx.x * row_stride] : 0.0f;
    }

    __device__ __forceinline__ void put(GdnShared<S> & shared) const {
#pragma unroll
        for (int i = 0; i < Keys::N; i++) {
            ((float *) shared.log_k)[threadIdx.x + i * Tile::THREADS] = k[i];
        }
#pragma unroll
        for (int i = 0; i < Columns::N; i++) {
            ((float *) shared.log_delta)[threadIdx.x + i * Tile::THREADS] = delta[i];
        }
        if (threadIdx.x < Tile::ROWS) {
            shared.log_gate[threadIdx.x] = gate;
        }
    }
};

} // namespace dflash
