// Where the rows of a run stand: token, position and physical rows of each, from the slots' memory. A row is one
// work-item's.

#include "kernels.hpp"

#include <algorithm>

namespace dflash {

struct PlaceRows {
    const int32_t *slots, *n_rows, *base;
    View history, table, ring; // ring may be nothing
    int32_t * out;
    int T, n_lanes, n_slots;
    int n_positions; // for which there is history, and a page in each table
    int fill, spare, ring_spare;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(1), t = (int) item.get_global_id(2);
        if (t >= T) {
            return;
        }
        const int slot = owned_slot_of(slots, lane, n_slots);
        const bool is_live = slot >= 0 && n_rows[lane] >= 0 && n_rows[lane] <= T && base[slot] >= 0;
        const int first = is_live ? base[slot] : -1;
        const int64_t position = (int64_t) first + t;
        const bool is_row = is_live && t < n_rows[lane] && position < n_positions;

        const int n = T * n_lanes, at = lane * T + t, p = is_row ? (int) position : 0;
        int token = 0;
        if (is_row) {
            token = t == 0 || fill < 0 ? history.at<int32_t>(slot)[p] : fill;
            token = token > 0 ? token : 0;
        }
        const int spare_row = t % GGML_DFLASH_PAGE_ROWS;
        out[at] = token;
        out[n + at] = p;
        out[2 * n + at] = is_row ? page_row(table.at<int32_t>(slot), p) : spare + spare_row;
        if (ring.data) {
            out[3 * n + at] = is_row ? page_row(ring.at<int32_t>(slot), p) : ring_spare + spare_row;
        }
        if (t == 0) {
            out[(ring.data ? 4 : 3) * n + lane] = first;
        }
    }

  private:
    static int page_row(const int32_t * pages, int position) {
        return pages[position / GGML_DFLASH_PAGE_ROWS] * GGML_DFLASH_PAGE_ROWS + position % GGML_DFLASH_PAGE_ROWS;
    }
};

void place(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    const ggml_tensor *history = dst->src[3], *table = dst->src[4], *ring = dst->src[5];
    const int64_t n_pages = ring ? std::min(table->ne[0], ring->ne[0]) : table->ne[0];
    PlaceRows kernel;
    kernel.slots = ints_of(dst->src[0]), kernel.n_rows = ints_of(dst->src[1]), kernel.base = ints_of(dst->src[2]);
    kernel.history = View(history), kernel.table = View(table), kernel.ring = View(ring);
    kernel.out = ints_of(dst);
    kernel.T = dst->op_params[1], kernel.fill = dst->op_params[2];
    kernel.spare = dst->op_params[3], kernel.ring_spare = dst->op_params[4];
    kernel.n_lanes = (int) dst->src[0]->ne[0], kernel.n_slots = (int) history->ne[1];
    kernel.n_positions = (int) std::min(history->ne[0], n_pages * GGML_DFLASH_PAGE_ROWS);
    const int n_groups = (kernel.T + GROUP_SIZE - 1) / GROUP_SIZE;
    launch(ctx, 1, kernel.n_lanes, n_groups, GROUP_SIZE, [&](sycl::handler &) { return kernel; });
}

} // namespace dflash
