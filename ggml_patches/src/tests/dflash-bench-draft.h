#pragma once

// Benchmarks of the draft's ops and of what decides about tokens, beside stock ggml's way where there is one.

#include "dflash-bench-target.h"

inline Bench bench_dynamic_conv(const BenchSizes & z, int64_t L) {
    const int64_t E = z.E, G = z.G, K = z.taps, T = z.T, n = T * L;
    Bench b;
    b.op = "dynamic_conv";
    b.shape = "E=" + std::to_string(E) + " G=" + std::to_string(G) + " K=" + std::to_string(K);
    b.lanes = L;
    b.bytes = 4.0 * (2.0 * E * n + (double) G * K * n + (double) E * K);
    b.ours = [=](Sources & s) {
        return ggml_dflash_dynamic_conv(s.ctx(), s.noise({E, T, L}), s.noise({G, K, T, L}), s.noise({E, K}));
    };
    b.stock_way = "repeat, add, pad, mul, add a tap";
    b.stock = [=](Sources & s) {
        ggml_context * ctx = s.ctx();
        ggml_tensor *x = s.noise({E, n}), *coef = s.noise({G * K, n}), *base = s.noise({E, K}), *sum = nullptr;
        for (int64_t tap = 0; tap < K; tap++) {
            ggml_tensor * dynamic = ggml_view_3d(ctx, coef, 1, G, n, 4, coef->nb[1], 4 * G * tap);
            ggml_tensor * fixed = ggml_view_2d(ctx, base, E / G, G, 4 * (E / G), 4 * E * tap);
            ggml_tensor * weight = ggml_add(ctx, ggml_repeat_4d(ctx, dynamic, E / G, G, n, 1), fixed);
            ggml_tensor * late = x;
            if (tap > 0) {
                ggml_tensor * kept = ggml_view_3d(ctx, x, E, T - tap, L, x->nb[1], x->nb[1] * T, 0);
                late = ggml_reshape_2d(ctx, ggml_pad_ext(ctx, kept, 0, 0, (int) tap, 0, 0, 0, 0, 0), E, n);
            }
            ggml_tensor * term = ggml_mul(ctx, ggml_reshape_2d(ctx, weight, E, n), late);
            sum = sum ? ggml_add(ctx, sum, term) : term;
        }
        return sum;
    };
    return b;
}

// One pair of codebooks for all nodes: only the rows of candidates are read, and these differ.
inline Bench bench_select(const BenchSizes & z, int64_t L, bool drawn) {
    const int64_t V = z.V, P = z.T - 1, R = z.R, k = z.top_k;
    const auto book = [=](Sources & s, int key) { return s.shared(key, {R, V}, GGML_TYPE_Q8_0); };
    Bench b;
    b.op = drawn ? "select, drawn" : "select, greedy";
    b.shape = "V=" + std::to_string(V) + " P=" + std::to_string(P) + " k=" + std::to_string(k) +
              " R=" + std::to_string(R) + " q8_0";
    b.lanes = L;
    b.bytes = L * P * (4.0 * V + 4.0 * R + (1.0 + k) * ggml_row_size(GGML_TYPE_Q8_0, R));
    Ints sampling;
    for (int64_t lane = 0; lane < L; lane++) {
        const float temperature = drawn ? 0.8f : 0.0f;
        Ints column = {(int32_t) lane, 0, 0, 0, 0, 0x3FF00000, (int32_t) 0xFF800000, 0};
        std::memcpy(&column[GGML_DFLASH_SAMPLING_TEMPERATURE], &temperature, sizeof(temperature));
        sampling.insert(sampling.end(), column.begin(), column.end());
    }
    b.ours = [=](Sources & s) {
        return ggml_dflash_select(s.ctx(), s.noise({V, P, L}), s.ints(counting(L, 3)), s.ints(counting(L, 100)),
                                  s.ints(sampling, {GGML_DFLASH_SAMPLING_WORDS, L}), s.noise({R, P, L}), book(s, 0),
                                  book(s, 1), (int32_t) k);
    };
    if (drawn) {
        return b;
    }
    b.stock_way = "top_k, get_rows of both codebooks, mul_mat; without the walk";
    b.stock = [=](Sources & s) {
        ggml_context * ctx = s.ctx();
        ggml_tensor * logits = s.noise({V, P * L});
        ggml_tensor * ids = ggml_cont(ctx, ggml_top_k(ctx, logits, (int) k));
        ggml_tensor * unary = ggml_get_rows(ctx, ggml_reshape_3d(ctx, logits, 1, V, P * L), ids);
        ggml_tensor * flat = ggml_reshape_1d(ctx, ids, k * P * L);
        const auto rows = [&](ggml_tensor * from) {
            return ggml_reshape_4d(ctx, ggml_get_rows(ctx, from, flat), R, k, P, L);
        };
        ggml_tensor * gated = ggml_mul(ctx, rows(book(s, 0)), s.noise({R, 1, P, L}));
        ggml_tensor * edges = ggml_mul_mat(ctx, rows(book(s, 1)), gated);
        return ggml_add(ctx, edges, ggml_reshape_4d(ctx, unary, k, 1, P, L));
    };
    return b;
}

inline Bench bench_sample(const BenchSizes & z, int64_t L, const char * name, const Ints & column) {
    const int64_t V = z.V, T = z.T;
    Bench b;
    b.op = name;
    b.shape = "V=" + std::to_string(V) + " rows=" + std::to_string(T * L);
    b.lanes = L;
    b.bytes = 4.0 * V * T * L;
    Ints sampling;
    for (int64_t lane = 0; lane < L; lane++) {
        sampling.insert(sampling.end(), column.begin(), column.end());
    }
    b.ours = [=](Sources & s) {
        return ggml_dflash_sample(s.ctx(), s.noise({V, T, L}), s.ints(counting(L, 100)), s.ints(Ints(L, (int32_t) T)),
                                  s.ints(sampling, {GGML_DFLASH_SAMPLING_WORDS, L}));
    };
    if (column[GGML_DFLASH_SAMPLING_TEMPERATURE] == 0) {
        b.stock_way = "argmax";
        b.stock = [=](Sources & s) { return ggml_argmax(s.ctx(), s.noise({V, T * L})); };
    }
    return b;
}

inline Ints sampling_column(float temperature, int32_t top_k, double top_p) {
    Ints column = {11, 0, 0, top_k, 0, 0, (int32_t) 0xFF800000, 0};
    std::memcpy(&column[GGML_DFLASH_SAMPLING_TEMPERATURE], &temperature, sizeof(temperature));
    std::memcpy(&column[GGML_DFLASH_SAMPLING_TOP_P_LOW], &top_p, sizeof(top_p));
    return column;
}

inline Bench bench_accept(const BenchSizes & z, int64_t L) {
    const int64_t T = z.T;
    Bench b;
    b.op = "accept";
    b.shape = "T=" + std::to_string(T);
    b.lanes = L;
    b.bytes = 4.0 * L * (4.0 * T + 5);
    b.ours = [=](Sources & s) {
        return ggml_dflash_accept(s.ctx(), s.ints(Ints(T * L, 7), {T, L}), s.ints(Ints(T * L, 7), {T, L}),
                                  s.ints(Ints(L, (int32_t) T)), s.ints(counting(L)), s.ints(Ints(L, 0)),
                                  s.ints(Ints(L, 0)), s.ints(Ints(4096 * L, 7), {4096, L}));
    };
    return b;
}

inline Bench bench_place(const BenchSizes & z, int64_t L) {
    const int64_t T = z.T, C = 4096, pages = C / 16;
    Bench b;
    b.op = "place";
    b.shape = "T=" + std::to_string(T);
    b.lanes = L;
    b.bytes = 4.0 * L * (6.0 * T + 4);
    b.ours = [=](Sources & s) {
        return ggml_dflash_place(s.ctx(), s.ints(counting(L)), s.ints(Ints(L, (int32_t) T)), s.ints(Ints(L, 100)),
                                 s.ints(Ints(C * L, 7), {C, L}), s.ints(counting(pages * L), {pages, L}), nullptr,
                                 (int32_t) T, 11, 0, 0);
    };
    return b;
}

// Slots whose history holds C positions, all of them different tokens. All nodes change the same logits.
inline Bench bench_penalise(const BenchSizes & z, int64_t L, bool is_neutral) {
    const int64_t V = z.V, T = z.T, C = std::min<int64_t>(4096, z.V);
    std::vector<float> penalties;
    Ints history;
    for (int64_t lane = 0; lane < L; lane++) {
        penalties.push_back(is_neutral ? 1.0f : 1.25f);
        penalties.push_back(0.0f);
        for (int64_t i = 0; i < C; i++) {
            history.push_back((int32_t) (i * (V / C)));
        }
    }
    Bench b;
    b.op = is_neutral ? "penalise, neutral" : "penalise";
    b.shape = "V=" + std::to_string(V) + " C=" + std::to_string(C) + " rows=" + std::to_string(T * L);
    b.lanes = L;
    b.bytes = is_neutral ? 4.0 * L * T * 6 : 4.0 * L * T * 3 * C;
    b.ours = [=](Sources & s) {
        return ggml_dflash_penalise(s.ctx(), s.shared(0, {V, T, L}, GGML_TYPE_F32), s.ints(Ints(T * L, 7), {T, L}),
                                    s.ints(Ints(L, (int32_t) C - 1)), s.ints(Ints(L, (int32_t) T)), s.ints(counting(L)),
                                    s.ints(history, {C, L}), s.floats(penalties, {2, L}),
                                    s.ints(Ints(2 * L, -1), {2, 1, L}));
    };
    return b;
}

inline Bench bench_mul_mat(ggml_type type, int64_t K, int64_t M, int64_t n, bool dots) {
    Bench b;
    b.op = "mul_mat";
    b.shape = std::string(ggml_type_name(type)) + " " + std::to_string(M) + " x " + std::to_string(K);
    b.lanes = n;
    b.bytes = (double) ggml_row_size(type, K) * M + 4.0 * (K + M) * n;
    b.ours = [=](Sources & s) { return ggml_dflash_mul_mat(s.ctx(), s.noise({K, M}, type), s.noise({K, n})); };
    b.stock_way = dots ? "a dot product a row and column" : "mul_mat";
    b.stock = [=](Sources & s) { return ggml_mul_mat(s.ctx(), s.noise({K, M}, type), s.noise({K, n})); };
    b.dots = dots;
    return b;
}

inline std::vector<Bench> draft_benches(const BenchSizes & z) {
    std::vector<Bench> all;
    for (int64_t context : z.contexts) {
        for (int64_t L : z.lanes) {
            all.push_back(bench_attention("attention of the draft", {z.draft_D, z.draft_Hq, z.draft_Hkv, z.window}, z.T,
                                          L, context, GGML_TYPE_F16));
        }
    }
    for (int64_t L : z.lanes) {
        all.push_back(bench_dynamic_conv(z, L));
    }
    for (bool drawn : {false, true}) {
        for (int64_t L : z.lanes) {
            all.push_back(bench_select(z, L, drawn));
        }
    }
    for (int64_t L : z.lanes) {
        all.push_back(bench_sample(z, L, "sample, greedy", sampling_column(0, 0, 1)));
    }
    for (int64_t L : z.lanes) {
        all.push_back(bench_sample(z, L, "sample, drawn", sampling_column(0.8f, 0, 1)));
        all.push_back(bench_sample(z, L, "sample, top-k 40, top-p 0.95", sampling_column(0.8f, 40, 0.95)));
    }
    for (int64_t L : z.lanes) {
        all.push_back(bench_accept(z, L));
        all.push_back(bench_place(z, L));
    }
    for (bool is_neutral : {true, false}) {
        for (int64_t L : z.lanes) {
            all.push_back(bench_penalise(z, L, is_neutral));
        }
    }
    return all;
}

// The matrices of a 27B target and its draft, on a device. "lanes" are columns here.
inline std::vector<Bench> device_product_benches(const BenchSizes & z) {
    const struct {
        ggml_type type;
        int64_t K, M;
    } shapes[] = {
        {GGML_TYPE_IQ4_XS, 5120, 17408}, {GGML_TYPE_IQ4_XS, 17408, 5120},  {GGML_TYPE_IQ4_XS, 5120, 10240},
        {GGML_TYPE_IQ4_XS, 5120, 16384}, {GGML_TYPE_IQ4_XS, 6144, 5120},   {GGML_TYPE_IQ4_XS, 5120, 1024},
        {GGML_TYPE_Q8_0, 5120, 17408},   {GGML_TYPE_Q8_0, 25600, 5120},    {GGML_TYPE_Q4_K, 5120, 17408},
        {GGML_TYPE_Q5_K, 5120, 17408},   {GGML_TYPE_IQ4_XS, 5120, 248320}, {GGML_TYPE_Q6_K, 5120, 248320},
    };
    std::vector<Bench> all;
    for (const auto & shape : shapes) {
        for (int64_t n : {1, 2, 4, 5, 8, 16, 32, 64}) {
            all.push_back(z.small ? bench_mul_mat(shape.type, 512, 64, n, false)
                                  : bench_mul_mat(shape.type, shape.K, shape.M, n, false));
        }
    }
    return all;
}

// The same of the CPU: small matrices, stock in both of its ways.
inline std::vector<Bench> product_benches(const BenchSizes & z) {
    std::vector<Bench> all;
    for (ggml_type type : {GGML_TYPE_IQ4_XS, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K}) {
        for (int64_t n : {1, 2, 4, 8, 64}) {
            for (bool dots : {true, false}) {
                all.push_back(bench_mul_mat(type, 512, z.small ? 64 : 1024, n, dots));
            }
        }
    }
    return all;
}
