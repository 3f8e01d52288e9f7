// C side of the extension: the real headers, and the few functions that Python cannot express through them.
#pragma once

#include <string.h>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-dflash.h"
#include "ggml.h"
#include "gguf.h"
#include "llama.h"

static void * dflash_backend_proc(ggml_backend_t backend, const char * name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(ggml_backend_get_device(backend)), name);
}

// Threads of a backend that computes on the CPU; false when the backend has no such setting.
static bool dflash_backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_set_n_threads_t set =
        (ggml_backend_set_n_threads_t) dflash_backend_proc(backend, "ggml_backend_set_n_threads");
    if (set == NULL) {
        return false;
    }
    set(backend, n_threads);
    return true;
}

// The CPU backend's plain kernels, whose result for a row does not depend on the rows beside it; false elsewhere.
static bool dflash_backend_cpu_set_use_ref(ggml_backend_t backend, bool use_ref) {
    typedef void (*set_use_ref_t)(ggml_backend_t backend, bool use_ref);
    set_use_ref_t set = (set_use_ref_t) dflash_backend_proc(backend, "ggml_backend_cpu_set_use_ref");
    if (set == NULL) {
        return false;
    }
    set(backend, use_ref);
    return true;
}

// n values of `type` at src as floats; n must be whole blocks. False when ggml has no conversion for the type.
static bool dflash_to_float(enum ggml_type type, const void * src, float * dst, int64_t n) {
    if (type == GGML_TYPE_F32) {
        memcpy(dst, src, (size_t) n * sizeof(float));
        return true;
    }
    const struct ggml_type_traits * traits = ggml_get_type_traits(type);
    if (traits->to_float == NULL || n % traits->blck_size != 0) {
        return false;
    }
    traits->to_float(src, dst, n);
    return true;
}
