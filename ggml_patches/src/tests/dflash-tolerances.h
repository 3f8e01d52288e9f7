#pragma once

// How far a result may be from the exact one, and from the CPU's for the same inputs: the only place that says so. Bits
// that must be the same (replay and forward pass, any T, L, order of lanes, neighbours) have no tolerance anywhere.

#include "ggml-dflash.h"
#include "ggml.h"

#include <algorithm>

enum class Rule {
    GDN,
    CONV,
    ATTENTION_F32,
    ATTENTION_HALF,
    ATTENTION_HALF_BESIDE_F32,
    MUL_MAT,
    MUL_MAT_HALF,
    DYNAMIC_CONV,
    EXACT,
    UPSTREAM_GDN,
    UPSTREAM_GDN_NATIVE
};

struct Tolerance {
    Rule rule;
    double absolute; // on inputs of size 1
    const char * reason;
};

constexpr Tolerance TOLERANCES[] = {
    {Rule::GDN, 2e-5,
     "F32 everywhere: a dot of S <= 128 terms of size 1 and up to 16 steps of a contraction (|k| about 1) lose some "
     "S * 2^-24 a step at worst"},
    {Rule::CONV, 1e-5, "F32 everywhere: four products of size 1..10 and silu (slope <= 1.1, exp good to 2 ulp)"},
    {Rule::ATTENTION_F32, 2e-5,
     "F32 sums: scores reach 14, so the dot (D/8 steps) and score - max round to 4e-6, weights to 4e-6 relative, of "
     "values below 5"},
    {Rule::ATTENTION_HALF, 1.5e-3,
     "tensor cores, against a reference with q, k and v rounded to f16 as there: weights rounded to f16, 2^-12 "
     "relative, "
     "of values below 5"},
    {Rule::ATTENTION_HALF_BESIDE_F32, 6e-3,
     "tensor cores, against F32: q, k and v rounded to f16 move scores of standard deviation 2.7 by up to 2e-3 and "
     "results by up to 4e-3 (computed for the shapes of the cases)"},
    {Rule::MUL_MAT, 0.2,
     "beside the CPU: there an activation is rounded to 2^-12 of the largest of 256, which moves a sum of 512 products "
     "by up to 0.1; what devices round is less"},
    {Rule::MUL_MAT_HALF, 1e-3,
     "devices, of the sum of the products' magnitudes: activation and weight are rounded to f16, 2^-11 relative each; "
     "sums are F32"},
    {Rule::DYNAMIC_CONV, 1e-6, "F32, at most 8 fused multiply-adds in a fixed order"},
    {Rule::EXACT, 0.0, "numbers of tokens and rows, and logits after single rounded operations"},
    {Rule::UPSTREAM_GDN, 1e-4, "as GDN, with upstream's fast expf and its own order of sums"},
    {Rule::UPSTREAM_GDN_NATIVE, 2e-3, "SYCL: upstream takes native::exp, whose precision is the device's own affair"},
};

inline double tolerance(Rule rule) {
    for (const Tolerance & t : TOLERANCES) {
        if (t.rule == rule) {
            return t.absolute;
        }
    }
    return 0.0;
}

// Whether the attention of a backend takes F16 factors: NVIDIA's tensor cores, where the kernel is made for them.
inline bool has_half_factors(ggml_dflash_backend backend, int64_t D, ggml_type k_type, ggml_type v_type) {
    const auto is_half = [](ggml_type type) { return type == GGML_TYPE_F16 || type == GGML_TYPE_Q8_0; };
    return backend == GGML_DFLASH_BACKEND_CUDA && (D == 128 || D == 256) && is_half(k_type) && is_half(v_type);
}

// for results beside the CPU's
inline Rule rule_of(ggml_dflash_backend backend, const ggml_tensor * node) {
    if (node->op == GGML_OP_GATED_DELTA_NET) {
        return backend == GGML_DFLASH_BACKEND_SYCL ? Rule::UPSTREAM_GDN_NATIVE : Rule::UPSTREAM_GDN;
    }
    switch (ggml_dflash_get_op(node)) {
    case GGML_DFLASH_OP_GDN_VERIFY:
    case GGML_DFLASH_OP_GDN_ADVANCE:
    case GGML_DFLASH_OP_GDN_COMMIT:
        return Rule::GDN;
    case GGML_DFLASH_OP_CONV_VERIFY:
    case GGML_DFLASH_OP_CONV_ADVANCE:
    case GGML_DFLASH_OP_CONV_COMMIT:
        return Rule::CONV;
    case GGML_DFLASH_OP_ATTENTION:
        return has_half_factors(backend, node->src[0]->ne[0], node->src[1]->type, node->src[2]->type)
                   ? Rule::ATTENTION_HALF_BESIDE_F32
                   : Rule::ATTENTION_F32;
    case GGML_DFLASH_OP_MUL_MAT:
        return Rule::MUL_MAT;
    case GGML_DFLASH_OP_DYNAMIC_CONV:
        return Rule::DYNAMIC_CONV;
    default:
        return Rule::EXACT;
    }
}
