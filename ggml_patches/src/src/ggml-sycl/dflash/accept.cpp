// What of a verified block counts: the rows up to the first whose token is not what the draft proposed. The slot's
// history grows by their tokens. A lane is one work-item's.

#include "kernels.hpp"

namespace dflash {

struct AcceptLanes {
    View tokens, block, history, out;
    const int32_t *n_rows, *slots;
    int32_t *n_pending, *base;
    int n_lanes, n_slots, n_history, T;

    void operator()(Item item) const {
        const int lane = (int) item.get_global_id(2);
        if (lane >= n_lanes) {
            return;
        }
        const int32_t * drawn = tokens.at<int32_t>(lane);
        const int slot = owned_slot_of(slots, lane, n_slots);
        const int anchor = slot >= 0 ? base[slot] : -1;
        const bool is_live = anchor >= 0 && n_rows[lane] >= 0 && n_rows[lane] <= T;
        const int n = is_live ? count_final(drawn, block.at<int32_t>(lane), n_rows[lane]) : 0;

        int32_t * result = out.at<int32_t>(lane);
        result[0] = n;
        for (int t = 0; t < T; t++) {
            result[1 + t] = t < n ? drawn[t] : -1;
        }
        if (is_live) {
            for (int t = 0; t < n && t < n_history - 1 - anchor; t++) {
                history.at<int32_t>(slot)[anchor + 1 + t] = drawn[t];
            }
            n_pending[slot] = n;
            base[slot] = anchor + n;
        }
    }

  private:
    // Leading rows whose token is final; what was proposed for row t of tokens is row t + 1 of the block.
    static int count_final(const int32_t * drawn, const int32_t * block, int n_live) {
        int n = 0;
        while (n < n_live && drawn[n] != -1) {
            n++;
            if (n == n_live || drawn[n - 1] != block[n]) {
                break;
            }
        }
        return n;
    }
};

void accept(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    AcceptLanes kernel;
    kernel.tokens = View(dst->src[0]), kernel.block = View(dst->src[1]), kernel.out = View(dst);
    kernel.n_rows = ints_of(dst->src[2]), kernel.slots = ints_of(dst->src[3]);
    kernel.n_pending = ints_of(dst->src[4]), kernel.base = ints_of(dst->src[5]), kernel.history = View(dst->src[6]);
    kernel.T = (int) dst->src[0]->ne[0], kernel.n_lanes = (int) dst->src[0]->ne[1];
    kernel.n_history = (int) dst->src[6]->ne[0], kernel.n_slots = (int) dst->src[6]->ne[1];
    launch(ctx, 1, 1, 1, GGML_DFLASH_MAX_LANES, [&](sycl::handler &) { return kernel; });
}

} // namespace dflash
