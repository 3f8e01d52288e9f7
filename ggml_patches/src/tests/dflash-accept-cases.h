#pragma once

// accept: against the rule said differently, over every way two short blocks can differ, and lanes of every kind.

#include "dflash-tokens.h"

struct AcceptCase {
    int64_t T, N, C;
    Ints tokens, block, n_rows, slots;
    Ints n_pending, base, history; // before, then after

    int64_t lanes() const { return (int64_t) slots.size(); }
};

inline Ints accept_run(AcceptCase & c, int n_threads) {
    Run run((1 << 16) + 4 * c.history.size());
    const int64_t L = c.lanes();
    ggml_tensor * tokens = run.source({c.T, L}, c.tokens.data(), GGML_TYPE_I32);
    ggml_tensor * block = run.source({c.T, L}, c.block.data(), GGML_TYPE_I32);
    ggml_tensor *n_rows = run.source(c.n_rows), *slots = run.source(c.slots);
    ggml_tensor *n_pending = run.source(c.n_pending), *base = run.source(c.base);
    ggml_tensor * history = run.source({c.C, c.N}, c.history.data(), GGML_TYPE_I32);
    ggml_tensor * out =
        run.result(ggml_dflash_accept(run.ctx(), tokens, block, n_rows, slots, n_pending, base, history));
    run.compute({out}, n_threads);
    c.n_pending = Run::ints(n_pending);
    c.base = Run::ints(base);
    c.history = Run::ints(history);
    return Run::ints(out);
}

// Row t is final when its token is one and all rows before it were predicted: the rule by rows, not by prefix.
inline bool row_is_final(const AcceptCase & c, int64_t lane, int64_t t) {
    for (int64_t i = 0; i <= t; i++) {
        const int32_t token = c.tokens[lane * c.T + i];
        if (token == -1 || (i < t && token != c.block[lane * c.T + i + 1])) {
            return false;
        }
    }
    return true;
}

inline Ints accept_reference(AcceptCase & c) {
    Ints out;
    for (int64_t lane = 0; lane < c.lanes(); lane++) {
        const int32_t slot = c.slots[lane];
        const bool repeated = std::count(c.slots.begin(), c.slots.begin() + lane, slot) > 0;
        const bool has_slot = slot >= 0 && slot < c.N && !repeated;
        const bool live = has_slot && c.n_rows[lane] >= 0 && c.n_rows[lane] <= c.T && c.base[slot] >= 0;
        Ints emitted;
        for (int64_t t = 0; live && t < c.n_rows[lane] && row_is_final(c, lane, t); t++) {
            emitted.push_back(c.tokens[lane * c.T + t]);
        }
        if (live) {
            c.n_pending[slot] = (int32_t) emitted.size();
            for (int32_t token : emitted) {
                const int64_t position = ++c.base[slot]; // the token's, once it is there
                if (position < c.C) {
                    c.history[slot * c.C + position] = token;
                }
            }
        }
        out.push_back((int32_t) emitted.size());
        emitted.resize(c.T, -1);
        out.insert(out.end(), emitted.begin(), emitted.end());
    }
    return out;
}

inline void accept_check(const AcceptCase & c) {
    AcceptCase expected = c;
    const Ints want = accept_reference(expected);
    for (int n_threads : thread_counts({1, 3})) {
        AcceptCase got = c;
        const Ints out = accept_run(got, n_threads);
        counter().expect(out == want, "result with %d threads", n_threads);
        counter().expect(got.n_pending == expected.n_pending, "n_pending with %d threads", n_threads);
        counter().expect(got.base == expected.base, "base with %d threads", n_threads);
        counter().expect(got.history == expected.history, "history with %d threads", n_threads);
    }
}

// Lanes whose blocks agree in a random leading part; slots and positions of every kind.
inline AcceptCase random_accept_case(int64_t T, int64_t L, int64_t N) {
    std::mt19937 & engine = random_engine();
    const auto below = [&](int64_t n) { return (int32_t) (engine() % (uint64_t) n); };
    const int64_t C = 1 + below(40);
    AcceptCase c = {T, N, C, {}, {}, {}, {}, Ints(N), Ints(N), Ints(C * N, -7)}; // -7: a value that no op writes
    for (int64_t slot = 0; slot < N; slot++) {
        const int32_t strange[] = {-1, INT32_MIN, (int32_t) C, INT32_MAX - 20};
        c.n_pending[slot] = 100 + (int32_t) slot; // the same
        c.base[slot] = below(5) == 0 ? strange[below(4)] : below(C);
    }
    for (int64_t lane = 0; lane < L; lane++) {
        const int32_t strange[] = {-1, (int32_t) N, INT32_MIN, INT32_MAX};
        c.slots.push_back(below(6) == 0 ? strange[below(4)] : below(N));
        c.n_rows.push_back(below(8) == 0 ? (below(2) ? -1 : (int32_t) T + 1) : below(T + 1));
        const int32_t agree = below(T + 1);
        for (int32_t t = 0; t < T; t++) {
            c.block.push_back(t > 0 && t <= agree ? c.tokens.back() : below(3) == 0 ? -1 : below(248320));
            c.tokens.push_back(below(12) == 0 ? -1 : below(248320));
        }
    }
    return c;
}

inline void accept_cases() {
    counter().label = "accept by hand";
    // agrees in all rows; the same; in none; up to a row without a token; padded; no rows; no anchor; a slot again
    AcceptCase c = {3,
                    6,
                    8,
                    {5, 6, 7, 1, 2, 3, 4, 4, 4, 8, -1, 9, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7},
                    {0, 5, 6, 0, 1, 2, 4, 9, 4, 0, 8, 8, 0, 5, 6, 0, 5, 6, 0, 5, 6, 0, 5, 6},
                    {3, 3, 3, 3, 3, 0, 3, 3},
                    {2, 0, 1, 5, -1, 4, 3, 2},
                    Ints(6, 77),
                    {0, 5, 6, -1, 3, 2},
                    Ints(48, 88)};
    AcceptCase after = c;
    const Ints want = {3, 5,  6,  7,  3, 1,  2,  3,  1, 4,  -1, -1, 1, 8,  -1, -1,
                       0, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1, 0, -1, -1, -1};
    Ints history(48, 88);
    history[1] = 1, history[2] = 2, history[3] = 3; // slot 0
    history[8 + 6] = 4;                             // slot 1
    history[16 + 7] = 5;                            // slot 2, whose history ends here
    history[40 + 3] = 8;                            // slot 5
    counter().expect(accept_run(after, 1) == want, "result");
    counter().expect(after.n_pending == Ints({3, 1, 3, 77, 0, 1}), "n_pending");
    counter().expect(after.base == Ints({3, 6, 9, -1, 3, 3}), "base");
    counter().expect(after.history == history, "history");
    accept_check(c);
    AcceptCase other = c;
    other.block[2]++; // a reference that ignores the proposals would not see this
    counter().expect(accept_reference(other) != want, "the case cannot fail");

    for (int64_t T : {1, 2, 3, 8, 16}) {
        for (int64_t L : {1, 2, 7, 64}) {
            for (int64_t N : {1, 5, 80}) {
                char label[64];
                std::snprintf(label, sizeof(label), "accept T=%d L=%d N=%d", (int) T, (int) L, (int) N);
                counter().label = label;
                for (int i = 0; i < 2; i++) {
                    accept_check(random_accept_case(T, L, N));
                }
            }
        }
    }
}
