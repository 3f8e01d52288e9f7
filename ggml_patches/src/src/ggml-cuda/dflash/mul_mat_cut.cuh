#pragma once

// mul_mat: who does what.
//
// The rows of weights are cut into tiles of `height`; the super-blocks of a tile, tile by tile, are dealt to the blocks
// in equal shares. Where a share ends within a tile, its sums are a part of that tile's, and whoever brings the last
// part adds all of them, in the order of K. Shares follow from the shape of the weights and the device alone. So does
// the order of every sum: the number of columns has no part in it.

#include "mul_mat_format.cuh"

namespace dflash {
namespace mm {

struct Cut {
    int height, n_blocks, n_shares;
    int64_t n_units; // super-blocks of tiles

    // unit where a share begins
    __host__ __device__ int64_t first(int64_t share) const { return n_units * share / n_shares; }

    __host__ __device__ int share_of(int64_t unit) const { return (int) (((unit + 1) * n_shares - 1) / n_units); }

    // Where a share's part of a tile is put. A share has at most two that are not whole tiles: its first and its last.
    __host__ __device__ int64_t slot(int share, int tile) const {
        return 2 * (int64_t) share + (tile != first(share) / n_blocks);
    }
};

// The equal shares that take the shortest time: a unit costs its rows, and as much as 32 of them for its columns.
inline Cut make_cut(const Node & node, int max_height, int max_shares) {
    Cut best = {};
    int64_t best_cost = INT64_MAX;
    for (int height = max_height; height >= HEIGHT_STEP; height -= HEIGHT_STEP) {
        const int64_t n_units = (int64_t) ((node.n_rows + height - 1) / height) * node.n_blocks;
        const int n_shares = (int) (n_units < max_shares ? n_units : max_shares);
        const int64_t cost = (n_units + n_shares - 1) / n_shares * (height + 32);
        if (cost < best_cost) {
            best_cost = cost;
            best = {height, node.n_blocks, n_shares, n_units};
        }
    }
    return best;
}

// Up to SIZE super-blocks of one tile; those of a share in order.
template <int SIZE> struct Batch {
    int left; // units of the share from here on
    int tile, block, n_blocks;

    __device__ Batch(const Cut & cut, int share) : n_blocks(cut.n_blocks) {
        const int64_t begin = cut.first(share);
        left = (int) (cut.first(share + 1) - begin);
        tile = (int) (begin / n_blocks);
        block = (int) (begin % n_blocks);
    }

    __device__ int count() const { return min(min(SIZE, n_blocks - block), left); }

    __device__ bool ends_part() const { return block + count() == n_blocks || left == count(); }

    __device__ void advance() {
        const int n = count();
        left -= n;
        block += n;
        if (block == n_blocks) {
            block = 0;
            tile++;
        }
    }
};

} // namespace mm
} // namespace dflash
