// Causal depthwise convolution of K taps + SiLU with the kept rows of a slot: a channel is one work-item's, which runs
// through the rows with the window in registers. See ggml-cpu/dflash/conv.cpp.

#include "kernels.hpp"
#include "numbers.hpp"

namespace dflash {
namespace {

constexpr int K = GGML_DFLASH_CONV_TAPS;

} // namespace

// A node of any of the three conv sub-ops; sources that a sub-op does not have are empty.
struct Conv {
    View x, rows, out;
    const float * w = nullptr;
    const int32_t *slots, *n_pending, *n_rows = nullptr;
    int n_channels, n_block, n_slots, n_lanes, n_out = 0;
    bool keeps_block = false; // verify: all new rows are kept, else only the last K-1 live ones

    Conv(const ggml_tensor * rows, const ggml_tensor * slots, const ggml_tensor * n_pending)
        : rows(rows), slots(ints_of(slots)), n_pending(ints_of(n_pending)) {
        n_channels = (int) rows->ne[0], n_block = (int) rows->ne[1] - (K - 1), n_slots = (int) rows->ne[2];
        n_lanes = (int) slots->ne[0];
    }
};

struct ConvChannels {
    Conv node;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0);
        const int c = (int) item.get_global_id(2);
        if (c >= node.n_channels) {
            return;
        }
        int slot = owned_slot_of(node.slots, lane, node.n_slots);
        const int n_pending = slot < 0 ? 0 : node.n_pending[slot];
        const int n_rows = node.n_rows ? node.n_rows[lane] : node.n_out;
        if (n_pending < 0 || n_pending > node.n_block || n_rows < 0 || n_rows > node.n_out) {
            slot = -1;
        }
        const int n_live = slot < 0 ? 0 : n_rows;
        for (int t = n_live; t < node.n_out; t++) {
            node.out.at<float>(t, lane)[c] = 0.0f;
        }
        if (slot >= 0) {
            run(lane, slot, n_pending, n_live, c);
        }
    }

  private:
    float * kept(int row, int slot, int c) const { return node.rows.at<float>(row, slot) + c; }

    void run(int lane, int slot, int n_pending, int n_live, int c) const {
        float in[K] = {}, w[K] = {};
        for (int j = 0; j < K - 1; j++) {
            in[j] = *kept(n_pending + j, slot, c);
        }
        for (int j = 0; j < K && n_live > 0; j++) {
            w[j] = node.w[(int64_t) c * K + j];
        }
        if (node.keeps_block) {
            for (int j = 0; j < K - 1; j++) {
                *kept(j, slot, c) = in[j];
            }
        }
        for (int t = 0; t < n_live; t++) {
            in[K - 1] = node.x.at<float>(t, lane)[c];
            float sum = w[0] * in[0];
            for (int j = 1; j < K; j++) {
                sum = sycl::fma(w[j], in[j], sum);
            }
            node.out.at<float>(t, lane)[c] = divide(sum, 1.0f + exp_same(0.0f - sum));
            if (node.keeps_block) {
                *kept(K - 1 + t, slot, c) = in[K - 1];
            }
            for (int j = 0; j < K - 1; j++) {
                in[j] = in[j + 1];
            }
        }
        if (!node.keeps_block) {
            for (int j = 0; j < K - 1; j++) {
                *kept(j, slot, c) = in[j];
            }
        }
    }
};

namespace {

void run(ggml_backend_sycl_context & ctx, const Conv & node) {
    const int n_groups = (node.n_channels + GROUP_SIZE - 1) / GROUP_SIZE;
    launch(ctx, node.n_lanes, 1, n_groups, GROUP_SIZE, [&](sycl::handler &) { return ConvChannels{node}; });
}

Conv read_node(const ggml_tensor * dst) {
    Conv node(dst->src[2], dst->src[3], dst->src[4]);
    node.x = View(dst->src[0]), node.out = View(dst);
    node.w = (const float *) dst->src[1]->data;
    node.n_rows = ints_of(dst->src[5]);
    node.n_out = (int) dst->ne[1];
    return node;
}

} // namespace

void conv_verify(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    Conv node = read_node(dst);
    node.keeps_block = true;
    run(ctx, node);
}

void conv_advance(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    run(ctx, read_node(dst));
}

void conv_commit(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    run(ctx, Conv(dst->src[0], dst->src[1], dst->src[2]));
}

} // namespace dflash
