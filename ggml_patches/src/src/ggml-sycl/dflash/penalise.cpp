// What the logits of a row lose or gain before its token is drawn: a bias of single ids, then the penalties of every id
// that the row's past holds. A row is one work-group's. An id of the past counts once: a bitmap in local memory
// remembers which have been met, a window of ids at a time, and whoever meets an id first changes its logit.

#include "kernels.hpp"
#include "numbers.hpp"

namespace dflash {

struct PenaliseRows {
    static constexpr int WINDOW = 1 << 18; // ids of the bitmap, 32 KiB

    View logits, block, history, penalties, bias;
    const int32_t *base, *n_rows, *slots;
    int V, T, n_slots, n_history, n_bias;
    Local<uint32_t> met;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), t = (int) item.get_group(1);
        const int slot = slot_of(slots, lane, n_slots);
        if (slot < 0 || n_rows[lane] > T || t >= n_rows[lane] || base[lane] < 0) {
            return;
        }
        float * x = logits.at<float>(t, lane);
        add_bias(item, x, bias.at<int32_t>(0, slot));
        const float repetition = penalties.at<float>(slot)[0], presence = penalties.at<float>(slot)[1];
        if (repetition == 1.0f && presence == 0.0f) {
            return;
        }
        const int n_past = base[lane] < n_history ? base[lane] + 1 : n_history;
        const int local = (int) item.get_local_id(2);
        for (int first = 0; first < V; first += WINDOW) {
            const int n_ids = V - first < WINDOW ? V - first : WINDOW;
            sycl::group_barrier(item.get_group()); // the biases are in, the window before is done
            for (int i = local; i < (n_ids + 31) / 32; i += GROUP_SIZE) {
                met[i] = 0;
            }
            sycl::group_barrier(item.get_group());
            const auto visit = [&](const int32_t * ids, int n) {
                for (int i = local; i < n; i += GROUP_SIZE) {
                    const int id = ids[i];
                    if (id >= first && id - first < n_ids && meet(id - first)) {
                        const float scaled = x[id] > 0.0f ? divide(x[id], repetition) : x[id] * repetition;
                        x[id] = scaled - presence;
                    }
                }
            };
            visit(history.at<int32_t>(slot), n_past);
            visit(block.at<int32_t>(lane) + 1, t); // the row's own block up to the row; 0 is the anchor
        }
    }

  private:
    // Adds the pairs (id, F32 bits) before the first whose id is negative.
    void add_bias(Item item, float * x, const int32_t * pairs) const {
        if (pairs[0] < 0) {
            return;
        }
        const int local = (int) item.get_local_id(2);
        int end = n_bias;
        for (int i = local; i < end; i += GROUP_SIZE) {
            end = pairs[2 * i] < 0 ? i : end;
        }
        end = sycl::reduce_over_group(item.get_group(), end, sycl::minimum<int>());
        for (int i = local; i < end; i += GROUP_SIZE) {
            const int id = pairs[2 * i];
            if (id < V) {
                x[id] = x[id] + float_of((uint32_t) pairs[2 * i + 1]);
            }
        }
    }

    // True for the first of the group that asks for this bit of the bitmap.
    bool meet(int i) const {
        const uint32_t bit = 1u << (i % 32);
        const sycl::atomic_ref<uint32_t, sycl::memory_order::relaxed, sycl::memory_scope::work_group,
                               sycl::access::address_space::local_space>
            word(met[i / 32]);
        return (word.fetch_or(bit) & bit) == 0;
    }
};

void penalise(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    const ggml_tensor *logits = dst->src[0], *history = dst->src[5];
    const int T = (int) logits->ne[1], L = (int) logits->ne[2];
    launch(ctx, L, T, 1, GROUP_SIZE, [&](sycl::handler & handler) {
        return PenaliseRows{View(logits),
                            View(dst->src[1]),
                            View(history),
                            View(dst->src[6]),
                            View(dst->src[7]),
                            ints_of(dst->src[2]),
                            ints_of(dst->src[3]),
                            ints_of(dst->src[4]),
                            (int) logits->ne[0],
                            T,
                            (int) history->ne[1],
                            (int) history->ne[0],
                            (int) dst->src[7]->ne[1],
                            Local<uint32_t>(PenaliseRows::WINDOW / 32, handler)};
    });
}

} // namespace dflash
