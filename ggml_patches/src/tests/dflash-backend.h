#pragma once

// Backends under test: modules are loaded by path, every device of a module becomes one Backend. The CPU is always
// there, because results of the other devices are compared with its own.

#include "ggml-backend.h"
#include "ggml-dflash.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

constexpr int EXIT_CANNOT_RUN = 2, EXIT_NO_DEVICE = 3;

[[noreturn]] inline void die(const char * what) {
    std::fprintf(stderr, "cannot run the tests: %s\n", what);
    std::exit(EXIT_CANNOT_RUN);
}

struct Backend {
    std::string name;
    ggml_dflash_backend kind = GGML_DFLASH_BACKEND_CPU;
    ggml_backend_dev_t device = nullptr;
    ggml_backend_t handle = nullptr;
    ggml_backend_set_n_threads_t set_n_threads = nullptr; // CPU only
    ggml_backend_buffer_t memory = nullptr;

    bool is_cpu() const { return kind == GGML_DFLASH_BACKEND_CPU; }

    // One buffer for all runs, made anew only to grow: thousands of small allocations would take longer than the tests.
    ggml_backend_buffer_t room(size_t bytes) {
        if (!memory || ggml_backend_buffer_get_size(memory) < bytes) {
            ggml_backend_buffer_free(memory);
            memory = ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), bytes + bytes / 2);
        }
        if (!memory) {
            die("no memory on the device");
        }
        return memory;
    }
};

inline ggml_dflash_backend kind_of(ggml_backend_reg_t reg) {
    const struct {
        const char * name;
        ggml_dflash_backend kind;
    } kinds[] = {
        {"CPU", GGML_DFLASH_BACKEND_CPU},
        {"CUDA", GGML_DFLASH_BACKEND_CUDA},
        {"ROCm", GGML_DFLASH_BACKEND_HIP},
        {"SYCL", GGML_DFLASH_BACKEND_SYCL},
    };
    for (const auto & entry : kinds) {
        if (std::strcmp(ggml_backend_reg_name(reg), entry.name) == 0) {
            return entry.kind;
        }
    }
    die("the module is of a backend that has no kernels of GGML_OP_DFLASH");
}

inline Backend open_device(ggml_backend_dev_t device) {
    Backend b;
    b.name = ggml_backend_dev_name(device);
    b.kind = kind_of(ggml_backend_dev_backend_reg(device));
    b.device = device;
    b.handle = ggml_backend_dev_init(device, nullptr);
    if (!b.handle) {
        die("a device does not start");
    }
    if (b.is_cpu()) {
        b.set_n_threads = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads");
        if (!b.set_n_threads) {
            die("the CPU backend does not take a number of threads");
        }
    }
    return b;
}

// All backends, the CPU first; fixed once open_backends has run.
inline std::vector<Backend> & backends() {
    static std::vector<Backend> all;
    return all;
}

inline size_t & current_backend() {
    static size_t index = 0;
    return index;
}

// the one that the cases run on now
inline Backend & backend() {
    return backends()[current_backend()];
}

inline Backend & cpu_backend() {
    return backends()[0];
}

// Modules in any order; cpu_module is for the case that none of them is the CPU's ("": linked in). A module without a
// device ends the program: it was named in order to be tested.
inline void open_backends(const std::vector<std::string> & modules, const char * cpu_module) {
    bool has_cpu = false;
    std::vector<Backend> found;
    const auto add = [&](ggml_backend_reg_t reg, const char * path) {
        if (!reg) {
            std::fprintf(stderr, "cannot run the tests: the backend module %s does not load\n", path);
            std::exit(EXIT_CANNOT_RUN);
        }
        has_cpu = has_cpu || kind_of(reg) == GGML_DFLASH_BACKEND_CPU;
        if (ggml_backend_reg_dev_count(reg) == 0) {
            std::fprintf(stderr, "no device: the backend module %s loads, but finds no device on this machine\n", path);
            std::exit(EXIT_NO_DEVICE);
        }
        for (size_t i = 0; i < ggml_backend_reg_dev_count(reg); i++) {
            const Backend b = open_device(ggml_backend_reg_dev_get(reg, i));
            found.insert(b.is_cpu() ? found.begin() : found.end(), b);
        }
    };
    for (const std::string & path : modules) {
        add(ggml_backend_load(path.c_str()), path.c_str());
    }
    if (!has_cpu && *cpu_module) {
        add(ggml_backend_load(cpu_module), cpu_module);
    } else if (!has_cpu) {
        add(ggml_backend_reg_by_name("CPU"), "(linked in)");
    }
    backends() = found;
}

inline void close_backends() {
    for (Backend & b : backends()) {
        ggml_backend_buffer_free(b.memory);
        ggml_backend_free(b.handle);
    }
    backends().clear();
}

// Numbers of threads that a case compares; elsewhere than on the CPU there is nothing to choose.
inline std::vector<int> thread_counts(const std::vector<int> & on_cpu) {
    return backend().is_cpu() ? on_cpu : std::vector<int>{1};
}
