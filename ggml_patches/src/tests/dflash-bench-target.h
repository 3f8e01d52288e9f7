#pragma once

// Benchmarks of the target's ops beside stock ggml's way: gated delta net, convolution, attention.

#include "dflash-bench.h"

// What a round moves at least, and the two ways.
struct Bench {
    std::string op, shape;
    int64_t lanes;
    double bytes; // each input read once, output and state written once
    Build ours, stock;
    std::string stock_way;
    bool dots = false; // CPU only: stock by ggml's plain dot products
};

struct BenchSizes {
    bool small;
    std::vector<int64_t> lanes;
    int64_t T, S, Hk, Hv, C; // target: block, gated delta net, convolution
    int64_t D, Hq, Hkv;      // target's attention
    int64_t draft_D, draft_Hq, draft_Hkv, window;
    std::vector<int64_t> contexts;
    int64_t V, top_k, R, E, G, taps; // vocabulary, selector, draft's convolution

    static BenchSizes full() {
        return {false, {1, 2, 4, 5, 8},     8,      128, 16,  48,   10240, 256, 24, 4, 128, 32, 8,
                2048,  {1024, 8192, 32768}, 248320, 16,  256, 5120, 320,   2};
    }

    static BenchSizes tiny() {
        return {true, {1, 2}, 8, 32, 2, 4, 256, 64, 8, 2, 64, 4, 2, 32, {64, 256}, 1000, 16, 64, 128, 8, 2};
    }
};

inline Ints counting(int64_t n, int32_t first = 0) {
    Ints x(n);
    for (int64_t i = 0; i < n; i++) {
        x[i] = first + (int32_t) i;
    }
    return x;
}

inline Bench bench_gdn(const BenchSizes & z, int64_t L, int32_t n_pending) {
    const int64_t S = z.S, Hk = z.Hk, Hv = z.Hv, T = z.T;
    Bench b;
    b.op = "gdn_verify";
    b.shape = "S=" + std::to_string(S) + " " + std::to_string(Hk) + ":" + std::to_string(Hv) +
              " T=" + std::to_string(T) + " pending=" + std::to_string(n_pending);
    b.lanes = L;
    const double state = (double) S * S * Hv, log_row = (double) (2 * S + 1) * Hv;
    b.bytes =
        4.0 * L *
        (state * (n_pending > 0 ? 2 : 1) + log_row * (n_pending + T) + T * (2.0 * S * Hk + 2.0 * S * Hv + 2.0 * Hv));
    b.ours = [=](Sources & s) {
        return ggml_dflash_gdn_verify(s.ctx(), s.noise({S, Hk, T, L}), s.noise({S, Hk, T, L}), s.noise({S, Hv, T, L}),
                                      s.noise({Hv, T, L}), s.noise({Hv, T, L}), s.noise({S, S, Hv, L}),
                                      s.noise({2 * S + 1, Hv, T, L}), s.ints(counting(L)), s.ints(Ints(L, n_pending)));
    };
    b.stock_way = "get_rows of the states, gated_delta_net with 8 planes";
    b.stock = [=](Sources & s) {
        ggml_tensor * states = ggml_get_rows(s.ctx(), s.noise({S * S * Hv, L}), s.ints(counting(L)));
        return ggml_gated_delta_net(s.ctx(), s.noise({S, Hk, T, L}), s.noise({S, Hk, T, L}), s.noise({S, Hv, T, L}),
                                    s.noise({1, Hv, T, L}), s.noise({1, Hv, T, L}),
                                    ggml_reshape_4d(s.ctx(), states, S, S, Hv, L), 8);
    };
    return b;
}

inline Bench bench_conv(const BenchSizes & z, int64_t L, int32_t n_pending) {
    const int64_t C = z.C, T = z.T;
    Bench b;
    b.op = "conv_verify";
    b.shape = "C=" + std::to_string(C) + " T=" + std::to_string(T) + " pending=" + std::to_string(n_pending);
    b.lanes = L;
    b.bytes = 4.0 * C * (L * (2.0 * T + 3 + 3 + T) + 4);
    b.ours = [=](Sources & s) {
        return ggml_dflash_conv_verify(s.ctx(), s.noise({C, T, L}), s.noise({4, C}), s.noise({C, 3 + T, L}),
                                       s.ints(counting(L)), s.ints(Ints(L, n_pending)));
    };
    b.stock_way = "get_rows of the windows, concat, ssm_conv, silu";
    b.stock = [=](Sources & s) {
        ggml_tensor * windows = ggml_get_rows(s.ctx(), s.noise({3 * C, L}), s.ints(counting(L)));
        ggml_tensor * in = ggml_concat(s.ctx(), ggml_reshape_3d(s.ctx(), windows, 3, C, L),
                                       ggml_transpose(s.ctx(), s.noise({C, T, L})), 0);
        return ggml_silu(s.ctx(), ggml_ssm_conv(s.ctx(), in, s.noise({4, C})));
    };
    return b;
}

struct Heads {
    int64_t D, Hq, Hkv, window;
};

inline Bench bench_attention(const char * name, const Heads & h, int64_t T, int64_t L, int64_t context,
                             ggml_type type) {
    const int64_t D = h.D, Hq = h.Hq, Hkv = h.Hkv;
    const int64_t seen = h.window > 0 ? std::min(context, h.window) : context;
    const int64_t pages = seen / 16 + (seen < context); // a ring where there is a window
    Ints table;
    for (int64_t i = 0; i < context / 16 * L; i++) {
        table.push_back((int32_t) (i / (context / 16) * pages + i % (context / 16) % pages));
    }
    Bench b;
    b.op = name;
    b.shape = "D=" + std::to_string(D) + " " + std::to_string(Hq) + ":" + std::to_string(Hkv) + " " +
              ggml_type_name(type) + " context " + std::to_string(context);
    b.lanes = L;
    b.bytes = L * (8.0 * D * Hq * T + 2.0 * ggml_row_size(type, D) * Hkv * seen);
    b.ours = [=](Sources & s) {
        return ggml_dflash_attention(s.ctx(), s.noise({D, Hq, T, L}), s.noise({D, Hkv, 16 * pages * L}, type),
                                     s.noise({D, Hkv, 16 * pages * L}, type), s.ints(table, {context / 16, L}),
                                     s.ints(counting(L)), s.ints(Ints(L, (int32_t) (context - T))),
                                     s.ints(Ints(L, (int32_t) T)), 1.0f / std::sqrt((float) D), (int32_t) h.window,
                                     h.window == 0);
    };
    b.stock_way = "flash_attn_ext";
    b.stock = [=](Sources & s) {
        return ggml_flash_attn_ext(s.ctx(), s.noise({D, T, Hq, L}), s.noise({D, seen, Hkv, L}, type),
                                   s.noise({D, seen, Hkv, L}, type), s.noise({seen, T, 1, 1}, GGML_TYPE_F16),
                                   1.0f / std::sqrt((float) D), 0.0f, 0.0f);
    };
    return b;
}

inline std::vector<Bench> target_benches(const BenchSizes & z) {
    std::vector<Bench> all;
    for (int32_t n_pending : {5, 8}) {
        for (int64_t L : z.lanes) {
            all.push_back(bench_gdn(z, L, n_pending));
        }
    }
    for (int64_t L : z.lanes) {
        all.push_back(bench_conv(z, L, 5));
    }
    for (ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_F16}) {
        for (int64_t context : z.contexts) {
            for (int64_t L : z.lanes) {
                all.push_back(bench_attention("attention", {z.D, z.Hq, z.Hkv, 0}, z.T, L, context, type));
            }
        }
    }
    return all;
}
