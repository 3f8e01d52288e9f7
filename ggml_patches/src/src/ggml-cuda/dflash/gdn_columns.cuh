#pragma once

// Gated delta rule on the columns that a thread holds, S / KEY_THREADS keys of each. With s a column:
//     delta = beta * (v_j - gate * (s . k))
//     o_j   = (gate * (s . q) + delta * (k . q)) / sqrt(S)
//     s_i   = fma(k_i, delta, gate * s_i)
// o is taken from the state before the row, so that both dots are one pass and one reduction. A sum over keys has one
// order for a width S: a thread's keys from low to high, then the threads as a tree. Replay runs the last line with
// the very numbers that the row had.

#include "gdn_tile.cuh"

namespace dflash {

template <int S> class GdnColumns {
    using Tile = GdnTile<S>;
    static constexpr int KEY_THREADS = Tile::KEY_THREADS, VECS = Tile::VECS, COLUMNS = Tile::COLUMNS;
    static constexpr int OWNERS = KEY_THREADS / COLUMNS; // threads that end up with the same sum

    float4 s[COLUMNS][VECS];
    const int key_thread = threadIdx.x % KEY_THREADS;
    const int first = threadIdx.x / KEY_THREADS * COLUMNS; // column within the block

    template <bool ALIGNED> __device__ __forceinline__ void load_all(const float * block) {
#pragma unroll
        for (int m = 0; m < COLUMNS; m++) {
#pragma unroll
            for (int c = 0; c < VECS; c++) {
                s[m][c] = load4<ALIGNED>(block + (first + m) * S + 4 * (key_thread + KEY_THREADS * c));
            }
        }
    }

    template <bool ALIGNED> __device__ __forceinline__ void store_all(float * block) const {
#pragma unroll
        for (int m = 0; m < COLUMNS; m++) {
#pragma unroll
            for (int c = 0; c < VECS; c++) {
                store4<ALIGNED>(block + (first + m) * S + 4 * (key_thread + KEY_THREADS * c), s[m][c]);
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

    static __device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
        sum = fmaf(a.x, b.x, sum);
        sum = fmaf(a.y, b.y, sum);
        sum = fmaf(a.z, b.z, sum);
        return fmaf(a.w, b.w, sum);
    }

    static __device__ __forceinline__ float shuffle_xor(float x, int mask) {
        return __shfl_xor_sync(Tile::WARP_MASK, x, mask, KEY_THREADS);
    }

    // Sums over the key threads of one value per column; a thread gets that of its own_column. Halving the columns with
    // the threads needs 4 shuffles where summing each column would need 12.
    __device__ __forceinline__ float sum(const float * x) const {
        const bool high = key_thread & KEY_THREADS / 2;
        const float a = (high ? x[2] : x[0]) + shuffle_xor(high ? x[0] : x[2], KEY_THREADS / 2);
        const float b = (high ? x[3] : x[1]) + shuffle_xor(high ? x[1] : x[3], KEY_THREADS / 2);
        const bool odd = key_thread & KEY_THREADS / 4;
        float own = (odd ? b : a) + shuffle_xor(odd ? a : b, KEY_THREADS / 4);
#pragma unroll
        for (int mask = OWNERS / 2; mask > 0; mask /= 2) {
            own += shuffle_xor(own, mask);
        }
        return own;
    }

  public:
    __device__ __forceinline__ int own_column() const { return first + key_thread / OWNERS; }
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
            const float4 delta = *(const float4 *) &shared.log_delta[t][first];
            decay(shared.log_gate[t]);
            add(0, k, delta.x);
            add(1, k, delta.y);
            add(2, k, delta.z);
            add(3, k, delta.w);
        }
    }

    // Staged row t. -> o and delta of own_column
    __device__ __forceinline__ float2 run(const GdnShared<S> & shared, int t, float scale) {
        const float gate = shared.row[t].gate, beta = shared.row[t].beta, kq = shared.row[t].kq;
        float4 k[VECS], q[VECS];
        read_keys(k, shared.k[t]);
        read_keys(q, shared.q[t]);
        float dot_k[COLUMNS], dot_q[COLUMNS];
#pragma unroll
        for (int m = 0; m < COLUMNS; m++) {
            dot_k[m] = dot_q[m] = 0.0f;
#pragma unroll
            for (int c = 0; c < VECS; c++) {
                dot_k[m] = dot4(s[m][c], k[c], dot_k[m]);
                dot_q[m] = dot4(s[m][c], q[c], dot_q[m]);
            }
        }
        const float sk = sum(dot_k);
        decay(gate); // does not wait for the sum
        const float delta = beta * fmaf(-gate, sk, shared.v[t][own_column()]);
#pragma unroll
        for (int m = 0; m < COLUMNS; m++) {
            add(m, k, __shfl_sync(Tile::WARP_MASK, delta, m * OWNERS, KEY_THREADS));
        }
        const float sq = sum(dot_q);
        return make_float2(fmaf(gate, sq, delta * kq) * scale, delta);
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
