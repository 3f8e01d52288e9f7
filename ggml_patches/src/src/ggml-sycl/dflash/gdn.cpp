// Gated delta rule with a replay log. See ggml-cpu/dflash/gdn.cpp for the formulas; the sums have its order.
//
// A state column needs nothing of another one. WIDTH work-items hold a column in registers, each every WIDTH-th key:
// the state is read once and written at most once, whatever number of rows runs in between. The two sums of a row, s .
// q and s . k of the next row, meet in local memory behind one barrier.

#include "kernels.hpp"
#include "numbers.hpp"

#include <cmath>

namespace dflash {

// A node of any of the three GDN sub-ops; sources that a sub-op does not have are empty.
struct Gdn {
    View q, k, v, g, beta, out;
    float *state, *log;
    const int32_t *slots, *n_pending, *n_rows = nullptr;
    int n_heads, n_key_heads = 1, n_block, n_slots, n_lanes, n_out = 0;
    float scale = 0.0f;
    bool keeps_log = false;

    Gdn(const ggml_tensor * state, const ggml_tensor * log, const ggml_tensor * slots, const ggml_tensor * n_pending)
        : state((float *) state->data), log((float *) log->data), slots(ints_of(slots)), n_pending(ints_of(n_pending)) {
        n_heads = (int) state->ne[2], n_block = (int) log->ne[2];
        n_slots = (int) state->ne[3], n_lanes = (int) slots->ne[0];
    }

    // Log row t of a head of a slot: gate, keys, deltas.
    template <int S> float * log_row(int slot, int head, int t) const {
        return log + (((int64_t) slot * n_block + t) * n_heads + head) * (2 * S + 1);
    }
};

// A lane with its counts; slot is -1 if it is padded.
struct GdnLane {
    int slot, n_replay = 0, n_rows = 0;

    GdnLane(const Gdn & node, int lane) {
        slot = owned_slot_of(node.slots, lane, node.n_slots);
        if (slot < 0) {
            return;
        }
        n_replay = node.n_pending[slot];
        n_rows = node.n_rows ? node.n_rows[lane] : node.n_out;
        if (n_replay < 0 || n_replay > node.n_block || n_rows < 0 || n_rows > node.n_out) {
            slot = -1, n_rows = 0;
        }
    }
};

constexpr int GDN_COLUMNS = 16; // of a work-group; divides every state width

template <int S> struct GdnColumns {
    static constexpr int N_KEYS = S / WIDTH; // of a work-item
    static constexpr int SIZE = GDN_COLUMNS * WIDTH;

    Gdn node;
    Local<float> parts; // two sums of the group, twice, so that one barrier a row is enough

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), head = (int) item.get_group(1);
        const int local = (int) item.get_local_id(2), part = local % WIDTH;
        const int j = (int) item.get_group(2) * GDN_COLUMNS + local / WIDTH;
        const GdnLane at(node, lane);
        if (part == 0) {
            for (int t = at.n_rows; t < node.n_out; t++) {
                node.out.template at<float>(head, t, lane)[j] = 0.0f;
            }
        }
        if (at.slot < 0) { // the whole group
            return;
        }

        float * stored = node.state + (((int64_t) at.slot * node.n_heads + head) * S + j) * S + part;
        float s[N_KEYS];
        for (int i = 0; i < N_KEYS; i++) {
            s[i] = stored[i * WIDTH];
        }
        replay(at, head, j, part, s);
        if (node.keeps_log && at.n_replay > 0) {
            store(stored, s);
        }
        if (at.n_rows > 0) {
            run_rows(item, at, lane, head, j, s);
        }
        if (!node.keeps_log && (at.n_replay > 0 || at.n_rows > 0)) {
            store(stored, s);
        }
    }

  private:
    static void store(float * stored, const float * s) {
        for (int i = 0; i < N_KEYS; i++) {
            stored[i * WIDTH] = s[i];
        }
    }

    void replay(const GdnLane & at, int head, int j, int part, float * s) const {
        for (int t = 0; t < at.n_replay; t++) {
            const float * row = node.template log_row<S>(at.slot, head, t);
            const float gate = row[0], delta = row[1 + S + j];
            for (int i = 0; i < N_KEYS; i++) {
                s[i] = sycl::fma(row[1 + i * WIDTH + part], delta, gate * s[i]);
            }
        }
    }

    void run_rows(Item item, const GdnLane & at, int lane, int head, int j, float * s) const {
        const int local = (int) item.get_local_id(2), part = local % WIDTH, column = local - part;
        const int key_head = head % node.n_key_heads;
        const auto read_keys = [&](int t, float * k) {
            const float * row = node.k.template at<float>(key_head, t, lane);
            for (int i = 0; i < N_KEYS; i++) {
                k[i] = row[i * WIDTH + part];
            }
        };

        float k[N_KEYS], k_next[N_KEYS];
        read_keys(0, k);
        float sum_k = 0.0f;
        for (int i = 0; i < N_KEYS; i++) {
            sum_k = sycl::fma(s[i], k[i], sum_k);
        }
        int buffer = 2 * SIZE;
        parts[buffer + local] = sum_k;
        sycl::group_barrier(item.get_group()); // from here on all have read the log rows that are written below
        float dot_k = tree(parts, buffer + column);

        for (int t = 0; t < at.n_rows; t++) {
            const float gate = exp_same(node.g.template at<float>(t, lane)[head]);
            const float beta = node.beta.template at<float>(t, lane)[head];
            const float v = node.v.template at<float>(head, t, lane)[j];
            const float delta = beta * sycl::fma(-gate, dot_k, v);
            const float * q = node.q.template at<float>(key_head, t, lane);
            read_keys(t + 1 < at.n_rows ? t + 1 : t, k_next);

            float sum_q = 0.0f;
            sum_k = 0.0f;
            for (int i = 0; i < N_KEYS; i++) {
                s[i] = sycl::fma(k[i], delta, gate * s[i]);
                sum_q = sycl::fma(s[i], q[i * WIDTH + part], sum_q);
                sum_k = sycl::fma(s[i], k_next[i], sum_k);
                k[i] = k_next[i];
            }
            buffer = t % 2 * 2 * SIZE;
            parts[buffer + local] = sum_q;
            parts[buffer + SIZE + local] = sum_k;
            sycl::group_barrier(item.get_group());
            dot_k = tree(parts, buffer + SIZE + column);
            if (part == 0) {
                node.out.template at<float>(head, t, lane)[j] = tree(parts, buffer + column) * node.scale;
                if (node.keeps_log) {
                    node.template log_row<S>(at.slot, head, t)[1 + S + j] = delta;
                }
            }
        }
    }
};

// The part of the log that columns share. Every column replays the old rows, so this comes behind GdnColumns.
template <int S> struct GdnKeys {
    Gdn node;

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), head = (int) item.get_group(1), t = (int) item.get_group(2);
        const int i = (int) item.get_local_id(2);
        const GdnLane at(node, lane);
        if (at.slot < 0) {
            return;
        }
        float * row = node.template log_row<S>(at.slot, head, t);
        row[1 + i] = node.k.template at<float>(head % node.n_key_heads, t, lane)[i];
        if (i == 0) {
            row[0] = exp_same(node.g.template at<float>(t, lane)[head]);
        }
    }
};

namespace {

template <int S> void run(ggml_backend_sycl_context & ctx, Gdn node) {
    node.scale = 1.0f / std::sqrt((float) S);
    launch(ctx, node.n_lanes, node.n_heads, S / GDN_COLUMNS, GdnColumns<S>::SIZE, [&](sycl::handler & handler) {
        return GdnColumns<S>{node, Local<float>(4 * GdnColumns<S>::SIZE, handler)};
    });
    if (node.keeps_log) {
        launch(ctx, node.n_lanes, node.n_heads, node.n_out, S, [&](sycl::handler &) { return GdnKeys<S>{node}; });
    }
}

void run_any(ggml_backend_sycl_context & ctx, int64_t width, const Gdn & node) {
    switch (width) {
#define RUN(S)                                                                                                         \
    case S:                                                                                                            \
        return run<S>(ctx, node);
        GGML_DFLASH_STATE_WIDTHS(RUN)
#undef RUN
    }
    GGML_ABORT("state width %d is refused by ggml_dflash_check", (int) width);
}

Gdn read_node(const ggml_tensor * dst) {
    Gdn node(dst->src[5], dst->src[6], dst->src[7], dst->src[8]);
    node.q = View(dst->src[0]), node.k = View(dst->src[1]), node.v = View(dst->src[2]);
    node.g = View(dst->src[3]), node.beta = View(dst->src[4]), node.out = View(dst);
    node.n_rows = ints_of(dst->src[9]);
    node.n_key_heads = (int) dst->src[0]->ne[1];
    node.n_out = (int) dst->ne[2];
    return node;
}

} // namespace

void gdn_verify(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    Gdn node = read_node(dst);
    node.keeps_log = true;
    run_any(ctx, dst->ne[0], node);
}

void gdn_advance(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    run_any(ctx, dst->ne[0], read_node(dst));
}

void gdn_commit(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    run_any(ctx, dst->ne[0], Gdn(dst->src[0], dst->src[1], dst->src[2], dst->src[3]));
}

} // namespace dflash
