#pragma once

// penalise: by hand, and against the rule with a set in place of the bitmap. Every other number of the logits keeps its
// bits, those of rows and lanes that are dead included.

#include "dflash-tokens.h"

#include <set>

struct PenaliseCase {
    int64_t V, T, N, C, NB;
    Floats logits;
    Ints block, base, n_rows, slots, history;
    Floats penalties; // repetition, presence
    Ints bias;        // id, F32 bits

    int64_t lanes() const { return (int64_t) slots.size(); }
};

inline int32_t bits_as_int(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits;
}

inline float int_as_float(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

inline Floats penalise_run(const PenaliseCase & c, int n_threads) {
    Run run(4 * (c.logits.size() + c.history.size() + c.bias.size()) + (1 << 16));
    ggml_tensor * logits = run.source({c.V, c.T, c.lanes()}, c.logits);
    ggml_tensor * block = run.source({c.T, c.lanes()}, c.block.data(), GGML_TYPE_I32);
    ggml_tensor *base = run.source(c.base), *n_rows = run.source(c.n_rows), *slots = run.source(c.slots);
    ggml_tensor * history = run.source({c.C, c.N}, c.history.data(), GGML_TYPE_I32);
    ggml_tensor * penalties = run.source({2, c.N}, c.penalties);
    ggml_tensor * bias = run.source({2, c.NB, c.N}, c.bias.data(), GGML_TYPE_I32);
    ggml_tensor * out =
        run.result(ggml_dflash_penalise(run.ctx(), logits, block, base, n_rows, slots, history, penalties, bias));
    run.compute({out}, n_threads);
    counter().expect(out->data == logits->data, "the result is no view of the logits");
    return Run::floats(logits);
}

inline void penalise_row(const PenaliseCase & c, int64_t lane, int64_t t, float * x) {
    const int32_t slot = c.slots[lane];
    const int32_t * pairs = &c.bias[slot * c.NB * 2];
    for (int64_t i = 0; i < c.NB && pairs[2 * i] >= 0; i++) {
        if (pairs[2 * i] < c.V) {
            x[pairs[2 * i]] = rounded((double) x[pairs[2 * i]] + int_as_float(pairs[2 * i + 1]));
        }
    }
    const float repetition = c.penalties[2 * slot], presence = c.penalties[2 * slot + 1];
    if (repetition == 1 && presence == 0) {
        return;
    }
    const int32_t *history = &c.history[slot * c.C], *block = &c.block[lane * c.T];
    std::set<int32_t> past(history, history + std::min<int64_t>(c.base[lane], c.C - 1) + 1);
    past.insert(block + 1, block + 1 + t);
    for (int32_t id : past) {
        if (id >= 0 && id < c.V) {
            const double scaled = x[id] > 0 ? (double) x[id] / repetition : (double) x[id] * repetition;
            x[id] = rounded((double) rounded(scaled) - presence);
        }
    }
}

inline Floats penalise_reference(const PenaliseCase & c) {
    Floats logits = c.logits;
    for (int64_t lane = 0; lane < c.lanes(); lane++) {
        const int32_t slot = c.slots[lane], n = c.n_rows[lane];
        const bool live = slot >= 0 && slot < c.N && n >= 0 && n <= c.T && c.base[lane] >= 0;
        for (int64_t t = 0; live && t < n; t++) {
            penalise_row(c, lane, t, &logits[(lane * c.T + t) * c.V]);
        }
    }
    return logits;
}

// The same bits, but for which NaN an operation makes of a NaN.
inline bool same_numbers(const Floats & got, const Floats & want, const Floats & before) {
    for (size_t i = 0; i < want.size(); i++) {
        const bool is_changed = !same_bits(&want[i], &before[i], 1) || std::isnan(want[i]);
        if (!same_bits(&got[i], &want[i], 1) && !(is_changed && std::isnan(got[i]) && std::isnan(want[i]))) {
            return false;
        }
    }
    return got.size() == want.size();
}

inline void penalise_check(const PenaliseCase & c) {
    const Floats want = penalise_reference(c);
    for (int n_threads : thread_counts({1, 3})) {
        counter().expect(same_numbers(penalise_run(c, n_threads), want, c.logits), "logits with %d threads", n_threads);
    }
}

// Slots, counts, positions and ids of every kind; ids from a few so that they repeat, and around the ends of windows.
inline PenaliseCase random_penalise_case(int64_t V, int64_t T, int64_t L, int64_t N, int64_t C, int64_t NB) {
    std::mt19937 & engine = random_engine();
    const auto below = [&](int64_t n) { return (int32_t) (engine() % (uint64_t) n); };
    const auto any_id = [&] {
        const int32_t strange[] = {-1, (int32_t) V, INT32_MIN, INT32_MAX, (int32_t) V - 1, 0};
        const int32_t edge = (below(4) << 18) + below(3) - 1;
        return below(8) == 0 ? strange[below(6)] : below(8) == 0 ? edge : below(2) ? below(V) : below(1 + V / 5);
    };
    PenaliseCase c = {V, T, N, C, NB, normal(V * T * L, 5), {}, {}, {}, {}, {}, {}, {}};
    const float odd[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 3e38f, -3e38f, 1e-40f, -1e-40f};
    for (size_t i = 0; i < c.logits.size(); i += 1 + below(50)) {
        c.logits[i] = odd[below(9)];
    }
    for (int64_t lane = 0; lane < L; lane++) {
        const int32_t strange[] = {-1, (int32_t) N, INT32_MIN, INT32_MAX};
        const int32_t counts[] = {-1, (int32_t) T + 1, INT32_MIN, INT32_MAX};
        const int32_t bases[] = {-1, (int32_t) C, INT32_MIN, INT32_MAX};
        c.slots.push_back(below(6) == 0 ? strange[below(4)] : below(N));
        c.n_rows.push_back(below(8) == 0 ? counts[below(4)] : below(4) ? (int32_t) T : below(T + 1));
        c.base.push_back(below(6) == 0 ? bases[below(4)] : below(C));
    }
    for (int64_t i = 0; i < T * L; i++) {
        c.block.push_back(any_id());
    }
    for (int64_t i = 0; i < C * N; i++) {
        c.history.push_back(any_id());
    }
    for (int64_t slot = 0; slot < N; slot++) {
        const int kind = below(4); // neutral, one of both, both
        c.penalties.push_back(kind & 1 ? 0.5f + (float) below(1000) / 400 : 1.0f);
        c.penalties.push_back(kind & 2 ? (float) below(1000) / 400 - 1 : 0.0f);
        const int64_t end = below(4) == 0 ? NB : below(NB + 1), step = std::max<int64_t>(1, (V + 9) / NB);
        for (int64_t i = 0; i < NB; i++) { // behind the end of the list comes what would show
            const int32_t ends[] = {-1, INT32_MIN};
            c.bias.push_back(i == end ? ends[below(2)] : (int32_t) (i * step));
            c.bias.push_back(bits_as_int(below(20) == 0 ? -INFINITY : normal(1, 3)[0]));
        }
    }
    return c;
}

inline void penalise_by_hand() {
    counter().label = "penalise by hand";
    PenaliseCase c = {6,
                      2,
                      1,
                      4,
                      4,
                      {2, -2, 1, 0.5f, 3, -1, 2, -2, 1, 0.5f, 3, -1},
                      {5, 3},
                      {2},
                      {2},
                      {0},
                      {0, 1, 0, 4},
                      {2, 0.5f},
                      {1, bits_as_int(4), 5, bits_as_int(-1), -1, 0, 2, bits_as_int(100)}};
    const Floats want = {0.5f, 0.5f, 1, 0.5f, 3, -2, 0.5f, 0.5f, 1, -0.25f, 3, -2};
    counter().expect(penalise_run(c, 1) == want && penalise_reference(c) == want, "biases, then penalties");
    c.base = {3}; // the whole history, whatever lies behind it
    Floats longer = want;
    longer[4] = longer[10] = 1;
    for (int32_t base : {3, 4, INT32_MAX}) {
        c.base = {base};
        counter().expect(penalise_run(c, 1) == longer && penalise_reference(c) == longer, "base %d", base);
    }
    c.penalties = {1, 0};
    const Floats biased = {2, 2, 1, 0.5f, 3, -2, 2, 2, 1, 0.5f, 3, -2};
    counter().expect(penalise_run(c, 1) == biased && penalise_reference(c) == biased, "biases alone");
    c.bias[0] = -1;
    counter().expect(penalise_run(c, 1) == c.logits, "nothing");
}

inline void penalise_cases() {
    penalise_by_hand();
    const struct {
        int64_t V, T, L, N, C, NB;
    } table[] = {
        {1, 1, 1, 1, 1, 1},           {33, 3, 7, 5, 20, 4},
        {33, 16, 64, 80, 50, 1},      {300, 8, 2, 1, 1, 64},
        {5000, 16, 3, 5, 3000, 4096}, {1100, 1, 64, 64, 9000, 3},
        {248320, 2, 2, 2, 70000, 8},  {(1 << 18) - 1, 1, 1, 1, 900, 5},
        {1 << 18, 1, 1, 1, 900, 5},   {(1 << 18) + 1, 2, 1, 1, 900, 5},
        {1 << 20, 2, 1, 1, 2000, 9},
    };
    for (const auto & z : table) {
        char label[96];
        std::snprintf(label, sizeof(label), "penalise V=%d T=%d L=%d N=%d C=%d NB=%d", (int) z.V, (int) z.T, (int) z.L,
                      (int) z.N, (int) z.C, (int) z.NB);
        counter().label = label;
        int changed = 0;
        for (int i = 0; i < 6; i++) {
            const PenaliseCase c = random_penalise_case(z.V, z.T, z.L, z.N, z.C, z.NB);
            changed += !same_bits(penalise_reference(c), c.logits);
            penalise_check(c);
        }
        counter().expect(changed > 0, "no case changes anything");
    }
}
