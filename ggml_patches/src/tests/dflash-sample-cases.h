#pragma once

// sample: against the rules one step at a time (dflash-tokens.h), to the token, and against itself in other shapes.

#include "dflash-tokens.h"

struct SampleCase {
    int64_t V, T, L;
    Floats logits;
    Ints base, n_rows;
    std::vector<Drawing> how;

    SampleCase(int64_t V, int64_t T, int64_t L)
        : V(V), T(T), L(L), logits(normal(V * T * L, 4.0f)), base(L, 100), n_rows(L, (int32_t) T), how(L) {}

    float * row(int64_t t, int64_t lane) { return &logits[(lane * T + t) * V]; }

    // row t of a lane as a case of its own, at the same position
    SampleCase alone(int64_t t, int64_t lane) const {
        SampleCase c(1, 1, 1);
        c.V = V;
        c.logits.assign(&logits[(lane * T + t) * V], &logits[(lane * T + t) * V] + V);
        c.base = {base[lane] + (int32_t) t};
        c.how = {how[lane]};
        return c;
    }
};

inline Ints sample_run(const SampleCase & c, int n_threads = 1) {
    Run run(c.logits.size() * sizeof(float) + (1 << 16));
    const Ints columns = sampling_columns(c.how);
    ggml_tensor * logits = run.source({c.V, c.T, c.L}, c.logits);
    ggml_tensor * base = run.source(c.base);
    ggml_tensor * n_rows = run.source(c.n_rows);
    ggml_tensor * sampling = run.source({GGML_DFLASH_SAMPLING_WORDS, c.L}, columns.data(), GGML_TYPE_I32);
    ggml_tensor * out = run.result(ggml_dflash_sample(run.ctx(), logits, base, n_rows, sampling));
    run.compute({out}, n_threads);
    return Run::ints(out);
}

inline Ints sample_reference(const SampleCase & c) {
    Ints out;
    for (int64_t i = 0; i < c.T * c.L; i++) {
        const int64_t lane = i / c.T, t = i % c.T;
        const bool live = c.base[lane] >= 0 && c.n_rows[lane] >= 0 && c.n_rows[lane] <= c.T && t < c.n_rows[lane];
        const Floats row(&c.logits[i * c.V], &c.logits[i * c.V] + c.V);
        out.push_back(live ? slow_draw(row, c.how[lane], (int64_t) c.base[lane] + t + 1) : -1);
    }
    return out;
}

inline void sample_check(const SampleCase & c, const char * what, int n_threads = 1) {
    const Ints got = sample_run(c, n_threads), want = sample_reference(c);
    for (size_t i = 0; i < got.size(); i++) {
        const Drawing & how = c.how[i / c.T];
        counter().expect(got[i] == want[i], "%s: row %d is %d, not %d (T %g, top-k %d, top-p %.17g, log min-p %g)",
                         what, (int) i, got[i], want[i], how.temperature, how.top_k, how.top_p, how.log_min_p);
    }
}

inline Drawing random_drawing(int64_t V) {
    std::mt19937 & engine = random_engine();
    const auto pick = [&](const auto & values) { return values[engine() % (sizeof(values) / sizeof(values[0]))]; };
    const float temperatures[] = {0.0f, -1.0f, NAN, 1e-6f, 0.1f, 0.7f, 1.0f, 1.0f, 1.7f, 30.0f, 1e6f};
    const int32_t top_ks[] = {0, 0, -1, 1, 2, 20, 40, (int32_t) V - 1, (int32_t) V, (int32_t) V + 1, INT32_MAX};
    const double top_ps[] = {1.0, 1.0, NAN, 0.0, 1e-300, 0.1, 0.5, 0.9, 0.95, 0.999, 1 - 1e-16, 2.0};
    const float log_min_ps[] = {-INFINITY, -INFINITY, NAN, 0.0f, -0.1f, -1.0f, -3.0f, -20.0f, -1e30f};
    Drawing how;
    how.seed = (uint64_t) engine() << 32 | engine();
    how.temperature = pick(temperatures);
    how.top_k = pick(top_ks);
    how.top_p = pick(top_ps);
    how.log_min_p = pick(log_min_ps);
    return how;
}

// Rows with many equal numbers, and both zeros.
inline void coarsen(SampleCase & c) {
    for (float & x : c.logits) {
        x = std::round(x * 0.5f) * 2.0f; // gives -0 too
    }
}

inline void sample_random_parameters(int64_t V, int n) {
    char label[64];
    std::snprintf(label, sizeof(label), "sample V=%d", (int) V);
    counter().label = label;
    for (int i = 0; i < n; i++) {
        SampleCase c(V, 1 + i % 16, 1 + i % 3);
        for (int64_t lane = 0; lane < c.L; lane++) {
            c.how[lane] = random_drawing(V);
            c.base[lane] = lane == 0 ? INT32_MAX - i : i;
        }
        if (i % 3 == 1) {
            coarsen(c);
        }
        if (i % 3 == 2) { // forbidden tokens, and one row with nothing else
            for (size_t j = 0; j < c.logits.size(); j += 1 + j % 3) {
                c.logits[j] = -INFINITY;
            }
            std::fill_n(c.row(c.T - 1, c.L - 1), V, -INFINITY);
        }
        sample_check(c, "random", 1 + i % 3);
    }
}

inline void sample_independence(int64_t V) {
    counter().label = "sample, rows alone";
    SampleCase c(V, 5, 3);
    for (Drawing & how : c.how) {
        how = random_drawing(V);
        how.temperature = 1.0f;
    }
    const Ints together = sample_run(c);
    for (int n_threads : thread_counts({2, 3, 7})) {
        counter().expect(sample_run(c, n_threads) == together, "%d threads differ", n_threads);
    }
    for (int64_t i = 0; i < c.T * c.L; i++) {
        counter().expect(sample_run(c.alone(i % c.T, i / c.T))[0] == together[i], "row %d alone", (int) i);
    }
}

inline void sample_dead_rows() {
    counter().label = "sample, dead rows";
    const int32_t T = 3;
    const struct {
        int32_t base, n_rows;
    } table[] = {{0, T},     {0, 0},         {0, 1},  {0, 2},         {0, -1},
                 {0, T + 1}, {0, INT32_MIN}, {-1, T}, {INT32_MIN, T}, {INT32_MAX, T}};
    SampleCase c(50, T, (int64_t) (sizeof(table) / sizeof(table[0])));
    for (int64_t lane = 0; lane < c.L; lane++) {
        c.base[lane] = table[lane].base;
        c.n_rows[lane] = table[lane].n_rows;
        c.how[lane].temperature = (float) (lane % 2);
    }
    sample_check(c, "counts");
    const Ints out = sample_run(c);
    for (int64_t lane = 3; lane < c.L - 1; lane++) {
        const int64_t n_live = lane == 3 ? 2 : 0;
        counter().expect(all_dead(&out[lane * T + n_live], T - n_live), "lane %d lives", (int) lane);
    }
}

// A NaN or an infinity at each place of a row, one row each.
inline void sample_bad_rows(int64_t V) {
    counter().label = "sample, bad rows";
    for (float bad : {NAN, INFINITY, -INFINITY}) {
        for (float temperature : {0.0f, 1.0f}) {
            for (int64_t first = 0; first < V; first += 16) {
                SampleCase c(V, 16, 1);
                c.how[0].temperature = temperature;
                for (int64_t t = 0; t < 16 && first + t < V; t++) {
                    c.row(t, 0)[first + t] = bad;
                }
                sample_check(c, "bad number");
                const Ints out = sample_run(c);
                const int64_t n = std::min<int64_t>(16, V - first);
                counter().expect(bad < 0 || all_dead(out.data(), n), "a row with %g has a token", bad);
            }
        }
    }
}

inline void sample_ties() {
    counter().label = "sample, ties";
    SampleCase zeros(4099, 2, 1); // -0 = +0: the first is taken
    std::fill(zeros.logits.begin(), zeros.logits.end(), -1.0f);
    zeros.row(0, 0)[2100] = 0.0f, zeros.row(0, 0)[1030] = -0.0f, zeros.row(0, 0)[4098] = 0.0f;
    zeros.row(1, 0)[4098] = -0.0f, zeros.row(1, 0)[4097] = 0.0f;
    counter().expect(sample_run(zeros) == Ints({1030, 4097}), "zeros");

    SampleCase huge(3, 1, 1); // the quotients of two are infinite
    huge.logits = {1.0f, 3e38f, 3.1e38f};
    huge.how[0].temperature = 1e-6f;
    counter().expect(sample_run(huge) == Ints({1}), "infinite quotients");
    huge.logits = {-INFINITY, -3.1e38f, -3e38f}; // all quotients are -infinity: the first kept one
    sample_check(huge, "infinite negative quotients");
    counter().expect(sample_run(huge) == Ints({0}), "infinite negative quotients");

    // Tokens of equal rounded distance and unequal logits: top-p takes the lower id, though its logit is less.
    SampleCase near(3, 1, 1);
    near.logits = {1e-9f, 2e-9f, 3.0f};
    near.how[0] = {7, 1e6f, 0, 0.94, -INFINITY};
    counter().expect(slow_kept(near.logits, near.how[0]) == Ints({0, 2}), "the case is not what it says");
    for (uint64_t seed = 0; seed < 40; seed++) {
        near.how[0].seed = seed;
        sample_check(near, "equal distances");
    }
}

// Of five equal tokens the first top_k are drawn, all of them and no others.
inline void sample_top_k() {
    counter().label = "sample, top-k";
    for (int32_t top_k = 0; top_k <= 6; top_k++) {
        SampleCase c(5, 1, 64);
        std::fill(c.logits.begin(), c.logits.end(), -2.5f);
        for (int64_t lane = 0; lane < c.L; lane++) {
            c.how[lane] = {(uint64_t) lane, 1.0f, top_k, 1.0, -INFINITY};
        }
        Ints out = sample_run(c);
        std::sort(out.begin(), out.end());
        out.erase(std::unique(out.begin(), out.end()), out.end());
        counter().expect(out == rising_ids(top_k == 0 || top_k > 5 ? 5 : top_k), "top-k %d draws %d", top_k,
                         (int) out.size());
    }
}

// Two equal tokens weigh 2^32 each: one is half of it, and half a unit more takes both.
inline void sample_halves() {
    counter().label = "sample, halves";
    SampleCase c(2, 1, 64);
    std::fill(c.logits.begin(), c.logits.end(), 0.5f);
    for (double more : {0.0, 0x1p-34, -0x1p-34}) {
        for (int64_t lane = 0; lane < c.L; lane++) {
            c.how[lane] = {(uint64_t) lane, 1.0f, 0, 0.5 + more, -INFINITY};
        }
        const Ints out = sample_run(c);
        const int64_t n_second = std::count(out.begin(), out.end(), 1);
        counter().expect(more > 0 ? n_second > 10 : n_second == 0, "%d of the second", (int) n_second);
        sample_check(c, "halves");
    }
}

// Kept are exactly those that the weights say, where half a unit of 2^-32 decides: a weight that is one off moves it.
inline void sample_weights() {
    counter().label = "sample, weights";
    for (int i = 0; i < 60; i++) {
        SampleCase c(3, 1, 64);
        const float second = -0.003f * i * i, third = second - 0.1f * (i % 7);
        const double w0 = slow_weight(0), w1 = slow_weight(second), w2 = slow_weight(third);
        for (double more : {-0.25, 0.25}) {
            Drawing how = {0, 1e6f, 0, (w0 + w1 + more) / (w0 + w1 + w2), -INFINITY};
            for (int64_t lane = 0; lane < c.L; lane++) {
                std::copy_n(Floats({0.0f, second, third}).begin(), 3, c.row(0, lane));
                how.seed = (uint64_t) lane;
                c.how[lane] = how;
            }
            sample_check(c, "three tokens");
        }
    }
}

// The largest and the smallest noise that there is: the token wins from as far below, or loses from as far above, as it
// can.
inline void sample_extreme_noise() {
    counter().label = "sample, extreme noise";
    const struct {
        uint64_t seed;
        int32_t token;
        float noise;
    } table[] = {{845719, 2246, 22.873857f}, {49422, 3663, -2.811541f}}; // hashes of 0 and 2^32 - 21
    for (const auto & at : table) {
        const int32_t rival = 100;
        const float noise = slow_noise(at.seed, 1, at.token), other = slow_noise(at.seed, 1, rival);
        counter().expect(std::fabs(noise - at.noise) < 1e-5, "the noise is %g", noise);
        SampleCase c(4099, 1, 1);
        c.base = {0};
        c.how[0].seed = at.seed;
        c.how[0].temperature = 1.0f;
        for (float more : {1e-3f, -1e-3f}) {
            std::fill(c.logits.begin(), c.logits.end(), -1000.0f);
            c.logits[rival] = 0.0f;
            c.logits[at.token] = other - noise + more;
            counter().expect(sample_run(c) == Ints({more > 0 ? at.token : rival}), "%g by %g", noise, more);
        }
    }
}

inline void sample_cases() {
    counter().label = "sample, reference";
    check_noise_reference();
    sample_random_parameters(1, 20);
    sample_random_parameters(2, 40);
    sample_random_parameters(33, 200);
    sample_random_parameters(1000, 120);
    sample_random_parameters(4099, 30);
    sample_random_parameters(248320, 2);
    sample_independence(33);
    sample_independence(4099);
    sample_dead_rows();
    sample_bad_rows(33);
    sample_bad_rows(1100);
    sample_ties();
    sample_top_k();
    sample_halves();
    sample_weights();
    sample_extreme_noise();

    counter().label = "sample, control"; // another seed or position draws others
    SampleCase c(1000, 16, 2);
    for (Drawing & how : c.how) {
        how.temperature = 1.0f;
    }
    const Ints tokens = sample_run(c);
    c.how[1].seed = 1;
    const Ints other_seed = sample_run(c);
    counter().expect(std::equal(tokens.begin(), tokens.begin() + 16, other_seed.begin()), "seed of another lane");
    counter().expect(!std::equal(tokens.begin() + 16, tokens.end(), other_seed.begin() + 16), "seed without effect");
    c.base[0]++;
    counter().expect(!std::equal(tokens.begin(), tokens.begin() + 16, sample_run(c).begin()), "position ignored");
}
