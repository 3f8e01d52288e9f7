// Gated delta rule with a replay log.
//
// Per value column j of a head, with s the column (S keys), all in F32:
//     delta = beta * (v_j - gate * (s . k))       gate = exp(g)
//     s_i   = fma(k_i, delta, gate * s_i)
//     o_j   = (s . q) / sqrt(S)
// A column needs nothing of another column. So a GROUP of them is loaded, all pending and all new rows are run on it
// while it stays in the first-level cache, and the state is read once and written at most once. Within the group
// COLUMNS at a time share the loads of k and q; the sums of some finish while the next are multiplied.

#include "dflash/kernels.h"

namespace dflash {
namespace {

constexpr int COLUMNS = 4;                  // as many as the registers hold
constexpr int GROUP = 8;                    // a multiple of COLUMNS that divides every state width
constexpr int ROWS = GGML_DFLASH_MAX_BLOCK; // rows run on a group before the next group's turn

// One log row of a head: gate, S keys, S deltas.
template <int S> struct LogRow {
    float gate, k[S], delta[S];
};

// Log rows on columns j.. of the state, held in s.
template <int S> void replay(float (*s)[S], const LogRow<S> * log, int64_t row_stride, int n_rows, int j) {
    for (int i = 0; i < S; i += WIDTH) {
        Vec8 s_i[COLUMNS];
        for (int m = 0; m < COLUMNS; m++) {
            s_i[m] = Vec8::load(&s[m][i]);
        }
        for (int t = 0; t < n_rows; t++) {
            const LogRow<S> & row = log[t * row_stride];
            const Vec8 gate = Vec8::all(row.gate), k_i = Vec8::load(row.k + i);
            for (int m = 0; m < COLUMNS; m++) {
                s_i[m] = fma(k_i, Vec8::all(row.delta[j + m]), gate * s_i[m]);
            }
        }
        for (int m = 0; m < COLUMNS; m++) {
            s_i[m].store(&s[m][i]);
        }
    }
}

// dot[m] = s_m . k
template <int S> void dots(const float (*s)[S], const float * k, float * dot) {
    const Vec8 zero = Vec8::all(0);
    Vec8 acc[COLUMNS] = {zero, zero, zero, zero};
    for (int i = 0; i < S; i += WIDTH) {
        const Vec8 k_i = Vec8::load(k + i);
        for (int m = 0; m < COLUMNS; m++) {
            acc[m] = fma(Vec8::load(&s[m][i]), k_i, acc[m]);
        }
    }
    sum4(acc, dot);
}

// The transition of one row, and in the same pass s . q of this row and s . k of the next one.
template <int S>
void step(float (*s)[S], float gate, const float * k, const float * delta, const float * q, const float * k_next,
          float * dot_q, float * dot_k_next) {
    const Vec8 zero = Vec8::all(0), g = Vec8::all(gate);
    Vec8 acc_q[COLUMNS] = {zero, zero, zero, zero};
    Vec8 acc_k[COLUMNS] = {zero, zero, zero, zero};
    for (int i = 0; i < S; i += WIDTH) {
        const Vec8 k_i = Vec8::load(k + i), q_i = Vec8::load(q + i), next_i = Vec8::load(k_next + i);
        for (int m = 0; m < COLUMNS; m++) {
            const Vec8 s_i = fma(k_i, Vec8::all(delta[m]), g * Vec8::load(&s[m][i]));
            s_i.store(&s[m][i]);
            acc_q[m] = fma(s_i, q_i, acc_q[m]);
            acc_k[m] = fma(s_i, next_i, acc_k[m]);
        }
    }
    sum4(acc_q, dot_q);
    sum4(acc_k, dot_k_next);
}

// Up to ROWS rows of one head of one lane.
struct Rows {
    int n;
    float gate[ROWS], beta[ROWS];
    const float * q[ROWS];
    const float * k[ROWS];
    const float * v[ROWS];
    float * out[ROWS];
};

// The rows on columns j.. of the state, held in s. With a log, the deltas go there.
template <int S> void run_rows(float (*s)[S], const Rows & rows, LogRow<S> * log, int64_t row_stride, int j) {
    const float scale = 1.0f / std::sqrt((float) S);
    float dot_k[GROUP], dot_q[COLUMNS], delta[COLUMNS];
    for (int c = 0; c < GROUP; c += COLUMNS) {
        dots<S>(s + c, rows.k[0], dot_k + c);
    }
    for (int t = 0; t < rows.n; t++) {
        const float * k_next = rows.k[t + 1 < rows.n ? t + 1 : t];
        for (int c = 0; c < GROUP; c += COLUMNS) {
            for (int m = 0; m < COLUMNS; m++) {
                delta[m] = rows.beta[t] * std::fma(-rows.gate[t], dot_k[c + m], rows.v[t][j + c + m]);
            }
            step<S>(s + c, rows.gate[t], rows.k[t], delta, rows.q[t], k_next, dot_q, dot_k + c);
            for (int m = 0; m < COLUMNS; m++) {
                rows.out[t][j + c + m] = dot_q[m] * scale;
                if (log) {
                    log[t * row_stride].delta[j + c + m] = delta[m];
                }
            }
        }
    }
}

// A node of any of the three GDN sub-ops; sources that a sub-op does not have are NULL.
struct Gdn {
    const ggml_tensor *q = nullptr, *k = nullptr, *v = nullptr, *g = nullptr, *beta = nullptr;
    const ggml_tensor *state, *log, *slots, *n_pending;
    const ggml_tensor * n_rows = nullptr;
    ggml_tensor * out = nullptr;
    bool keeps_log = false;

    int64_t n_lanes() const { return slots->ne[0]; }
    int64_t n_slots() const { return state->ne[3]; }
    int64_t n_heads() const { return state->ne[2]; }
    int64_t n_block() const { return log->ne[2]; }
    int64_t n_out() const { return out ? out->ne[2] : 0; }
};

// A lane that is not padded, with its counts; slot is -1 if it is padded.
struct Lane {
    int64_t slot;
    int n_replay = 0;
    int64_t n_rows = 0;

    Lane(const Gdn & node, int64_t lane) {
        slot = owned_slot_of((const int32_t *) node.slots->data, lane, node.n_slots());
        if (slot < 0) {
            return;
        }
        n_replay = ((const int32_t *) node.n_pending->data)[slot];
        n_rows = node.n_rows ? ((const int32_t *) node.n_rows->data)[lane] : node.n_out();
        if (n_replay < 0 || n_replay > node.n_block() || n_rows < 0 || n_rows > node.n_out()) {
            slot = -1;
        }
    }
};

Rows read_rows(const Gdn & node, int64_t lane, int64_t head, int64_t first, int64_t end) {
    const int64_t key_head = head % node.q->ne[1];
    Rows rows;
    rows.n = (int) (end - first < ROWS ? end - first : ROWS);
    for (int i = 0; i < rows.n; i++) {
        const int64_t t = first + i;
        rows.gate[i] = std::exp(at<float>(node.g, t, lane)[head]);
        rows.beta[i] = at<float>(node.beta, t, lane)[head];
        rows.q[i] = at<float>(node.q, key_head, t, lane);
        rows.k[i] = at<float>(node.k, key_head, t, lane);
        rows.v[i] = at<float>(node.v, head, t, lane);
        rows.out[i] = at<float>(node.out, head, t, lane);
    }
    return rows;
}

template <int S> LogRow<S> * log_of(const Gdn & node, int64_t slot, int64_t head) {
    return (LogRow<S> *) node.log->data + slot * node.n_block() * node.n_heads() + head;
}

// The part of the log that columns share. Other columns may still replay the old rows: only when all are done.
template <int S> void log_keys(const Gdn & node, int64_t lane, int64_t head) {
    const Lane at_lane(node, lane);
    if (at_lane.slot < 0) {
        return;
    }
    const Rows rows = read_rows(node, lane, head, 0, node.n_out());
    LogRow<S> * log = log_of<S>(node, at_lane.slot, head);
    for (int t = 0; t < rows.n; t++) {
        LogRow<S> & row = log[t * node.n_heads()];
        row.gate = rows.gate[t];
        std::memcpy(row.k, rows.k[t], sizeof(row.k));
    }
}

// Columns j_begin..j_end-1 of one head of one lane: everything but log_keys.
template <int S> void run_columns(const Gdn & node, int64_t lane, int64_t head, int j_begin, int j_end) {
    const Lane at_lane(node, lane);
    const int64_t n_live = at_lane.slot < 0 ? 0 : at_lane.n_rows;
    for (int64_t t = n_live; t < node.n_out(); t++) {
        std::memset(at<float>(node.out, head, t, lane) + j_begin, 0, (j_end - j_begin) * sizeof(float));
    }
    if (at_lane.slot < 0) {
        return;
    }

    float * state = (float *) node.state->data + (at_lane.slot * node.n_heads() + head) * S * S;
    LogRow<S> * log = log_of<S>(node, at_lane.slot, head);
    const int64_t row_stride = node.n_heads();

    int64_t first = 0;
    do {
        const int n_replay = first == 0 ? at_lane.n_replay : 0;
        Rows rows;
        rows.n = 0;
        if (n_live > 0) {
            rows = read_rows(node, lane, head, first, n_live);
        }
        for (int j = j_begin; j < j_end; j += GROUP) {
            alignas(64) float s[GROUP][S];
            float * stored = state + (int64_t) j * S;
            std::memcpy(s, stored, sizeof(s));
            for (int c = 0; c < GROUP; c += COLUMNS) {
                replay<S>(s + c, log, row_stride, n_replay, j + c);
            }
            if (node.keeps_log && n_replay > 0) {
                std::memcpy(stored, s, sizeof(s));
            }
            if (rows.n > 0) {
                run_rows<S>(s, rows, node.keeps_log ? log : nullptr, row_stride, j);
            }
            if (!node.keeps_log && (n_replay > 0 || rows.n > 0)) {
                std::memcpy(stored, s, sizeof(s));
            }
        }
        first += ROWS;
    } while (first < n_live);
}

// Pieces a head is cut into, so that few heads still keep all threads busy.
int pieces_per_head(int64_t n_heads, int width, int n_threads) {
    int pieces = 1;
    while (pieces < 4 && 2 * pieces * GROUP <= width && n_heads * pieces % n_threads != 0 &&
           n_heads * pieces < 8 * n_threads) {
        pieces *= 2;
    }
    return pieces;
}

template <int S> void run(const ggml_compute_params * params, const Gdn & node) {
    const int64_t n_heads = node.n_heads() * node.n_lanes();
    const int pieces = pieces_per_head(n_heads, S, params->nth);
    const Share share(n_heads * pieces, params);
    for (int64_t i = share.begin; i < share.end; i++) {
        const int64_t lane = i / pieces / node.n_heads();
        const int64_t head = i / pieces % node.n_heads();
        const int piece = (int) (i % pieces);
        run_columns<S>(node, lane, head, piece * (S / pieces), (piece + 1) * (S / pieces));
        if (node.keeps_log && pieces == 1) {
            log_keys<S>(node, lane, head);
        }
    }
    if (node.keeps_log && pieces > 1) {
        ggml_barrier(params->threadpool);
        const Share heads(n_heads, params);
        for (int64_t i = heads.begin; i < heads.end; i++) {
            log_keys<S>(node, i / node.n_heads(), i % node.n_heads());
        }
    }
}

void run_any(const ggml_compute_params * params, const Gdn & node) {
    switch (node.state->ne[0]) {
#define RUN(S)                                                                                                         \
    case S:                                                                                                            \
        run<S>(params, node);                                                                                          \
        return;
        GGML_DFLASH_STATE_WIDTHS(RUN)
#undef RUN
    }
    GGML_ABORT("state width %d is refused by ggml_dflash_check", (int) node.state->ne[0]);
}

Gdn read_node(ggml_tensor * dst) {
    Gdn node;
    node.q = dst->src[0], node.k = dst->src[1], node.v = dst->src[2], node.g = dst->src[3], node.beta = dst->src[4];
    node.state = dst->src[5], node.log = dst->src[6], node.slots = dst->src[7], node.n_pending = dst->src[8];
    node.n_rows = dst->src[9];
    node.out = dst;
    return node;
}

} // namespace

void gdn_verify(const ggml_compute_params * params, ggml_tensor * dst) {
    Gdn node = read_node(dst);
    node.keeps_log = true;
    run_any(params, node);
}

void gdn_advance(const ggml_compute_params * params, ggml_tensor * dst) {
    run_any(params, read_node(dst));
}

void gdn_commit(const ggml_compute_params * params, ggml_tensor * dst) {
    Gdn node;
    node.state = dst->src[0], node.log = dst->src[1], node.slots = dst->src[2], node.n_pending = dst->src[3];
    run_any(params, node);
}

} // namespace dflash
