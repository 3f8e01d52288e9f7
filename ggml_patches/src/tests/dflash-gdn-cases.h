#pragma once

// gdn_verify, gdn_advance, gdn_commit: against a double reference, and bit for bit against each other.

#include "dflash-gdn-run.h"

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

    for (int n_threads : thread_counts({2, 3, 4})) {
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
