#pragma once

// Nodes for the predicate: a valid one of every sub-op by its sizes, and the two ways to expect a refusal.

#include "dflash-harness.h"

#include <functional>

// Sizes of a valid node; a row may change them before the tensors are made.
struct Sizes {
    int64_t S = 32, Hk = 2, Hv = 4, T = 8, L = 2, N = 3, B = 8, C = 48;
    int64_t D = 64, Hq = 8, Hkv = 2, pages = 4, max_pages = 5;
    int64_t K = 512, M = 24;
    ggml_type w_type = GGML_TYPE_IQ4_XS;
    float scale = 0.125f;
    int32_t window = 0;
    ggml_type k_type = GGML_TYPE_F16, v_type = GGML_TYPE_Q8_0;
    int64_t G = 6, taps = 3;                       // dynamic_conv, of C channels
    int64_t V = 80, P = 3, R = 64;                 // select; sample, penalise: V
    int32_t top_k = 4;                             // select
    int edge_sources = 7;                          // select: bit i, source 4+i is there
    int64_t positions = 40;                        // accept, place, penalise: of history
    int64_t ring_pages = 2;                        // place
    bool has_ring = true;                          // place
    int32_t fill = 7, spare = 64, ring_spare = 48; // place
    int64_t biases = 6;                            // penalise
    ggml_type before_type = GGML_TYPE_F16, after_type = GGML_TYPE_Q8_0;
};

// Sources of a node by position, metadata only.
typedef std::vector<ggml_tensor *> Sources;

inline ggml_tensor * f32(ggml_context * ctx, std::vector<int64_t> ne) {
    return ggml_new_tensor(ctx, GGML_TYPE_F32, (int) ne.size(), ne.data());
}

inline ggml_tensor * i32(ggml_context * ctx, std::vector<int64_t> ne) {
    return ggml_new_tensor(ctx, GGML_TYPE_I32, (int) ne.size(), ne.data());
}

inline Sources make_sources(ggml_context * ctx, ggml_dflash_op op, const Sizes & z) {
    ggml_tensor *slots = i32(ctx, {z.L}), *pending = i32(ctx, {z.N}), *n_rows = i32(ctx, {z.L});
    ggml_tensor *state = f32(ctx, {z.S, z.S, z.Hv, z.N}), *log = f32(ctx, {2 * z.S + 1, z.Hv, z.B, z.N});
    ggml_tensor *rows = f32(ctx, {z.C, 3 + z.B, z.N}), *base = i32(ctx, {z.N});
    ggml_tensor * history = i32(ctx, {z.positions, z.N});
    Sources src;
    switch (op) {
    case GGML_DFLASH_OP_GDN_VERIFY:
    case GGML_DFLASH_OP_GDN_ADVANCE:
        src = {f32(ctx, {z.S, z.Hk, z.T, z.L}),
               f32(ctx, {z.S, z.Hk, z.T, z.L}),
               f32(ctx, {z.S, z.Hv, z.T, z.L}),
               f32(ctx, {z.Hv, z.T, z.L}),
               f32(ctx, {z.Hv, z.T, z.L}),
               state,
               log,
               slots,
               pending};
        break;
    case GGML_DFLASH_OP_GDN_COMMIT:
        src = {state, log, slots, pending};
        break;
    case GGML_DFLASH_OP_CONV_VERIFY:
    case GGML_DFLASH_OP_CONV_ADVANCE:
        src = {f32(ctx, {z.C, z.T, z.L}), f32(ctx, {4, z.C}), rows, slots, pending};
        break;
    case GGML_DFLASH_OP_CONV_COMMIT:
        src = {rows, slots, pending};
        break;
    case GGML_DFLASH_OP_ATTENTION:
        src = {f32(ctx, {z.D, z.Hq, z.T, z.L}),
               ggml_new_tensor_3d(ctx, z.k_type, z.D, z.Hkv, 16 * z.pages),
               ggml_new_tensor_3d(ctx, z.v_type, z.D, z.Hkv, 16 * z.pages),
               i32(ctx, {z.max_pages, z.N}),
               slots,
               i32(ctx, {z.L}),
               n_rows};
        break;
    case GGML_DFLASH_OP_MUL_MAT:
        src = {ggml_new_tensor_2d(ctx, z.w_type, z.K, z.M), f32(ctx, {z.K, z.T, z.L})};
        break;
    case GGML_DFLASH_OP_DYNAMIC_CONV:
        src = {f32(ctx, {z.C, z.T, z.L}), f32(ctx, {z.G, z.taps, z.T, z.L}), f32(ctx, {z.C, z.taps})};
        break;
    case GGML_DFLASH_OP_SELECT:
        src = {f32(ctx, {z.V, z.P, z.L}),
               i32(ctx, {z.L}),
               i32(ctx, {z.L}),
               i32(ctx, {GGML_DFLASH_SAMPLING_WORDS, z.L}),
               f32(ctx, {z.R, z.P, z.L}),
               ggml_new_tensor_2d(ctx, z.before_type, z.R, z.V),
               ggml_new_tensor_2d(ctx, z.after_type, z.R, z.V)};
        for (int i = 0; i < 3; i++) {
            src[4 + i] = z.edge_sources >> i & 1 ? src[4 + i] : nullptr;
        }
        break;
    case GGML_DFLASH_OP_SAMPLE:
        src = {f32(ctx, {z.V, z.T, z.L}), i32(ctx, {z.L}), n_rows, i32(ctx, {GGML_DFLASH_SAMPLING_WORDS, z.L})};
        break;
    case GGML_DFLASH_OP_ACCEPT:
        src = {i32(ctx, {z.T, z.L}), i32(ctx, {z.T, z.L}), n_rows, slots, pending, base, history};
        break;
    case GGML_DFLASH_OP_PLACE:
        src = {slots, n_rows, base, history, i32(ctx, {z.max_pages, z.N}), nullptr};
        if (z.has_ring) {
            src[5] = i32(ctx, {z.ring_pages, z.N});
        }
        break;
    case GGML_DFLASH_OP_PENALISE:
        src = {f32(ctx, {z.V, z.T, z.L}), i32(ctx, {z.T, z.L}),        i32(ctx, {z.L}), n_rows, slots, history,
               f32(ctx, {2, z.N}),        i32(ctx, {2, z.biases, z.N})};
        break;
    }
    if (op == GGML_DFLASH_OP_GDN_ADVANCE || op == GGML_DFLASH_OP_CONV_ADVANCE) {
        src.push_back(n_rows);
    }
    return src;
}

inline ggml_tensor * construct(ggml_context * ctx, ggml_dflash_op op, const Sources & s, const Sizes & z) {
    switch (op) {
    case GGML_DFLASH_OP_GDN_VERIFY:
        return ggml_dflash_gdn_verify(ctx, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8]);
    case GGML_DFLASH_OP_GDN_ADVANCE:
        return ggml_dflash_gdn_advance(ctx, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9]);
    case GGML_DFLASH_OP_GDN_COMMIT:
        return ggml_dflash_gdn_commit(ctx, s[0], s[1], s[2], s[3]);
    case GGML_DFLASH_OP_CONV_VERIFY:
        return ggml_dflash_conv_verify(ctx, s[0], s[1], s[2], s[3], s[4]);
    case GGML_DFLASH_OP_CONV_ADVANCE:
        return ggml_dflash_conv_advance(ctx, s[0], s[1], s[2], s[3], s[4], s[5]);
    case GGML_DFLASH_OP_CONV_COMMIT:
        return ggml_dflash_conv_commit(ctx, s[0], s[1], s[2]);
    case GGML_DFLASH_OP_ATTENTION:
        return ggml_dflash_attention(ctx, s[0], s[1], s[2], s[3], s[4], s[5], s[6], z.scale, z.window, true);
    case GGML_DFLASH_OP_MUL_MAT:
        return ggml_dflash_mul_mat(ctx, s[0], s[1]);
    case GGML_DFLASH_OP_DYNAMIC_CONV:
        return ggml_dflash_dynamic_conv(ctx, s[0], s[1], s[2]);
    case GGML_DFLASH_OP_SELECT:
        return ggml_dflash_select(ctx, s[0], s[1], s[2], s[3], s[4], s[5], s[6], z.top_k);
    case GGML_DFLASH_OP_SAMPLE:
        return ggml_dflash_sample(ctx, s[0], s[1], s[2], s[3]);
    case GGML_DFLASH_OP_ACCEPT:
        return ggml_dflash_accept(ctx, s[0], s[1], s[2], s[3], s[4], s[5], s[6]);
    case GGML_DFLASH_OP_PLACE:
        return ggml_dflash_place(ctx, s[0], s[1], s[2], s[3], s[4], s[5], (int32_t) z.T, z.fill, z.spare, z.ring_spare);
    case GGML_DFLASH_OP_PENALISE:
        return ggml_dflash_penalise(ctx, s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]);
    }
    return nullptr;
}

constexpr ggml_dflash_op ALL_OPS[] = {
    GGML_DFLASH_OP_GDN_VERIFY,   GGML_DFLASH_OP_GDN_ADVANCE, GGML_DFLASH_OP_GDN_COMMIT, GGML_DFLASH_OP_CONV_VERIFY,
    GGML_DFLASH_OP_CONV_ADVANCE, GGML_DFLASH_OP_CONV_COMMIT, GGML_DFLASH_OP_ATTENTION,  GGML_DFLASH_OP_MUL_MAT,
    GGML_DFLASH_OP_DYNAMIC_CONV, GGML_DFLASH_OP_SELECT,      GGML_DFLASH_OP_SAMPLE,     GGML_DFLASH_OP_ACCEPT,
    GGML_DFLASH_OP_PLACE,        GGML_DFLASH_OP_PENALISE,
};

inline bool has_slots(ggml_dflash_op op) {
    return op != GGML_DFLASH_OP_MUL_MAT && op != GGML_DFLASH_OP_DYNAMIC_CONV && op != GGML_DFLASH_OP_SELECT &&
           op != GGML_DFLASH_OP_SAMPLE;
}

inline ggml_context * metadata_context() {
    ggml_init_params params = {256 * ggml_tensor_overhead(), nullptr, true};
    return ggml_init(params);
}

inline bool contains(const char * text, const char * part) {
    return text && std::strstr(text, part);
}

// The table of all backends: a valid node has its kernels, one that is refused has none anywhere.
inline void expect_backends(const ggml_tensor * node, bool valid) {
    const bool is_product = ggml_dflash_get_op(node) == GGML_DFLASH_OP_MUL_MAT; // ggml's own on SYCL
    const auto has = [&](int backend) { return ggml_dflash_supported((ggml_dflash_backend) backend, node); };
    counter().expect(has(GGML_DFLASH_BACKEND_CPU) == valid, "support of the CPU backend");
    for (int backend : {GGML_DFLASH_BACKEND_CUDA, GGML_DFLASH_BACKEND_HIP, GGML_DFLASH_BACKEND_SYCL}) {
        const bool composed = is_product && backend == GGML_DFLASH_BACKEND_SYCL;
        counter().expect(has(backend) == (valid && !composed), "support of backend %d", backend);
    }
    counter().expect(!has(4) && !has(-1), "support of a backend that there is not");
    counter().expect(ggml_backend_dev_supports_op(backend().device, node) == has(backend().kind),
                     "supports_op of the device is not the table's");
}

// Sizes decide: wanted is "" for a valid node.
inline void expect_sizes(ggml_dflash_op op, const Sizes & z, const char * wanted) {
    ggml_context * ctx = metadata_context();
    ggml_tensor * node = construct(ctx, op, make_sources(ctx, op, z), z);
    if (*wanted == '\0') {
        counter().expect(node && !ggml_dflash_check(node) && *ggml_dflash_last_error() == '\0',
                         "%s: valid, but refused: %s", ggml_dflash_op_name(op), ggml_dflash_last_error());
        expect_backends(node, true);
    } else {
        counter().expect(!node, "%s: should be refused for: %s", ggml_dflash_op_name(op), wanted);
        counter().expect(
            contains(ggml_dflash_last_error(), wanted) && contains(ggml_dflash_last_error(), ggml_dflash_op_name(op)),
            "%s: reason \"%s\" does not say \"%s\"", ggml_dflash_op_name(op), ggml_dflash_last_error(), wanted);
    }
    ggml_free(ctx);
}

typedef std::function<void(ggml_context *, ggml_tensor *)> Damage;

// A valid node, damaged afterwards: what a device is asked about must not depend on who built it.
inline void expect_damage(ggml_dflash_op op, const char * wanted, bool in_sources, const Damage & damage) {
    ggml_context * ctx = metadata_context();
    const Sizes z;
    ggml_tensor * node = construct(ctx, op, make_sources(ctx, op, z), z);
    counter().expect(node && !ggml_dflash_check(node), "the undamaged node is refused");
    damage(ctx, node);
    const char * reason = ggml_dflash_check(node);
    counter().expect(contains(reason, wanted), "%s: reason \"%s\" does not say \"%s\"", ggml_dflash_op_name(op),
                     reason ? reason : "(accepted)", wanted);
    counter().expect(!ggml_backend_dev_supports_op(backend().device, node), "supports_op accepts: %s", wanted);
    expect_backends(node, false);
    if (in_sources) {
        const Sources src(node->src, node->src + GGML_MAX_SRC);
        const size_t used = ggml_used_mem(ctx);
        counter().expect(!construct(ctx, op, src, z) && contains(ggml_dflash_last_error(), wanted),
                         "constructor accepts: %s", wanted);
        counter().expect(ggml_used_mem(ctx) == used, "a refused constructor took memory");
    }
    ggml_free(ctx);
}
