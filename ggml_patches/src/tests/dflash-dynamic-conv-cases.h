#pragma once

// dynamic_conv: bit for bit against the formula, and against itself in other shapes.

#include "dflash-harness.h"

struct DynamicConvCase {
    int64_t E, G, K, T, L;
    Floats x, coef, base;

    DynamicConvCase(int64_t E, int64_t G, int64_t K, int64_t T, int64_t L)
        : E(E), G(G), K(K), T(T), L(L), x(normal(E * T * L)), coef(normal(G * K * T * L)), base(normal(E * K)) {}

    // the first n rows of lanes lane..lane+m-1
    DynamicConvCase part(int64_t n, int64_t lane, int64_t m) const {
        DynamicConvCase c = *this;
        c.T = n;
        c.L = m;
        c.x.clear();
        c.coef.clear();
        for (int64_t l = lane; l < lane + m; l++) {
            c.x.insert(c.x.end(), &x[l * T * E], &x[l * T * E] + n * E);
            c.coef.insert(c.coef.end(), &coef[l * T * G * K], &coef[l * T * G * K] + n * G * K);
        }
        return c;
    }
};

// Rows of the data, `apart` numbers from one to the next, NaN between them; a view of the data.
inline ggml_tensor * spaced(Run & run, const Floats & data, int64_t width, int64_t apart,
                            const std::vector<int64_t> & ne) {
    const int64_t n = (int64_t) data.size() / width;
    Floats wide = nans(n * apart);
    for (int64_t i = 0; i < n; i++) {
        std::copy_n(&data[i * width], width, &wide[i * apart + 3]);
    }
    ggml_tensor * t = run.source({apart, n}, wide);
    const auto size = [&](size_t d) { return d < ne.size() ? ne[d] : 1; };
    const size_t row = apart * sizeof(float);
    t = ggml_view_4d(run.ctx(), t, size(0), size(1), size(2), size(3), row, row * size(1), row * size(1) * size(2),
                     3 * sizeof(float));
    ggml_backend_view_init(t);
    return t;
}

inline Floats dynamic_conv_run(const DynamicConvCase & c, int n_threads = 1, bool strided = false) {
    Run run(sizeof(float) * 8 * (c.x.size() + c.coef.size() + c.base.size()) + (1 << 16));
    const int64_t more = strided ? 5 : 0;
    const auto source = [&](const Floats & data, const std::vector<int64_t> & ne) {
        return more ? spaced(run, data, ne[0], ne[0] + more, ne) : run.source(ne, data);
    };
    ggml_tensor * x = source(c.x, {c.E, c.T, c.L});
    ggml_tensor * coef = source(c.coef, {c.G, c.K, c.T, c.L});
    ggml_tensor * out = run.result(ggml_dflash_dynamic_conv(run.ctx(), x, coef, source(c.base, {c.E, c.K})));
    run.compute({out}, n_threads);
    return Run::floats(out);
}

// The formula, every step a float operation: order and fma are part of the op's contract.
inline Floats dynamic_conv_reference(const DynamicConvCase & c) {
    Floats y(c.x.size());
    for (int64_t row = 0; row < c.T * c.L; row++) {
        for (int64_t e = 0; e < c.E; e++) {
            for (int64_t tap = 0; tap < c.K && tap <= row % c.T; tap++) {
                const float weight = c.base[tap * c.E + e] + c.coef[(row * c.K + tap) * c.G + e / (c.E / c.G)];
                y[row * c.E + e] = std::fma(weight, c.x[(row - tap) * c.E + e], y[row * c.E + e]);
            }
        }
    }
    return y;
}

inline void dynamic_conv_check(const DynamicConvCase & c) {
    const Floats y = dynamic_conv_run(c);
    counter().expect(same_bits(y, dynamic_conv_reference(c)), "not the bits of the formula");

    for (int n_threads : thread_counts({2, 3})) {
        counter().expect(same_bits(dynamic_conv_run(c, n_threads, true), y), "strided, %d threads", n_threads);
    }
    for (int64_t lane = 0; lane < c.L; lane++) {
        for (int64_t n = 1; n <= c.T; n++) { // rows that follow change nothing
            const Floats part = dynamic_conv_run(c.part(n, lane, 1));
            counter().expect(same_bits(part.data(), &y[lane * c.T * c.E], n * c.E), "%d rows of lane %d alone", (int) n,
                             (int) lane);
        }
    }
}

inline void dynamic_conv_cases() {
    const int64_t table[][5] = {
        // E, G, K, T, L
        {1, 1, 1, 1, 1},   {6, 3, 2, 2, 2},   {33, 1, 3, 5, 1},    {33, 33, 4, 4, 3},
        {48, 3, 8, 16, 2}, {257, 1, 2, 8, 1}, {1280, 20, 2, 8, 5}, {96, 6, 8, 3, 1},
    };
    for (const auto & z : table) {
        char label[96];
        std::snprintf(label, sizeof(label), "dynamic_conv E=%d G=%d K=%d T=%d L=%d", (int) z[0], (int) z[1], (int) z[2],
                      (int) z[3], (int) z[4]);
        counter().label = label;
        DynamicConvCase c(z[0], z[1], z[2], z[3], z[4]);
        dynamic_conv_check(c);
        const Floats y = dynamic_conv_run(c);
        c.coef[0] += 1.0f; // of the first row and tap: a kernel that reads another one is told apart
        counter().expect(!same_bits(y, dynamic_conv_reference(c)), "the case cannot fail");
    }

    counter().label = "dynamic_conv of a bad row";
    DynamicConvCase c(8, 2, 3, 6, 1);
    const Floats good = dynamic_conv_run(c);
    c.x[3 * 8] = NAN; // row 3, channel 0: rows 3..5 of this channel are NaN, nothing else changes
    const Floats bad = dynamic_conv_run(c);
    for (int64_t i = 0; i < (int64_t) bad.size(); i++) {
        const bool hit = i % 8 == 0 && i / 8 >= 3;
        counter().expect(hit ? std::isnan(bad[i]) : same_bits(&bad[i], &good[i], 1), "number %d", (int) i);
    }
}
