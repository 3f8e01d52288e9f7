#pragma once

// Times of the ops at the shapes of a 27B target and of a small one. Not a test.

#include "dflash-harness.h"

#include <ctime>
#include <functional>

// Fastest of some runs, per node: n_nodes independent nodes in one graph, so that the state comes from memory as in a
// model. CPU time beside it, because a busy machine shows in one and not in the other.
inline void bench(const char * name, size_t bytes_per_node, int n_nodes,
                  const std::function<ggml_tensor *(Run &)> & make) {
    for (int n_threads : {1, 2}) {
        Run run(n_nodes * bytes_per_node);
        ggml_cgraph * graph = ggml_new_graph(run.ctx());
        for (int i = 0; i < n_nodes; i++) {
            ggml_build_forward_expand(graph, run.result(make(run)));
        }
        backend().set_n_threads(backend().handle, n_threads);
        double best = INFINITY, best_cpu = INFINITY;
        for (int i = 0; i < 12; i++) {
            const int64_t start = ggml_time_us();
            const std::clock_t start_cpu = std::clock();
            ggml_backend_graph_compute(backend().handle, graph);
            best_cpu = std::min(best_cpu, 1e6 * (double) (std::clock() - start_cpu) / CLOCKS_PER_SEC / n_nodes);
            best = std::min(best, (double) (ggml_time_us() - start) / n_nodes);
        }
        std::printf("%-58s %d threads %9.1f us  (cpu %9.1f us)\n", name, n_threads, best, best_cpu);
    }
}

inline void bench_gdn(int64_t Hk, int64_t Hv, int64_t T, int32_t n_pending, int n_nodes) {
    const GdnShape s = {128, Hk, Hv, T, 1, 1, 8};
    const GdnRows r = GdnRows::random(s);
    char name[96];
    std::snprintf(name, sizeof(name), "gdn_verify S=128 Hk=%d Hv=%d T=%d L=1 pending=%d", (int) Hk, (int) Hv, (int) T,
                  (int) n_pending);
    bench(name, s.bytes() + (1 << 16), n_nodes, [&](Run & run) {
        ggml_tensor * qkv[3];
        make_qkv(run, s, r, Layout::PACKED, qkv);
        ggml_tensor * state = run.source({s.S, s.S, s.Hv, s.N}, normal(s.state_size()));
        ggml_tensor * log = run.source({2 * s.S + 1, s.Hv, s.B, s.N}, normal(s.log_size(), 0.1f));
        return ggml_dflash_gdn_verify(run.ctx(), qkv[0], qkv[1], qkv[2], run.source({s.Hv, s.T, s.L}, r.g),
                                      run.source({s.Hv, s.T, s.L}, r.beta), state, log, run.source(Ints{0}),
                                      run.source(Ints{n_pending}));
    });
}

inline void bench_conv(int64_t C, int64_t T, int n_nodes) {
    const ConvCase c({C, T, 1, 1, 8}, {0});
    char name[96];
    std::snprintf(name, sizeof(name), "conv_verify C=%d T=%d L=1 pending=4", (int) C, (int) T);
    bench(name, c.s.bytes() + (1 << 16), n_nodes, [&](Run & run) {
        return ggml_dflash_conv_verify(run.ctx(), run.source({C, T, 1}, c.x), run.source({TAPS, C}, c.w),
                                       run.source({C, TAPS - 1 + c.s.B, 1}, normal(c.s.kept())), run.source(Ints{0}),
                                       run.source(Ints{4}));
    });
}

inline void bench_attention(int64_t D, int64_t Hq, int64_t Hkv, int64_t T, int32_t base, ggml_type type, int n_nodes) {
    const int64_t pages = (base + T + 15) / 16;
    char name[96];
    std::snprintf(name, sizeof(name), "attention D=%d Hq=%d Hkv=%d T=%d context=%d %s", (int) D, (int) Hq, (int) Hkv,
                  (int) T, (int) base, ggml_type_name(type));
    const std::vector<uint8_t> data = encode(normal(D * Hkv * 16 * pages), D, type);
    const Floats q = normal(D * Hq * T);
    Ints table(pages);
    for (int32_t i = 0; i < pages; i++) {
        table[i] = i;
    }
    bench(name, 2 * data.size() + 16 * q.size() + (1 << 17), n_nodes, [&](Run & run) {
        ggml_tensor * k = run.source({D, Hkv, 16 * pages}, data.data(), type);
        ggml_tensor * v = run.source({D, Hkv, 16 * pages}, data.data(), type);
        return ggml_dflash_attention(run.ctx(), run.source({D, Hq, T, 1}, q), k, v,
                                     run.source({pages, 1}, table.data(), GGML_TYPE_I32), run.source(Ints{0}),
                                     run.source(Ints{base}), run.source(Ints{(int32_t) T}), 0.1f, 0, true);
    });
}

// Beside ggml's own ways: one dot product per column ("use_ref") and its choice by the number of columns.
inline void bench_mul_mat(ggml_type type, int64_t K, int64_t M, int64_t n) {
    typedef void (*set_use_ref_t)(ggml_backend_t, bool);
    const set_use_ref_t set_use_ref = (set_use_ref_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(backend().device), "ggml_backend_cpu_set_use_ref");
    const std::vector<uint8_t> w = quantised(type, K, M);
    const Floats x = normal(K * n);
    const int n_nodes = (int) std::max<int64_t>(1, (1 << 23) / (K * M * n));
    for (int n_threads : {1, 2}) {
        double best[3] = {INFINITY, INFINITY, INFINITY};
        Run run(n_nodes * (2 * w.size() + 2 * (K + M) * n * sizeof(float) + 4096));
        ggml_cgraph * graphs[2];
        for (int own = 0; own < 2; own++) {
            graphs[own] = ggml_new_graph(run.ctx());
            for (int i = 0; i < n_nodes; i++) {
                ggml_tensor *a = run.source({K, M}, w.data(), type), *b = run.source({K, n}, x);
                ggml_build_forward_expand(graphs[own], run.result(own ? ggml_dflash_mul_mat(run.ctx(), a, b)
                                                                      : ggml_mul_mat(run.ctx(), a, b)));
            }
        }
        backend().set_n_threads(backend().handle, n_threads);
        for (int i = 0; i < 15; i++) {
            for (int way = 0; way < 3; way++) { // in turns, because the machine is not always equally fast
                set_use_ref(backend().handle, way == 0);
                const int64_t start = ggml_time_us();
                ggml_backend_graph_compute(backend().handle, graphs[way == 2]);
                best[way] = std::min(best[way], (double) (ggml_time_us() - start) / n_nodes);
            }
        }
        set_use_ref(backend().handle, false);
        std::printf(
            "mul_mat %-7s %5d x %-5d n=%-4d %d threads: dots %9.1f us, ggml %9.1f us, own %9.1f us = %.2f, %.2f\n",
            ggml_type_name(type), (int) K, (int) M, (int) n, n_threads, best[0], best[1], best[2], best[0] / best[2],
            best[1] / best[2]);
    }
}

inline void bench_mul_mats() {
    for (ggml_type type : {GGML_TYPE_IQ4_XS, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K}) {
        for (int64_t n : {1, 2, 4, 7, 8, 16, 64, 256}) {
            bench_mul_mat(type, 512, 1024, n);
        }
        bench_mul_mat(type, 512, 8192, 8);
        bench_mul_mat(type, 1536, 512, 1);
        bench_mul_mat(type, 1536, 512, 8);
    }
}

inline void bench_all() {
    for (int32_t n_pending : {0, 4, 8}) {
        bench_gdn(16, 48, 8, n_pending, 16);
    }
    bench_gdn(16, 48, 1, 1, 16);
    bench_gdn(2, 4, 8, 4, 64);
    bench_gdn(2, 4, 1, 1, 64);
    bench_conv(10240, 8, 16);
    bench_conv(1024, 8, 64);
    bench_attention(256, 24, 4, 8, 1024, GGML_TYPE_Q8_0, 4);
    bench_attention(128, 8, 2, 8, 1024, GGML_TYPE_F16, 8);
    bench_attention(128, 8, 2, 1, 1024, GGML_TYPE_F16, 8);
    bench_attention(128, 8, 2, 256, 1024, GGML_TYPE_F16, 1);
    bench_mul_mats();
}
