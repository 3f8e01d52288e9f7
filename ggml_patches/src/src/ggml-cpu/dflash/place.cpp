// Where the rows of a run stand: their tokens, positions and physical rows, out of what the slots keep.

#include "dflash/kernels.h"

namespace dflash {
namespace {

constexpr int64_t PAGE = GGML_DFLASH_PAGE_ROWS;

struct Place {
    const int32_t *slots, *n_rows, *base, *history, *table, *ring; // ring may be NULL
    int64_t L, N, C, M, R, T;
    int32_t fill, spare, ring_spare;
    int32_t *tokens, *positions, *rows, *ring_rows, *lane_base; // planes of the result; the rows of a lane together

    explicit Place(const ggml_tensor * dst) {
        const auto ints = [&](int i) { return (const int32_t *) (dst->src[i] ? dst->src[i]->data : nullptr); };
        slots = ints(0), n_rows = ints(1), base = ints(2), history = ints(3), table = ints(4), ring = ints(5);
        L = dst->src[0]->ne[0], C = dst->src[3]->ne[0], N = dst->src[3]->ne[1], M = dst->src[4]->ne[0];
        R = ring ? dst->src[5]->ne[0] : M;
        T = dst->op_params[1], fill = dst->op_params[2], spare = dst->op_params[3], ring_spare = dst->op_params[4];
        tokens = (int32_t *) dst->data, positions = tokens + T * L, rows = positions + T * L;
        ring_rows = ring ? rows + T * L : nullptr;
        lane_base = rows + (ring ? 2 : 1) * T * L;
    }

    // how many positions of a slot have a place everywhere
    int64_t n_positions() const {
        const int64_t in_pages = (M < R ? M : R) * PAGE;
        return C < in_pages ? C : in_pages;
    }
};

// Physical row of position p of a slot; pages is a table of `size` pages a slot.
int32_t row_of(const int32_t * pages, int64_t size, int64_t slot, int64_t p) {
    return (int32_t) (pages[slot * size + p / PAGE] * PAGE + p % PAGE);
}

// Of a lane that is not live: slot and base -1, no live rows.
struct Lane {
    int64_t slot, base = -1, n_live = 0;

    Lane(const Place & node, int64_t lane) {
        const int64_t n_rows = node.n_rows[lane];
        slot = owned_slot_of(node.slots, lane, node.N);
        if (slot < 0 || n_rows < 0 || n_rows > node.T || node.base[slot] < 0) {
            slot = -1;
            return;
        }
        base = node.base[slot];
        const int64_t left = node.n_positions() - base;
        n_live = n_rows < left ? n_rows : left;
    }
};

void place_lane(const Place & node, int64_t lane) {
    const Lane at_lane(node, lane);
    node.lane_base[lane] = (int32_t) at_lane.base;
    for (int64_t t = 0; t < node.T; t++) {
        const int64_t i = lane * node.T + t, p = at_lane.base + t;
        const bool live = t < at_lane.n_live;
        const bool is_known = live && (t == 0 || node.fill < 0);
        const int32_t token = is_known ? node.history[at_lane.slot * node.C + p] : node.fill;
        const int32_t spare = (int32_t) (t % PAGE);
        node.tokens[i] = live && token > 0 ? token : 0;
        node.positions[i] = live ? (int32_t) p : 0;
        node.rows[i] = live ? row_of(node.table, node.M, at_lane.slot, p) : node.spare + spare;
        if (node.ring) {
            node.ring_rows[i] = live ? row_of(node.ring, node.R, at_lane.slot, p) : node.ring_spare + spare;
        }
    }
}

} // namespace

void place(const ggml_compute_params * params, ggml_tensor * dst) {
    const Place node(dst);
    const Share share(node.L, params);
    for (int64_t lane = share.begin; lane < share.end; lane++) {
        place_lane(node, lane);
    }
}

} // namespace dflash
