// What of a verified block counts: the rows up to the first whose token is not what the draft proposed. A lane is one
// work-item's.

#include "kernels.hpp"

namespace dflash {

struct AcceptLanes {
    View tokens, proposals, out;
    const int32_t *n_rows, *slots;
    int32_t *n_pending, *anchors;
    int n_lanes, n_slots, T;

    void operator()(Item item) const {
        const int lane = (int) item.get_global_id(2);
        if (lane >= n_lanes) {
            return;
        }
        const int32_t * drawn = tokens.at<int32_t>(lane);
        const int slot = owned_slot_of(slots, lane, n_slots);
        const bool is_live = slot >= 0 && n_rows[lane] >= 0 && n_rows[lane] <= T;
        const int n = is_live ? count_final(drawn, proposals.at<int32_t>(lane), n_rows[lane]) : 0;

        int32_t * result = out.at<int32_t>(lane);
        result[0] = n;
        for (int t = 0; t < T; t++) {
            result[1 + t] = t < n ? drawn[t] : -1;
        }
        if (is_live) {
            n_pending[slot] = n;
        }
        if (n > 0) {
            anchors[slot] = drawn[n - 1];
        }
    }

  private:
    // Leading rows whose token is final. Of proposals, the first n_live - 1 are read.
    static int count_final(const int32_t * drawn, const int32_t * proposed, int n_live) {
        int n = 0;
        while (n < n_live && drawn[n] != -1) {
            n++;
            if (n == n_live || drawn[n - 1] != proposed[n - 1]) {
                break;
            }
        }
        return n;
    }
};

void accept(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    AcceptLanes kernel;
    kernel.tokens = View(dst->src[0]), kernel.proposals = View(dst->src[5]), kernel.out = View(dst);
    kernel.n_rows = ints_of(dst->src[1]), kernel.slots = ints_of(dst->src[2]);
    kernel.n_pending = ints_of(dst->src[3]), kernel.anchors = ints_of(dst->src[4]);
    kernel.T = (int) dst->src[0]->ne[0], kernel.n_lanes = (int) dst->src[0]->ne[1];
    kernel.n_slots = (int) dst->src[3]->ne[0];
    launch(ctx, 1, 1, 1, GGML_DFLASH_MAX_LANES, [&](sycl::handler &) { return kernel; });
}

} // namespace dflash
