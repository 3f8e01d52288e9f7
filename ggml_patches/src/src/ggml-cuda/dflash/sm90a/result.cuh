#pragma once

// mul_mat on Hopper: where the sums of a warp's rows go. Whole tiles are written. A part of one is stored; once its
// share is done, the last of a tile's parts to come adds them, in the order of K.

#include "../mul_mat_products.cuh"
#include "mul_mat.cuh"

namespace dflash {
namespace wgmma {

struct Buffers {
    const char * columns; // of a pass, as columns.cuh says
    float4 * parts;
    int * arrived; // how many parts of the rows of a warp are there
};

template <int N8> struct Result {
    static constexpr int AHEAD = 16 / N8; // parts that are read at a time, as registers allow
    const mm::Node & node;
    const mm::Cut & cut;
    const Buffers & buffers;
    int warp, lane;

    __device__ float4 * part(int64_t slot) const {
        return buffers.parts + (slot * (cut.height / mm::TILE) + warp) * (N8 * 32) + lane;
    }

    __device__ int first_share(int tile) const { return cut.share_of(tile * cut.n_blocks); }

    __device__ int last_share(int tile) const { return cut.share_of((tile + 1) * cut.n_blocks - 1); }

    __device__ void write(const mm::Sums<1, N8> & sums, int tile) const {
        const int row = tile * cut.height + warp * mm::TILE + lane / 4;
#pragma unroll
        for (int i = 0; i < N8 * 4; i++) {
            const int column = i / 4 * 8 + lane % 4 * 2 + i % 2, at = row + i % 4 / 2 * 8;
            if (column < node.n_columns && at < node.n_rows) {
                node.y[(int64_t) column * node.n_rows + at] = sums.of[0][i / 4][i % 4];
            }
        }
    }

    // The sums of a tile, or of a share's part of it.
    __device__ void put(const mm::Sums<1, N8> & sums, int tile, int share) const {
        if (first_share(tile) == last_share(tile)) {
            write(sums, tile);
            return;
        }
        float4 * to = part(cut.slot(share, tile));
#pragma unroll
        for (int i = 0; i < N8; i++) {
            const float (&x)[4] = sums.of[0][i];
            to[i * 32] = {x[0], x[1], x[2], x[3]};
        }
    }

    // Adds all parts of a tile and writes them.
    __device__ void add(int tile) const {
        const int first = first_share(tile), n = last_share(tile) - first + 1;
        const int64_t first_slot = cut.slot(first, tile); // the tile is the first one of all other shares
        mm::Sums<1, N8> sums;
        for (int begin = 0; begin < n; begin += AHEAD) {
            float4 parts[AHEAD][N8] = {};
#pragma unroll
            for (int i = 0; i < AHEAD * N8; i++) {
                if (begin + i / N8 < n) {
                    const int from = begin + i / N8;
                    parts[i / N8][i % N8] = part(from == 0 ? first_slot : 2 * (first + from))[i % N8 * 32];
                }
            }
#pragma unroll
            for (int i = 0; i < AHEAD * N8; i++) {
                float (&x)[4] = sums.of[0][i % N8];
                const float4 y = parts[i / N8][i % N8];
                x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
            }
        }
        write(sums, tile);
    }

    // Adds what this share's parts have made whole: of its first tile and of its last one, if these are cut.
    __device__ void finish(int share) const {
        const int begin = cut.first(share) / cut.n_blocks, end = (cut.first(share + 1) - 1) / cut.n_blocks;
        __threadfence();
        __syncwarp();
        bool is_whole = false;
        if (lane == 0 || (lane == 1 && begin != end)) {
            const int tile = lane == 0 ? begin : end, first = first_share(tile), last = last_share(tile);
            if (first != last) {
                int * arrived = buffers.arrived + tile * (MAX_HEIGHT / mm::TILE) + warp;
                is_whole = atomicAdd(arrived, 1) == last - first;
            }
        }
        const uint32_t whole = __ballot_sync(0xffffffff, is_whole);
        __threadfence();
#pragma unroll 1
        for (uint32_t left = whole; left != 0; left &= left - 1) {
            add(left & 1 ? begin : end);
        }
    }
};

} // namespace wgmma
} // namespace dflash
