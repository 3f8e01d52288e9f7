#pragma once

// Runs of gdn_verify, gdn_advance and gdn_commit, and their formulas in double.

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

const double GDN_TOLERANCE = tolerance(Rule::GDN);
