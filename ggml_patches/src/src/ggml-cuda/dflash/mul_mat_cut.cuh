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
    int share, n_longer; // super-blocks of tiles in a share; the first n_longer shares have one more

    __host__ __device__ int n_units() const { return n_shares * share + n_longer; }

    // unit where a share begins
    __device__ int first(int of) const { return of * share + min(of, n_longer); }

    __device__ int share_of(int unit) const {
        const int in_longer = n_longer * (share + 1);
        return unit < in_longer ? unit / (share + 1) : n_longer + (unit - in_longer) / share;
    }

    // Where a share's part of a tile is put. A share has at most two that are not whole tiles: its first and its last.
    __device__ int64_t slot(int of, int tile) const { return 2 * (int64_t) of + (tile != first(of) / n_blocks); }
};

// The equal shares that take the shortest time, of heights that are multiples of `step`: a unit costs its rows, and as
// much as unit_cost of them for what is the same for all.
inline Cut make_cut(const Node & node, int max_height, int step, int unit_cost, int max_shares) {
    Cut best = {};
    int64_t best_cost = INT64_MAX;
    for (int height = max_height; height >= step; height -= step) {
        const int n_units = (node.n_rows + height - 1) / height * node.n_blocks;
        const int n_shares = n_units < max_shares ? n_units : max_shares;
        const int64_t cost = (int64_t) ((n_units + n_shares - 1) / n_shares) * (height + unit_cost);
        if (cost < best_cost) {
            best_cost = cost;
            best = {height, node.n_blocks, n_shares, n_units / n_shares, n_units % n_shares};
        }
    }
    return best;
}

// Up to SIZE super-blocks of one tile; those of a share in order.
template <int SIZE> struct Batch {
    int left; // units of the share from here on
    int tile, block, n_blocks;

    __device__ Batch(const Cut & cut, int share) : n_blocks(cut.n_blocks) {
        const int begin = cut.first(share);
        left = cut.first(share + 1) - begin;
        tile = begin / n_blocks;
        block = begin % n_blocks;
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
