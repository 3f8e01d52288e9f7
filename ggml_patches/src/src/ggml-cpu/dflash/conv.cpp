// Causal depthwise convolution of K taps + SiLU with the kept rows of a slot.
//
// Per channel: in = window ++ x, y[t] = silu(w[0]*in[t] + ... + w[K-1]*in[t+K-1]), summed in this order. Channels need
// nothing of each other: a block of them is run with its window and taps in local arrays.

#include "dflash/kernels.h"

namespace dflash {
namespace {

constexpr int K = GGML_DFLASH_CONV_TAPS;
constexpr int CHANNELS = 128; // run together

// A node of any of the three conv sub-ops; sources that a sub-op does not have are NULL.
struct Conv {
    const ggml_tensor *x = nullptr, *w = nullptr;
    const ggml_tensor *rows, *slots, *n_pending;
    const ggml_tensor * n_rows = nullptr;
    ggml_tensor * out = nullptr;
    bool keeps_block = false; // verify: all new rows are kept, else only the last K-1 live ones

    int64_t n_channels() const { return rows->ne[0]; }
    int64_t n_out() const { return out ? out->ne[1] : 0; }
};

struct Lane {
    int64_t slot;
    int64_t n_pending = 0, n_rows = 0;

    Lane(const Conv & node, int64_t lane) {
        slot = owned_slot_of((const int32_t *) node.slots->data, lane, node.rows->ne[2]);
        if (slot < 0) {
            return;
        }
        n_pending = ((const int32_t *) node.n_pending->data)[slot];
        n_rows = node.n_rows ? ((const int32_t *) node.n_rows->data)[lane] : node.n_out();
        if (n_pending < 0 || n_pending > node.rows->ne[1] - (K - 1) || n_rows < 0 || n_rows > node.n_out()) {
            slot = -1;
        }
    }
};

// y[c] = silu(sum_j w[j][c] * in[j][c]) for WIDTH channels; the rows of w are CHANNELS apart
void convolve(const float * w, const float * const * in, float * y) {
    Vec8 sum = Vec8::load(w) * Vec8::load(in[0]);
    for (int j = 1; j < K; j++) {
        sum = fma(Vec8::load(w + j * CHANNELS), Vec8::load(in[j]), sum);
    }
    const Vec8 one = Vec8::all(1.0f);
    (sum / (one + exp(Vec8::all(0.0f) - sum))).store(y);
}

// The same for n <= CHANNELS channels.
void convolve_row(const float * w, const float * const * in, float * y, int n) {
    const float * at[K];
    int c = 0;
    for (; c + WIDTH <= n; c += WIDTH) {
        for (int j = 0; j < K; j++) {
            at[j] = in[j] + c;
        }
        convolve(w + c, at, y + c);
    }
    if (c < n) { // the last few, filled up with zeros
        float rest[K][WIDTH] = {}, rest_y[WIDTH];
        for (int j = 0; j < K; j++) {
            std::memcpy(rest[j], in[j] + c, (n - c) * sizeof(float));
            at[j] = rest[j];
        }
        convolve(w + c, at, rest_y);
        std::memcpy(y + c, rest_y, (n - c) * sizeof(float));
    }
}

// Channels first..first+n-1 of one lane.
void run_channels(const Conv & node, int64_t lane, int64_t first, int n) {
    const size_t size = n * sizeof(float);
    const Lane at_lane(node, lane);
    const int64_t n_live = at_lane.slot < 0 ? 0 : at_lane.n_rows;
    for (int64_t t = n_live; t < node.n_out(); t++) {
        std::memset(at<float>(node.out, t, lane) + first, 0, size);
    }
    if (at_lane.slot < 0) {
        return;
    }
    const auto kept = [&](int64_t row) { return at<float>(node.rows, row, at_lane.slot) + first; };
    const auto x = [&](int64_t t) { return at<float>(node.x, t, lane) + first; };

    alignas(64) float window[K - 1][CHANNELS];
    for (int j = 0; j < K - 1; j++) {
        std::memcpy(window[j], kept(at_lane.n_pending + j), size);
    }

    alignas(64) float w[K][CHANNELS] = {};
    if (n_live > 0) {
        for (int c = 0; c < n; c++) {
            for (int j = 0; j < K; j++) {
                w[j][c] = ((const float *) node.w->data)[(first + c) * K + j];
            }
        }
    }
    for (int64_t t = 0; t < n_live; t++) {
        const float * in[K];
        for (int j = 0; j < K; j++) {
            in[j] = t + j < K - 1 ? window[t + j] : x(t + j - (K - 1));
        }
        convolve_row(w[0], in, at<float>(node.out, t, lane) + first, n);
    }

    // keep rows first_kept.. of window ++ x
    const int64_t first_kept = node.keeps_block ? 0 : n_live;
    const int64_t n_kept = node.keeps_block ? K - 1 + n_live : K - 1;
    for (int64_t i = 0; i < n_kept; i++) {
        const int64_t from = first_kept + i;
        std::memcpy(kept(i), from < K - 1 ? window[from] : x(from - (K - 1)), size);
    }
}

void run(const ggml_compute_params * params, const Conv & node) {
    const int64_t n_blocks = (node.n_channels() + CHANNELS - 1) / CHANNELS;
    const Share share(n_blocks * node.slots->ne[0], params);
    for (int64_t i = share.begin; i < share.end; i++) {
        const int64_t first = i % n_blocks * CHANNELS;
        const int64_t left = node.n_channels() - first;
        run_channels(node, i / n_blocks, first, (int) (left < CHANNELS ? left : CHANNELS));
    }
}

Conv read_node(ggml_tensor * dst) {
    Conv node;
    node.x = dst->src[0], node.w = dst->src[1];
    node.rows = dst->src[2], node.slots = dst->src[3], node.n_pending = dst->src[4];
    node.n_rows = dst->src[5];
    node.out = dst;
    return node;
}

} // namespace

void conv_verify(const ggml_compute_params * params, ggml_tensor * dst) {
    Conv node = read_node(dst);
    node.keeps_block = true;
    run(params, node);
}

void conv_advance(const ggml_compute_params * params, ggml_tensor * dst) {
    run(params, read_node(dst));
}

void conv_commit(const ggml_compute_params * params, ggml_tensor * dst) {
    Conv node;
    node.rows = dst->src[0], node.slots = dst->src[1], node.n_pending = dst->src[2];
    run(params, node);
}

} // namespace dflash
