#pragma once

// Gated delta rule on the columns that a thread holds, S / KEY_THREADS keys of each. With s a column:
//     delta = beta * (v_j - gate * (s . k))
//     o_j   = (gate * (s . q) + delta * (k . q)) / sqrt(S)
//     s_i   = fma(k_i, delta, gate * s_i)
// o is taken from the state before the row, so that both dots are one pass and one reduction. A sum over keys has one
// order for a width S: a thread's keys from low to high, then the threads as a tree. Replay runs the last line with
// the very numbers that the row had.
//
// Columns are dealt so that sums need no selection. Place m of a thread is column m ^ own of its group, own being the
// column whose sum it is to have: what it passes on in a step of the tree is always its upper places, and a delta comes
// back from the thread whose own column differs by m.

#include "gdn_tile.cuh"

namespace dflash {

template <int S> class GdnColumns {
    using Tile = GdnTile<S>;
    static constexpr int KEY_THREADS = Tile::KEY_THREADS, VECS = Tile::VECS, COLUMNS = Tile::COLUMNS;
    static constexpr int OWNERS = Tile::OWNERS;
    static_assert(OWNERS * COLUMNS == KEY_THREADS && (COLUMNS & (COLUMNS - 1)) == 0);

    float4 s[COLUMNS][VECS];
    const int key_thread = threadIdx.x % KEY_THREADS;
    const int own = threadIdx.x / KEY_THREADS * COLUMNS + key_thread / OWNERS; // column within the block

    __device__ __forceinline__ int offset(int m, int c) const { // of keys c of place m
        return (own ^ m) * S + 4 * (key_thread + KEY_THREADS * c);
    }

    template <bool ALIGNED> __device__ __forceinline__ void load_all(const float * block) {
#pragma unroll
        for (int m = 0; m < COLUMNS; m++) {
#pragma unroll
            for (int c = 0; c < VECS; c++) {
                s[m][c] = load4<ALIGNED>(block + offset(m, c));
            }
        }
    }

    template <bool ALIGNED> __device__ __forceinline__ void store_all(float * block) const {
#pragma unroll
        for (int m = 0; m < COLUMNS; m++) {
#pragma unroll
            for (int c = 0; c < VECS; c++) {
                store4<ALIGNED>(block + offset(m, c), s[m][c]);
            }
        }
    }

    __device__ __forceinline__ void read_keys(float4 * to, const float * row) const {
#pragma unroll
        for (int c = 0; c < VECS; c++) {
            to[c] = ((const float4 *) row)[key_thread + KEY_THREADS * c];
        }
    }

    __device__ __forceinline__ void decay(float gate) {
#pragma unroll
        for (int m = 0; m < COLUMNS; m++) {
#pragma unroll
            for (int c = 0; c < VECS; c++) {
                s[m][c].x = gate * s[m][c].x;
                s[m][c].y = gate * s[m][c].y;
                s[m][c].z = gate * s[m][c].z;
                s[m][c].w = gate * s[m][c].w;
            }
        }
    }

    __device__ __forceinline__ void add(int m, const float4 * k, float delta) {
#pragma unroll
        for (int c = 0; c < VECS; c++) {
            s[m][c].x = fmaf(k[c].x, delta, s[m][c].x);
            s[m][c].y = fmaf(k[c].y, delta, s[m][c].y);
            s[m][c].z = fmaf(k[c].z, delta, s[m][c].z);
            s[m][c].w = fmaf(k[c].w, delta, s[m][c].w);
        }
    }

    // Dots of all places with a key or query; their chains run side by side.
    __device__ __forceinline__ void dots(float * to, const float4 * x) const {
#pragma unroll
        for (int m = 0; m < COLUMNS; m++) {
            to[m] = 0.0f;
        }
#pragma unroll
        for (int c = 0; c < VECS; c++) {
#pragma unroll
            for (int m = 0; m < COLUMNS; m++) {
                to[m] = fmaf(s[m][c].x, x[c].x, to[m]);
            }
#pragma unroll
            for (int m = 0; m < COLUMNS; m++) {
                to[m] = fmaf(s[m][c].y, x[c].y, to[m]);
            }
#pragma unroll
            for (int m = 0; m < COLUMNS; m++) {
                to[m] = fmaf(s[m][c].z, x[c].z, to[m]);
            }
#pragma unroll
            for (int m = 0; m < COLUMNS; m++) {
                to[m] = fmaf(s[m][c].w, x[c].w, to[m]);
            }
        }
    }

    static __device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
        sum = fmaf(a.z, b.z, sum);
        return fmaf(a.w, b.w, sum);
    }

    static __device__ __forceinline__ float shuffle_xor(float x, int mask) {
        return __shfl_xor_sync(Tile::WARP_MASK, x, mask, KEY_THREADS);
    }

    // Sums over the key threads of two values per place; a thread gets those of its own column. Halving the columns
    // with the threads needs few shuffles, and the two sums wait for theirs together.
    static __device__ __forceinline__ float2 sums(float * x, float * y) {
#pragma unroll
        for (int n = COLUMNS / 2; n > 0; n /= 2) {
#pragma unroll
            for (int m = 0; m < n; m++) {
                x[m] += shuffle_xor(x[m + n], n * OWNERS);
                y[m] += shuffle_xor(y[m + n], n * OWNERS);
            }
        }
#pragma unroll
        for (int mask = OWNERS / 2; mask > 0; mask /= 2) {
            x[0] += shuffle_xor(x[0], mask);
            y[0] += shuffle_xor(y[0], mask);
        }
        return make_float2(x[0], y[0]);
    }

  public:
    __device__ __forceinline__ int own_column() const { return own; }
    __device__ __forceinline__ bool writes_own() const { return key_thread % OWNERS == 0; }

    // block: the state of the block's first column
    __device__ __forceinline__ void load(const float * block, bool aligned) {
        if (aligned) {
            load_all<true>(block);
        } else {
            load_all<false>(block);
        }
    }

    __device__ __forceinline__ void store(float * block, bool aligned) const {
        if (aligned) {
            store_all<true>(block);
        } else {
            store_all<false>(block);
        }
    }

    // The n staged log rows.
    __device__ __forceinline__ void replay(const GdnShared<S> & shared, int n) {
#pragma unroll 2
        for (int t = 0; t < n; t++) {
            float4 k[VECS];
            read_keys(k, shared.log_k[t]);
            decay(shared.log_gate[t]);
#pragma unroll
            for (int m = 0; m < COLUMNS; m++) {
                add(m, k, shared.log_delta[t][own ^ m]);
            }
        }
    }

    // Staged row t, row being its scalars. -> o and delta of own_column
    __device__ __forceinline__ float2 run(const GdnShared<S> & shared, int t, const GdnScalars & row, float scale) {
        float4 k[VECS], q[VECS];
        read_keys(k, shared.k[t]);
        read_keys(q, shared.q[t]);
        float dot_k[COLUMNS], dot_q[COLUMNS];
        dots(dot_k, k);
        dots(dot_q, q);
        const float2 sk_sq = sums(dot_k, dot_q);
        decay(row.gate); // does not wait for the sums
        const float delta = row.beta * fmaf(-row.gate, sk_sq.x, shared.v[t][own]);
        add(0, k, delta);
#pragma unroll
        for (int m = 1; m < COLUMNS; m++) {
            add(m, k, shuffle_xor(delta, m * OWNERS));
        }
        return make_float2(fmaf(row.gate, sk_sq.y, delta * row.kq) * scale, delta);
    }

    // k . q of the staged rows, a row per group of key threads
    __device__ __forceinline__ void put_kq(GdnShared<S> & shared) const {
        for (int t = threadIdx.x / KEY_THREADS; t < Tile::ROWS; t += Tile::GROUPS) {
            float4 k[VECS], q[VECS];
            read_keys(k, shared.k[t]);
            read_keys(q, shared.q[t]);
            float kq = 0.0f;
#pragma unroll
            for (int c = 0; c < VECS; c++) {
                kq = dot4(k[c], q[c], kq);
            }
#pragma unroll
            for (int mask = KEY_THREADS / 2; mask > 0; mask /= 2) {
                kq += shuffle_xor(kq, mask);
            }
            if (key_thread == 0) {
                shared.row[t].kq = kq;
            }
        }
    }
};

} // namespace dflash
