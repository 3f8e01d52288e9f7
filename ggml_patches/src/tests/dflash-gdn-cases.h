#pragma once

// gdn_verify, gdn_advance, gdn_commit: against a double reference, and bit for bit against each other.

#include "dflash-harness.h"

struct GdnShape {
    int64_t S, Hk, Hv, T, L, N, B;
    int64_t state_size() const { return S * S * Hv; }    // of a slot
    int64_t log_row() const { return (2 * S + 1) * Hv; } // of a slot
    int64_t log_size() const { return log_row() * B; }   // of a slot
    int64_t out_size() const { return S * Hv * T; }      // of a lane
    size_t bytes() const {
        return sizeof(float) * (N * (state_size() + log_size()) + 6 * out_size() * L + 2 * S * (2 * Hk + Hv) * T * L);
    }
};

// State and log of all slots. Starts as NaN everywhere, so that whatever is read without right shows up.
struct GdnMemory {
    Floats state, log;
    explicit GdnMemory(const GdnShape & s) : state(nans(s.N * s.state_size())), log(nans(s.N * s.log_size())) {}
    bool operator==(const GdnMemory & o) const { return same_bits(state, o.state) && same_bits(log, o.log); }
};

struct GdnRows {
    Floats q, k, v, g, beta; // [S,Hk,T,L] [S,Hk,T,L] [S,Hv,T,L] [Hv,T,L] [Hv,T,L]

    static GdnRows random(const GdnShape & s) {
        GdnRows r;
        r.q = normal(s.S * s.Hk * s.T * s.L, 1.0f / std::sqrt((float) s.S));
        r.k = normal(s.S * s.Hk * s.T * s.L, 1.0f / std::sqrt((float) s.S));
        r.v = normal(s.S * s.Hv * s.T * s.L);
        r.g = normal(s.Hv * s.T * s.L);
        for (float & g : r.g) {
            g = -std::fabs(g); // a decay
        }
        r.beta = normal(s.Hv * s.T * s.L);
        for (float & b : r.beta) {
            b = 1.0f / (1.0f + std::exp(-b));
        }
        return r;
    }

    // rows first..first+n-1 of lanes lane..lane+m-1
    GdnRows part(const GdnShape & s, int64_t first, int64_t n, int64_t lane, int64_t m) const {
        const auto cut = [&](const Floats & a, int64_t row) {
            Floats out;
            for (int64_t l = lane; l < lane + m; l++) {
                const auto from = a.begin() + (l * s.T + first) * row;
                out.insert(out.end(), from, from + n * row);
            }
            return out;
        };
        return {cut(q, s.S * s.Hk), cut(k, s.S * s.Hk), cut(v, s.S * s.Hv), cut(g, s.Hv), cut(beta, s.Hv)};
    }
};

inline GdnShape with(GdnShape s, int64_t T, int64_t L) {
    s.T = T;
    s.L = L;
    return s;
}

// How q, k and v lie in memory: each of its own, or as slices of one wide row, as a model has them.
enum class Layout { SEPARATE, PACKED };

inline void make_qkv(Run & run, const GdnShape & s, const GdnRows & r, Layout layout, ggml_tensor * qkv[3]) {
    if (layout == Layout::SEPARATE) {
        qkv[0] = run.source({s.S, s.Hk, s.T, s.L}, r.q);
        qkv[1] = run.source({s.S, s.Hk, s.T, s.L}, r.k);
        qkv[2] = run.source({s.S, s.Hv, s.T, s.L}, r.v);
        return;
    }
    const int64_t width = s.S * (2 * s.Hk + s.Hv);
    Floats wide(width * s.T * s.L);
    for (int64_t i = 0; i < s.T * s.L; i++) {
        float * to = wide.data() + i * width;
        to = std::copy_n(r.q.data() + i * s.S * s.Hk, s.S * s.Hk, to);
        to = std::copy_n(r.k.data() + i * s.S * s.Hk, s.S * s.Hk, to);
        std::copy_n(r.v.data() + i * s.S * s.Hv, s.S * s.Hv, to);
    }
    ggml_tensor * t = run.source({width, s.T, s.L}, wide);
    const auto slice = [&](int64_t heads, int64_t first) {
        ggml_tensor * view =
            ggml_view_4d(run.ctx(), t, s.S, heads, s.T, s.L, s.S * 4, width * 4, width * s.T * 4, first * s.S * 4);
        ggml_backend_view_init(view);
        return view;
    };
    qkv[0] = slice(s.Hk, 0);
    qkv[1] = slice(s.Hk, s.Hk);
    qkv[2] = slice(s.Hv, 2 * s.Hk);
}

// n_rows empty: verify, else advance
inline Floats gdn_run(const GdnShape & s, const GdnRows & r, GdnMemory & m, const Ints & slots, const Ints & pending,
                      const Ints & n_rows = {}, int n_threads = 1, Layout layout = Layout::SEPARATE) {
    Run run(s.bytes());
    ggml_tensor * qkv[3];
    make_qkv(run, s, r, layout, qkv);
    ggml_tensor * g = run.source({s.Hv, s.T, s.L}, r.g);
    ggml_tensor * beta = run.source({s.Hv, s.T, s.L}, r.beta);
    ggml_tensor * state = run.source({s.S, s.S, s.Hv, s.N}, m.state);
    ggml_tensor * log = run.source({2 * s.S + 1, s.Hv, s.B, s.N}, m.log);
    ggml_tensor * sl = run.source(slots);
    ggml_tensor * pend = run.source(pending);
    ggml_tensor * out;
    if (n_rows.empty()) {
        out = ggml_dflash_gdn_verify(run.ctx(), qkv[0], qkv[1], qkv[2], g, beta, state, log, sl, pend);
    } else {
        out = ggml_dflash_gdn_advance(run.ctx(), qkv[0], qkv[1], qkv[2], g, beta, state, log, sl, pend,
                                      run.source(n_rows));
    }
    run.result(out);
    run.compute({out}, n_threads);
    const Floats old_log = m.log;
    m.state = Run::floats(state);
    m.log = Run::floats(log);
    counter().expect(n_rows.empty() || same_bits(m.log, old_log), "advance wrote the log");
    counter().expect(same_bits(Run::floats(g), r.g) && same_bits(Run::floats(beta), r.beta), "a source was written");
    return Run::floats(out);
}

inline void gdn_commit(const GdnShape & s, GdnMemory & m, const Ints & slots, const Ints & pending, int n_threads = 1) {
    Run run(s.bytes());
    ggml_tensor * state = run.source({s.S, s.S, s.Hv, s.N}, m.state);
    ggml_tensor * log = run.source({2 * s.S + 1, s.Hv, s.B, s.N}, m.log);
    ggml_tensor * out = ggml_dflash_gdn_commit(run.ctx(), state, log, run.source(slots), run.source(pending));
    run.result(out);
    run.compute({out}, n_threads);
    counter().expect(same_bits(Run::floats(log), m.log), "commit wrote the log");
    m.state = Run::floats(state);
    counter().expect(same_bits(Run::floats(out), m.state), "commit does not return the state");
}

//
// the formulas in double: state [value j][key i] of one head
//

struct GdnReference {
    std::vector<double> out, gate, delta, state;
};

// One lane from a given state (all heads); delta and gate as logged.
inline GdnReference gdn_reference(const GdnShape & s, const GdnRows & r, int64_t lane, const float * state) {
    GdnReference ref;
    ref.state.assign(state, state + s.state_size());
    ref.out.resize(s.out_size());
    ref.delta.resize(s.out_size());
    ref.gate.resize(s.Hv * s.T);
    for (int64_t t = 0; t < s.T; t++) {
        for (int64_t h = 0; h < s.Hv; h++) {
            const int64_t row = lane * s.T + t;
            const float * q = &r.q[(row * s.Hk + h % s.Hk) * s.S];
            const float * k = &r.k[(row * s.Hk + h % s.Hk) * s.S];
            const float * v = &r.v[(row * s.Hv + h) * s.S];
            const double gate = std::exp((double) r.g[row * s.Hv + h]);
            ref.gate[t * s.Hv + h] = gate;
            for (int64_t j = 0; j < s.S; j++) {
                double * column = &ref.state[(h * s.S + j) * s.S];
                double seen = 0;
                for (int64_t i = 0; i < s.S; i++) {
                    column[i] *= gate;
                    seen += column[i] * k[i];
                }
                const double delta = r.beta[row * s.Hv + h] * (v[j] - seen);
                double o = 0;
                for (int64_t i = 0; i < s.S; i++) {
                    column[i] += k[i] * delta;
                    o += column[i] * q[i];
                }
                ref.delta[(t * s.Hv + h) * s.S + j] = delta;
                ref.out[(t * s.Hv + h) * s.S + j] = o / std::sqrt((double) s.S);
            }
        }
    }
    return ref;
}

// Numbers here are of size 1; a dot of S <= 128 terms and up to 16 steps of a contraction (|k| about 1) lose some S *
// 2^-24 per step at worst.
constexpr double GDN_TOLERANCE = 2e-5;

//
// the checks
//

struct GdnCase {
    GdnShape s;
    Ints slots; // of the lanes
    GdnRows rows;

    // states of the slots in use are random, all else stays NaN
    GdnMemory fresh() const {
        GdnMemory m(s);
        std::mt19937 saved = random_engine();
        random_engine().seed(7);
        for (int32_t slot : slots) {
            if (slot >= 0 && slot < s.N) {
                const Floats x = normal(s.state_size(), 0.5f);
                std::copy(x.begin(), x.end(), m.state.begin() + slot * s.state_size());
            }
        }
        random_engine() = saved;
        return m;
    }

    Ints all_pending(int32_t n) const { return Ints(s.N, n); }
    Ints all_rows(int32_t n) const { return Ints(slots.size(), n); }
};

inline void gdn_against_reference(const GdnCase & c) {
    const GdnShape & s = c.s;
    const GdnMemory before = c.fresh();
    GdnMemory m = before;
    const Floats out = gdn_run(s, c.rows, m, c.slots, c.all_pending(0));
    counter().expect(same_bits(m.state, before.state), "verify without pending rows wrote the state");

    for (int64_t lane = 0; lane < s.L; lane++) {
        const float * lane_out = &out[lane * s.out_size()];
        if (c.slots[lane] < 0) {
            counter().expect(all_zero(lane_out, s.out_size()), "a padded lane is not zero");
            continue;
        }
        const GdnReference ref = gdn_reference(s, c.rows, lane, &before.state[c.slots[lane] * s.state_size()]);
        double d = distance(Floats(lane_out, lane_out + s.out_size()), ref.out);
        counter().expect(d < GDN_TOLERANCE, "lane %d: output off by %g", (int) lane, d);

        const float * log = &m.log[c.slots[lane] * s.log_size()];
        for (int64_t t = 0; t < s.T; t++) {
            for (int64_t h = 0; h < s.Hv; h++) {
                const float * row = log + t * s.log_row() + h * (2 * s.S + 1);
                const double * delta = &ref.delta[(t * s.Hv + h) * s.S];
                counter().expect(std::fabs(row[0] - ref.gate[t * s.Hv + h]) < 2e-7, "logged gate");
                counter().expect(same_bits(row + 1, &c.rows.k[((lane * s.T + t) * s.Hk + h % s.Hk) * s.S], s.S),
                                 "logged key");
                d = distance(Floats(row + 1 + s.S, row + 1 + 2 * s.S), {delta, delta + s.S});
                counter().expect(d < GDN_TOLERANCE, "logged delta off by %g", d);
            }
        }
    }

    // what nobody owns is untouched: rows T.. of the log, all of the slots without a lane
    for (int64_t slot = 0; slot < s.N; slot++) {
        const bool used = std::find(c.slots.begin(), c.slots.end(), (int32_t) slot) != c.slots.end();
        const int64_t from = slot * s.log_size() + (used ? s.T * s.log_row() : 0);
        const int64_t n = (slot + 1) * s.log_size() - from;
        counter().expect(same_bits(&m.log[from], &before.log[from], n), "log of slot %d beyond the block", (int) slot);
    }
}

// For every n: block, then commit of n rows = advance by n rows, to the bit. Outputs of both too.
inline void gdn_replay_is_forward(const GdnCase & c) {
    GdnMemory verified = c.fresh();
    const Floats out = gdn_run(c.s, c.rows, verified, c.slots, c.all_pending(0));
    for (int32_t n = 0; n <= c.s.T; n++) {
        GdnMemory replayed = verified;
        gdn_commit(c.s, replayed, c.slots, c.all_pending(n));
        GdnMemory advanced = c.fresh();
        const Floats rows = gdn_run(c.s, c.rows, advanced, c.slots, c.all_pending(0), c.all_rows(n));
        counter().expect(same_bits(replayed.state, advanced.state), "commit of %d rows is not the forward pass", n);
        for (int64_t lane = 0; lane < c.s.L; lane++) {
            const int64_t at = lane * c.s.out_size(), live = n * c.s.S * c.s.Hv;
            counter().expect(same_bits(&rows[at], &out[at], live), "advance and verify give different rows");
            counter().expect(all_zero(&rows[at + live], c.s.out_size() - live), "rows past n_rows are not zero");
        }
    }
}

// Blocks of sizes[i] rows, of which accepted[i] count, by verify with pending rows; then the same rows by advance.
inline void gdn_rounds(const GdnCase & c, const std::vector<int64_t> & sizes, const Ints & accepted) {
    GdnMemory lazy = c.fresh(), eager = lazy;
    Ints pending = c.all_pending(0);
    for (size_t i = 0; i < sizes.size(); i++) {
        const GdnShape s = with(c.s, sizes[i], c.s.L);
        const GdnRows rows = GdnRows::random(s);
        const Floats a = gdn_run(s, rows, lazy, c.slots, pending);
        counter().expect(same_bits(lazy.state, eager.state), "round %d: promoted state", (int) i);
        const Floats b = gdn_run(s, rows, eager, c.slots, c.all_pending(0), c.all_rows(accepted[i]));
        for (int64_t lane = 0; lane < s.L; lane++) {
            counter().expect(same_bits(&a[lane * s.out_size()], &b[lane * s.out_size()], accepted[i] * s.S * s.Hv),
                             "round %d: accepted rows", (int) i);
        }
        pending = c.all_pending(accepted[i]);
    }
    gdn_commit(c.s, lazy, c.slots, pending);
    counter().expect(same_bits(lazy.state, eager.state), "state after all rounds");
}

// T rows at once and one by one with the row before pending.
inline void gdn_block_is_single_rows(const GdnCase & c) {
    GdnMemory block = c.fresh(), single = block;
    const Floats out = gdn_run(c.s, c.rows, block, c.slots, c.all_pending(0));
    const GdnShape one = with(c.s, 1, c.s.L);
    for (int64_t t = 0; t < c.s.T; t++) {
        const Floats row = gdn_run(one, c.rows.part(c.s, t, 1, 0, c.s.L), single, c.slots, c.all_pending(t > 0));
        for (int64_t lane = 0; lane < c.s.L; lane++) {
            counter().expect(same_bits(&row[lane * one.out_size()], &out[lane * c.s.out_size() + t * one.out_size()],
                                       one.out_size()),
                             "row %d alone is not the row of the block", (int) t);
        }
    }
    gdn_commit(c.s, single, c.slots, c.all_pending(1));
    gdn_commit(c.s, block, c.slots, c.all_pending((int32_t) c.s.T));
    counter().expect(same_bits(single.state, block.state), "state by single rows");
}

// Threads, memory layout and neighbours change nothing. Starts with pending rows.
inline void gdn_independence(const GdnCase & c) {
    GdnMemory start = c.fresh();
    gdn_run(c.s, c.rows, start, c.slots, c.all_pending(0));
    const GdnRows next = GdnRows::random(c.s);
    const Ints pending = c.all_pending((int32_t) (c.s.T + 1) / 2);
    GdnMemory m = start;
    const Floats out = gdn_run(c.s, next, m, c.slots, pending);

    for (int n_threads : {2, 3, 4}) {
        GdnMemory other = start;
        const Floats x = gdn_run(c.s, next, other, c.slots, pending, {}, n_threads, Layout::PACKED);
        counter().expect(same_bits(x, out) && other == m, "%d threads differ", n_threads);
        GdnMemory a = start, b = start;
        gdn_commit(c.s, a, c.slots, pending);
        gdn_commit(c.s, b, c.slots, pending, n_threads);
        counter().expect(a == b, "commit with %d threads differs", n_threads);
        const Ints n_rows = c.all_rows((int32_t) c.s.T);
        const Floats y = gdn_run(c.s, next, a, c.slots, c.all_pending(0), n_rows);
        const Floats z = gdn_run(c.s, next, b, c.slots, c.all_pending(0), n_rows, n_threads, Layout::PACKED);
        counter().expect(same_bits(y, z) && a == b, "advance with %d threads differs", n_threads);
    }

    GdnMemory alone = start;
    for (int64_t lane = 0; lane < c.s.L; lane++) {
        const Floats x =
            gdn_run(with(c.s, c.s.T, 1), next.part(c.s, 0, c.s.T, lane, 1), alone, {c.slots[lane]}, pending);
        counter().expect(same_bits(x.data(), &out[lane * c.s.out_size()], c.s.out_size()), "lane %d alone differs",
                         (int) lane);
    }
    counter().expect(alone == m, "memory after lanes alone");
}

// Wrong data in a lane: zeros for it, its slot untouched, the other lanes as if it were not there.
inline void gdn_bad_data(const GdnCase & c) {
    if (c.s.L < 2 || c.slots[0] < 0 || c.slots[1] < 0) {
        return;
    }
    struct Bad {
        const char * what;
        int32_t slot, pending, n_rows;
    };
    const int32_t own = c.slots[1], T = (int32_t) c.s.T, B = (int32_t) c.s.B, N = (int32_t) c.s.N;
    const Bad table[] = {
        {"slot -1", -1, 0, T},
        {"slot N", N, 0, T},
        {"slot INT32_MIN", INT32_MIN, 0, T},
        {"slot INT32_MAX", INT32_MAX, 0, T},
        {"slot twice", c.slots[0], 0, T},
        {"pending -1", own, -1, T},
        {"pending B+1", own, B + 1, T},
        {"pending INT32_MAX", own, INT32_MAX, T},
        {"n_rows -1", own, 0, -1},
        {"n_rows T+1", own, 0, T + 1},
        {"n_rows INT32_MIN", own, 0, INT32_MIN},
    };
    for (const Bad & bad : table) {
        for (bool verify : {true, false}) {
            if (verify && bad.n_rows != T) {
                continue;
            }
            Ints slots = c.slots, pending = c.all_pending(0), n_rows = verify ? Ints() : c.all_rows(T);
            Ints padded = c.slots;
            slots[1] = bad.slot;
            padded[1] = -1;
            if (bad.slot == own) {
                pending[own] = bad.pending;
            }
            if (!verify) {
                n_rows[1] = bad.n_rows;
            }
            GdnMemory m = c.fresh(), expected = c.fresh();
            const Floats a = gdn_run(c.s, c.rows, m, slots, pending, n_rows);
            const Floats b = gdn_run(c.s, c.rows, expected, padded, c.all_pending(0), verify ? n_rows : c.all_rows(T));
            counter().expect(same_bits(a, b) && m == expected, "%s is not treated as padding", bad.what);
            counter().expect(all_zero(&a[c.s.out_size()], c.s.out_size()), "%s does not give zeros", bad.what);
            if (verify) {
                gdn_commit(c.s, m, slots, pending);
                gdn_commit(c.s, expected, padded, c.all_pending(0));
                counter().expect(m == expected, "%s: commit", bad.what);
            }
        }
    }
}

// Rows of an advance are not bounded by the block, and lanes may have different numbers of them.
inline void gdn_long_advance() {
    const GdnShape s = {32, 1, 3, 37, 3, 4, 4};
    const GdnCase c = {s, {3, 0, 2}, GdnRows::random(s)};
    counter().label = "gdn long advance";
    const Ints n_rows = {37, 0, 18};
    GdnMemory whole = c.fresh(), pieces = whole;
    const Floats out = gdn_run(s, c.rows, whole, c.slots, c.all_pending(0), n_rows, 2);
    for (int64_t lane = 0; lane < s.L; lane++) {
        for (int64_t t = 0; t < n_rows[lane]; t++) {
            const Floats row =
                gdn_run(with(s, 1, 1), c.rows.part(s, t, 1, lane, 1), pieces, {c.slots[lane]}, c.all_pending(0), {1});
            counter().expect(same_bits(row.data(), &out[(lane * s.T + t) * s.S * s.Hv], row.size()), "lane %d row %d",
                             (int) lane, (int) t);
        }
    }
    counter().expect(whole == pieces, "state after a long advance");
    const GdnReference ref = gdn_reference(s, c.rows, 0, &c.fresh().state[3 * s.state_size()]);
    const Floats state(whole.state.begin() + 3 * s.state_size(), whole.state.begin() + 4 * s.state_size());
    counter().expect(distance(state, ref.state) < GDN_TOLERANCE, "state off by %g", distance(state, ref.state));
}

inline void gdn_cases() {
    const struct {
        GdnShape s;
        Ints slots;
    } table[] = {
        // S, Hk, Hv, T, L, N, B
        {{16, 1, 1, 1, 1, 1, 1}, {0}},           {{16, 1, 3, 3, 2, 2, 3}, {1, 0}},
        {{16, 3, 3, 16, 1, 2, 16}, {1}},         {{16, 2, 4, 5, 5, 7, 8}, {6, 2, -1, 0, 3}},
        {{32, 1, 5, 7, 2, 3, 8}, {2, 1}},        {{32, 3, 9, 8, 3, 4, 8}, {3, -1, 1}},
        {{32, 2, 2, 2, 4, 4, 16}, {3, 1, 2, 0}}, {{64, 1, 1, 8, 1, 2, 8}, {1}},
        {{64, 2, 6, 4, 3, 3, 5}, {2, 0, 1}},     {{64, 3, 6, 1, 2, 4, 8}, {0, 3}},
        {{128, 1, 3, 8, 2, 3, 8}, {2, 0}},       {{128, 2, 4, 8, 1, 1, 8}, {0}},
        {{128, 3, 9, 6, 2, 3, 9}, {1, 2}},       {{128, 1, 2, 16, 5, 6, 16}, {5, 3, 0, -1, 1}},
    };
    for (const auto & entry : table) {
        const GdnShape & s = entry.s;
        char label[96];
        std::snprintf(label, sizeof(label), "gdn S=%d Hk=%d Hv=%d T=%d L=%d N=%d B=%d", (int) s.S, (int) s.Hk,
                      (int) s.Hv, (int) s.T, (int) s.L, (int) s.N, (int) s.B);
        counter().label = label;
        const GdnCase c = {s, entry.slots, GdnRows::random(s)};
        gdn_against_reference(c);
        gdn_replay_is_forward(c);
        gdn_block_is_single_rows(c);
        gdn_independence(c);
        gdn_bad_data(c);
        for (int32_t n = 0; n <= s.T; n++) {
            gdn_rounds(c, {s.T, s.T, s.T}, {n, (int32_t) s.T - n, n}); // twice in a row, and once more
            gdn_rounds(c, {s.T, 1, s.T}, {n, 1, n});                   // a plain step in between
            gdn_rounds(c, {s.T, 1, s.T}, {n, 0, n});                   // ... that is dropped
        }
    }
    gdn_long_advance();
}
