#pragma once

// conv_verify, conv_advance, conv_commit: against the formula in double, and bit for bit against each other.

#include "dflash-harness.h"

constexpr int64_t TAPS = 4;

struct ConvShape {
    int64_t C, T, L, N, B;
    int64_t kept() const { return C * (TAPS - 1 + B); } // of a slot
    int64_t block() const { return C * T; }             // of a lane
    size_t bytes() const { return sizeof(float) * (N * kept() + 4 * block() * L + TAPS * C); }
};

struct ConvCase {
    ConvShape s;
    Ints slots;
    Floats w, x;

    ConvCase(const ConvShape & shape, const Ints & slot_ids)
        : s(shape), slots(slot_ids), w(normal(TAPS * shape.C)), x(normal(shape.block() * shape.L)) {}

    // the window of the slots in use, NaN elsewhere
    Floats fresh() const {
        Floats rows = nans(s.N * s.kept());
        for (int32_t slot : slots) {
            for (int64_t i = 0; slot >= 0 && slot < s.N && i < (TAPS - 1) * s.C; i++) {
                rows[slot * s.kept() + i] = std::sin(1.0f + slot + 0.7f * i);
            }
        }
        return rows;
    }

    Ints all_pending(int32_t n) const { return Ints(s.N, n); }
    Ints all_rows(int32_t n) const { return Ints(slots.size(), n); }

    // rows first..first+n-1 of lanes lane..lane+m-1 as a case of its own
    ConvCase part(int64_t first, int64_t n, int64_t lane, int64_t m) const {
        ConvCase c = *this;
        c.s.T = n;
        c.s.L = m;
        c.slots.assign(slots.begin() + lane, slots.begin() + lane + m);
        c.x.clear();
        for (int64_t l = lane; l < lane + m; l++) {
            const auto from = x.begin() + l * s.block() + first * s.C;
            c.x.insert(c.x.end(), from, from + n * s.C);
        }
        return c;
    }
};

// n_rows empty: verify, else advance. strided: x is a slice of a wider tensor.
inline Floats conv_run(const ConvCase & c, Floats & rows, const Ints & pending, const Ints & n_rows = {},
                       int n_threads = 1, bool strided = false) {
    const ConvShape & s = c.s;
    Run run(2 * c.s.bytes());
    ggml_tensor * x;
    if (strided) {
        const int64_t width = s.C + 5;
        Floats wide = nans(width * s.T * s.L);
        for (int64_t i = 0; i < s.T * s.L; i++) {
            std::copy_n(&c.x[i * s.C], s.C, &wide[i * width + 3]);
        }
        x = ggml_view_3d(run.ctx(), run.source({width, s.T, s.L}, wide), s.C, s.T, s.L, width * 4, width * s.T * 4, 12);
        ggml_backend_view_init(x);
    } else {
        x = run.source({s.C, s.T, s.L}, c.x);
    }
    ggml_tensor * w = run.source({TAPS, s.C}, c.w);
    ggml_tensor * kept = run.source({s.C, TAPS - 1 + s.B, s.N}, rows);
    ggml_tensor * sl = run.source(c.slots);
    ggml_tensor * pend = run.source(pending);
    ggml_tensor * out = n_rows.empty() ? ggml_dflash_conv_verify(run.ctx(), x, w, kept, sl, pend)
                                       : ggml_dflash_conv_advance(run.ctx(), x, w, kept, sl, pend, run.source(n_rows));
    run.result(out);
    run.compute({out}, n_threads);
    rows = Run::floats(kept);
    return Run::floats(out);
}

inline void conv_commit(const ConvCase & c, Floats & rows, const Ints & pending, int n_threads = 1) {
    Run run(c.s.bytes());
    ggml_tensor * kept = run.source({c.s.C, TAPS - 1 + c.s.B, c.s.N}, rows);
    ggml_tensor * out = ggml_dflash_conv_commit(run.ctx(), kept, run.source(c.slots), run.source(pending));
    run.result(out);
    run.compute({out}, n_threads);
    rows = Run::floats(kept);
    counter().expect(same_bits(Run::floats(out), rows), "commit does not return the rows");
}

// only the window of every slot in use; NaN elsewhere
inline Floats windows(const ConvCase & c, const Floats & rows) {
    Floats out = nans(rows.size());
    for (int32_t slot : c.slots) {
        if (slot >= 0) {
            std::copy_n(&rows[slot * c.s.kept()], (TAPS - 1) * c.s.C, &out[slot * c.s.kept()]);
        }
    }
    return out;
}

const double CONV_TOLERANCE = tolerance(Rule::CONV);

inline void conv_against_reference(const ConvCase & c) {
    const ConvShape & s = c.s;
    const Floats before = c.fresh();
    Floats rows = before;
    const Floats out = conv_run(c, rows, c.all_pending(0));
    for (int64_t lane = 0; lane < s.L; lane++) {
        const float * lane_out = &out[lane * s.block()];
        if (c.slots[lane] < 0) {
            counter().expect(all_zero(lane_out, s.block()), "a padded lane is not zero");
            continue;
        }
        const float * window = &before[c.slots[lane] * s.kept()];
        Floats in(window, window + (TAPS - 1) * s.C);
        in.insert(in.end(), &c.x[lane * s.block()], &c.x[lane * s.block()] + s.block());
        std::vector<double> expected(s.block());
        for (int64_t t = 0; t < s.T; t++) {
            for (int64_t ch = 0; ch < s.C; ch++) {
                double sum = 0;
                for (int64_t j = 0; j < TAPS; j++) {
                    sum += (double) c.w[ch * TAPS + j] * in[(t + j) * s.C + ch];
                }
                expected[t * s.C + ch] = sum / (1 + std::exp(-sum));
            }
        }
        const double d = distance(Floats(lane_out, lane_out + s.block()), expected);
        counter().expect(d < CONV_TOLERANCE, "lane %d: output off by %g", (int) lane, d);
        const float * kept = &rows[c.slots[lane] * s.kept()];
        counter().expect(same_bits(kept, in.data(), in.size()), "kept rows are not window ++ x");
        const int64_t rest = s.kept() - (int64_t) in.size();
        counter().expect(same_bits(kept + in.size(), &before[c.slots[lane] * s.kept()] + in.size(), rest),
                         "rows past the block");
    }
    for (int64_t slot = 0; slot < s.N; slot++) {
        if (std::find(c.slots.begin(), c.slots.end(), (int32_t) slot) == c.slots.end()) {
            counter().expect(same_bits(&rows[slot * s.kept()], &before[slot * s.kept()], s.kept()), "slot %d",
                             (int) slot);
        }
    }
}

inline void conv_commit_is_advance(const ConvCase & c) {
    Floats verified = c.fresh();
    const Floats out = conv_run(c, verified, c.all_pending(0));
    for (int32_t n = 0; n <= c.s.T; n++) {
        Floats committed = verified, advanced = c.fresh();
        conv_commit(c, committed, c.all_pending(n));
        const Floats y = conv_run(c, advanced, c.all_pending(0), c.all_rows(n));
        counter().expect(same_bits(windows(c, committed), windows(c, advanced)), "window after %d rows", n);
        counter().expect(same_bits(advanced, windows(c, advanced)), "advance wrote more than the window");
        for (int64_t lane = 0; lane < c.s.L; lane++) {
            const float * row = &y[lane * c.s.block()];
            counter().expect(same_bits(row, &out[lane * c.s.block()], n * c.s.C), "advance and verify differ");
            counter().expect(all_zero(row + n * c.s.C, (c.s.T - n) * c.s.C), "rows past n_rows are not zero");
        }
    }
}

inline void conv_rounds(const ConvCase & c, const std::vector<int64_t> & sizes, const Ints & accepted) {
    Floats lazy = c.fresh(), eager = lazy;
    Ints pending = c.all_pending(0);
    for (size_t i = 0; i < sizes.size(); i++) {
        ConvCase round = c.part(0, sizes[i], 0, c.s.L);
        round.x = normal(round.x.size());
        const Floats a = conv_run(round, lazy, pending);
        const Floats b = conv_run(round, eager, c.all_pending(0), c.all_rows(accepted[i]));
        for (int64_t lane = 0; lane < c.s.L; lane++) {
            const int64_t at = lane * round.s.block();
            counter().expect(same_bits(&a[at], &b[at], accepted[i] * c.s.C), "round %d: accepted rows", (int) i);
        }
        pending = c.all_pending(accepted[i]);
    }
    conv_commit(c, lazy, pending);
    counter().expect(same_bits(windows(c, lazy), windows(c, eager)), "window after all rounds");
}

inline void conv_independence(const ConvCase & c) {
    Floats start = c.fresh();
    conv_run(c, start, c.all_pending(0));
    ConvCase next = c;
    next.x = normal(c.x.size());
    const Ints pending = c.all_pending((int32_t) (c.s.T + 1) / 2);
    Floats rows = start;
    const Floats out = conv_run(next, rows, pending);

    for (int n_threads : thread_counts({2, 3})) {
        Floats other = start;
        counter().expect(same_bits(conv_run(next, other, pending, {}, n_threads, true), out) && same_bits(other, rows),
                         "%d threads differ", n_threads);
    }
    Floats alone = start;
    for (int64_t lane = 0; lane < c.s.L; lane++) {
        const Floats y = conv_run(next.part(0, c.s.T, lane, 1), alone, pending);
        counter().expect(same_bits(y.data(), &out[lane * c.s.block()], y.size()), "lane %d alone differs", (int) lane);
    }
    counter().expect(same_bits(alone, rows), "rows after lanes alone");

    Floats single = start;
    for (int64_t t = 0; t < c.s.T; t++) {
        const Floats y = conv_run(next.part(t, 1, 0, c.s.L), single, t == 0 ? pending : c.all_pending(1));
        for (int64_t lane = 0; lane < c.s.L; lane++) {
            counter().expect(same_bits(&y[lane * c.s.C], &out[lane * c.s.block() + t * c.s.C], c.s.C), "row %d alone",
                             (int) t);
        }
    }
}

inline void conv_bad_data(const ConvCase & c) {
    if (c.s.L < 2 || c.slots[0] < 0 || c.slots[1] < 0) {
        return;
    }
    const int32_t own = c.slots[1], T = (int32_t) c.s.T;
    const struct {
        const char * what;
        int32_t slot, pending, n_rows;
    } table[] = {
        {"slot N", (int32_t) c.s.N, 0, T},
        {"slot INT32_MIN", INT32_MIN, 0, T},
        {"slot twice", c.slots[0], 0, T},
        {"pending -1", own, -1, T},
        {"pending B+1", own, (int32_t) c.s.B + 1, T},
        {"n_rows -1", own, 0, -1},
        {"n_rows T+1", own, 0, T + 1},
    };
    for (const auto & bad : table) {
        ConvCase wrong = c, padded = c;
        wrong.slots[1] = bad.slot;
        padded.slots[1] = -1;
        Ints pending = c.all_pending(0), n_rows = c.all_rows(T);
        if (bad.slot == own) {
            pending[own] = bad.pending;
        }
        n_rows[1] = bad.n_rows;
        for (bool verify : {true, false}) {
            if (verify && bad.n_rows != T) {
                continue;
            }
            Floats a = c.fresh(), b = a;
            const Floats x = conv_run(wrong, a, pending, verify ? Ints() : n_rows);
            const Floats y = conv_run(padded, b, c.all_pending(0), verify ? Ints() : c.all_rows(T));
            counter().expect(same_bits(x, y) && same_bits(a, b), "%s is not treated as padding", bad.what);
            counter().expect(all_zero(&x[c.s.block()], c.s.block()), "%s does not give zeros", bad.what);
        }
        Floats a = c.fresh();
        conv_commit(wrong, a, pending);
        counter().expect(same_bits(a, c.fresh()), "%s: commit wrote", bad.what);
    }
}

inline void conv_cases() {
    const struct {
        ConvShape s;
        Ints slots;
    } table[] = {
        // C, T, L, N, B
        {{1, 1, 1, 1, 1}, {0}},      {{7, 3, 2, 3, 4}, {2, 0}},
        {{64, 8, 1, 2, 8}, {1}},     {{130, 16, 3, 4, 16}, {3, -1, 1}},
        {{257, 2, 2, 2, 8}, {1, 0}}, {{1280, 8, 5, 7, 8}, {6, 2, -1, 0, 3}},
    };
    for (const auto & entry : table) {
        const ConvShape & s = entry.s;
        char label[96];
        std::snprintf(label, sizeof(label), "conv C=%d T=%d L=%d N=%d B=%d", (int) s.C, (int) s.T, (int) s.L, (int) s.N,
                      (int) s.B);
        counter().label = label;
        const ConvCase c(s, entry.slots);
        conv_against_reference(c);
        conv_commit_is_advance(c);
        conv_independence(c);
        conv_bad_data(c);
        for (int32_t n = 0; n <= s.T; n++) {
            conv_rounds(c, {s.T, s.T, s.T}, {n, (int32_t) s.T - n, n});
            conv_rounds(c, {s.T, 1, s.T}, {n, 1, n});
            conv_rounds(c, {s.T, 1, s.T}, {n, 0, n});
        }
    }
}
