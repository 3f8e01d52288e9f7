#pragma once

// What the native op tests share: a backend, tensors between guard bytes, one-graph runs, comparisons, the case
// counter. Everything goes through ggml-backend calls, so that the same cases can run on a device.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-dflash.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

typedef std::vector<float> Floats;
typedef std::vector<int32_t> Ints;

//
// counting
//

struct Counter {
    int checks = 0, failures = 0;
    std::string label; // the case that runs, for messages

    void expect(bool ok, const char * format, ...) {
        checks++;
        if (ok) {
            return;
        }
        failures++;
        if (failures <= 40) {
            va_list args;
            va_start(args, format);
            std::printf("FAIL %s: ", label.c_str());
            std::vprintf(format, args);
            std::printf("\n");
            va_end(args);
        }
    }
};

inline Counter & counter() {
    static Counter instance;
    return instance;
}

[[noreturn]] inline void die(const char * what) {
    std::fprintf(stderr, "cannot run the tests: %s\n", what);
    std::exit(2);
}

//
// backend
//

struct Backend {
    ggml_backend_t handle = nullptr;
    ggml_backend_dev_t device = nullptr;
    ggml_backend_set_n_threads_t set_n_threads = nullptr;

    void open(const char * module) {
        if (module && *module && !ggml_backend_load(module)) {
            die("the backend module does not load");
        }
        device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        if (!device) {
            die("no CPU device");
        }
        handle = ggml_backend_dev_init(device, nullptr);
        set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads");
        if (!handle || !set_n_threads) {
            die("the CPU backend does not start");
        }
    }

    void close() { ggml_backend_free(handle); }
};

inline Backend & backend() {
    static Backend instance;
    return instance;
}

//
// tensors between guards
//

// One run: sources and results in one buffer, 64 guard bytes around each, results poisoned with NaN.
class Run {
  public:
    explicit Run(size_t bytes) {
        ggml_init_params params = {4096 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true};
        ctx_ = ggml_init(params);
        buffer_ = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(backend().device), bytes + (1 << 20));
        if (!ctx_ || !buffer_) {
            die("no memory");
        }
        align_ = ggml_backend_buffer_get_alignment(buffer_);
    }

    ~Run() {
        ggml_backend_buffer_free(buffer_);
        ggml_free(ctx_);
    }

    Run(const Run &) = delete;

    ggml_context * ctx() { return ctx_; }

    ggml_tensor * empty(ggml_type type, const std::vector<int64_t> & ne) {
        ggml_tensor * t = ggml_new_tensor(ctx_, type, (int) ne.size(), ne.data());
        place(t);
        return t;
    }

    ggml_tensor * source(const std::vector<int64_t> & ne, const void * data, ggml_type type = GGML_TYPE_F32) {
        ggml_tensor * t = empty(type, ne);
        ggml_backend_tensor_set(t, data, 0, ggml_nbytes(t));
        return t;
    }

    ggml_tensor * source(const std::vector<int64_t> & ne, const Floats & data) {
        ggml_tensor * t = empty(GGML_TYPE_F32, ne);
        if (ggml_nelements(t) != (int64_t) data.size()) {
            die("a test gives a tensor the wrong number of values");
        }
        ggml_backend_tensor_set(t, data.data(), 0, ggml_nbytes(t));
        return t;
    }

    ggml_tensor * source(const Ints & data) { return source({(int64_t) data.size()}, data.data(), GGML_TYPE_I32); }

    // A result of a constructor: gets memory, or shows why there is none.
    ggml_tensor * result(ggml_tensor * t) {
        if (!t) {
            counter().expect(false, "refused: %s", ggml_dflash_last_error());
            die("a case of the table was refused");
        }
        if (t->view_src) {
            ggml_backend_view_init(t);
        } else {
            place(t);
        }
        return t;
    }

    void compute(std::vector<ggml_tensor *> nodes, int n_threads) {
        ggml_cgraph * graph = ggml_new_graph(ctx_);
        for (ggml_tensor * node : nodes) {
            ggml_build_forward_expand(graph, node);
        }
        for (ggml_tensor * node : nodes) {
            counter().expect(ggml_backend_dev_supports_op(backend().device, node), "supports_op refuses: %s",
                             ggml_dflash_check(node) ? ggml_dflash_check(node) : "?");
        }
        backend().set_n_threads(backend().handle, n_threads);
        if (ggml_backend_graph_compute(backend().handle, graph) != GGML_STATUS_SUCCESS) {
            die("graph compute failed");
        }
        check_guards();
    }

    static Floats floats(const ggml_tensor * t) {
        Floats data(ggml_nelements(t));
        ggml_backend_tensor_get(t, data.data(), 0, data.size() * sizeof(float));
        return data;
    }

  private:
    static constexpr size_t GUARD = 64;

    void guard() {
        ggml_tensor * t = ggml_new_tensor_1d(ctx_, GGML_TYPE_I8, GUARD);
        put(t);
        const std::vector<uint8_t> pattern(GUARD, 0xA5);
        ggml_backend_tensor_set(t, pattern.data(), 0, GUARD);
        guards_.push_back(t);
    }

    void put(ggml_tensor * t) {
        char * base = (char *) ggml_backend_buffer_get_base(buffer_);
        if (ggml_backend_tensor_alloc(buffer_, t, base + used_) != GGML_STATUS_SUCCESS) {
            die("a tensor does not fit");
        }
        used_ += ggml_backend_buffer_get_alloc_size(buffer_, t);
        if (used_ > ggml_backend_buffer_get_size(buffer_)) {
            die("the buffer of a run is too small");
        }
    }

    // the tensor starts aligned; its end guard follows at once, unaligned
    void place(ggml_tensor * t) {
        used_ = (used_ + GUARD + align_ - 1) / align_ * align_ - GUARD;
        guard();
        put(t);
        const std::vector<uint8_t> poison(ggml_nbytes(t), 0xFF); // NaN as F32 and F16
        ggml_backend_tensor_set(t, poison.data(), 0, poison.size());
        guard();
    }

    void check_guards() {
        bool intact = true;
        for (ggml_tensor * t : guards_) {
            uint8_t bytes[GUARD];
            ggml_backend_tensor_get(t, bytes, 0, GUARD);
            intact = intact && std::all_of(bytes, bytes + GUARD, [](uint8_t b) { return b == 0xA5; });
        }
        counter().expect(intact, "guard bytes were written");
    }

    ggml_context * ctx_;
    ggml_backend_buffer_t buffer_;
    size_t align_ = 1, used_ = 0;
    std::vector<ggml_tensor *> guards_;
};

//
// values and comparisons
//

inline std::mt19937 & random_engine() {
    static std::mt19937 engine(20240607);
    return engine;
}

inline Floats normal(size_t n, float deviation = 1.0f, float mean = 0.0f) {
    std::normal_distribution<float> distribution(mean, deviation);
    Floats data(n);
    for (float & x : data) {
        x = distribution(random_engine());
    }
    return data;
}

inline Floats nans(size_t n) {
    return Floats(n, std::nanf(""));
}

inline bool same_bits(const float * a, const float * b, size_t n) {
    return std::memcmp(a, b, n * sizeof(float)) == 0;
}

inline bool same_bits(const Floats & a, const Floats & b) {
    return a.size() == b.size() && same_bits(a.data(), b.data(), a.size());
}

inline bool all_zero(const float * a, size_t n) {
    return std::all_of(a, a + n, [](float x) { return x == 0.0f; });
}

// largest |a - b|; NaN on either side counts as infinite
inline double distance(const Floats & a, const std::vector<double> & b) {
    double worst = a.size() == b.size() ? 0.0 : INFINITY;
    for (size_t i = 0; i < a.size() && i < b.size(); i++) {
        const double d = std::fabs(a[i] - b[i]);
        worst = d <= worst ? worst : std::isnan(d) ? INFINITY : d;
    }
    return worst;
}
