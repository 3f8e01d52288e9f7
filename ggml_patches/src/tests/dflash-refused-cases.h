#pragma once

// What the predicate accepts and refuses. Every row of the table breaks one thing of a valid node and names words that
// the reason must hold. The same must come from ggml_dflash_check, supports_op and, where the sources are at fault,
// from the constructor.

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
    ggml_tensor * rows = f32(ctx, {z.C, 3 + z.B, z.N});
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
    }
    return nullptr;
}

constexpr ggml_dflash_op ALL_OPS[] = {
    GGML_DFLASH_OP_GDN_VERIFY,   GGML_DFLASH_OP_GDN_ADVANCE, GGML_DFLASH_OP_GDN_COMMIT, GGML_DFLASH_OP_CONV_VERIFY,
    GGML_DFLASH_OP_CONV_ADVANCE, GGML_DFLASH_OP_CONV_COMMIT, GGML_DFLASH_OP_ATTENTION,  GGML_DFLASH_OP_MUL_MAT,
};

inline ggml_context * metadata_context() {
    ggml_init_params params = {256 * ggml_tensor_overhead(), nullptr, true};
    return ggml_init(params);
}

inline bool contains(const char * text, const char * part) {
    return text && std::strstr(text, part);
}

// Sizes decide: wanted is "" for a valid node.
inline void expect_sizes(ggml_dflash_op op, const Sizes & z, const char * wanted) {
    ggml_context * ctx = metadata_context();
    ggml_tensor * node = construct(ctx, op, make_sources(ctx, op, z), z);
    if (*wanted == '\0') {
        counter().expect(node && !ggml_dflash_check(node) && *ggml_dflash_last_error() == '\0' &&
                             ggml_backend_dev_supports_op(backend().device, node),
                         "%s: valid, but refused: %s", ggml_dflash_op_name(op), ggml_dflash_last_error());
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
    if (in_sources) {
        const Sources src(node->src, node->src + GGML_MAX_SRC);
        const size_t used = ggml_used_mem(ctx);
        counter().expect(!construct(ctx, op, src, z) && contains(ggml_dflash_last_error(), wanted),
                         "constructor accepts: %s", wanted);
        counter().expect(ggml_used_mem(ctx) == used, "a refused constructor took memory");
    }
    ggml_free(ctx);
}

inline Sizes sizes(const std::function<void(Sizes &)> & change) {
    Sizes z;
    change(z);
    return z;
}

inline void refused_by_size() {
    const ggml_dflash_op GV = GGML_DFLASH_OP_GDN_VERIFY, GA = GGML_DFLASH_OP_GDN_ADVANCE,
                         GC = GGML_DFLASH_OP_GDN_COMMIT;
    const ggml_dflash_op CV = GGML_DFLASH_OP_CONV_VERIFY, CA = GGML_DFLASH_OP_CONV_ADVANCE,
                         CC = GGML_DFLASH_OP_CONV_COMMIT;
    const ggml_dflash_op AT = GGML_DFLASH_OP_ATTENTION;
    const auto each = [](std::vector<ggml_dflash_op> ops, const char * wanted,
                         const std::function<void(Sizes &)> & change) {
        for (ggml_dflash_op op : ops) {
            expect_sizes(op, sizes(change), wanted);
        }
    };
    for (ggml_dflash_op op : ALL_OPS) {
        expect_sizes(op, Sizes(), "");
    }
    // the accepted sets, literally, and what lies beside them
    for (int64_t S : {16, 32, 64, 128}) {
        each({GV, GA, GC}, "", [S](Sizes & z) { z.S = S; });
    }
    for (int64_t S : {0, 1, 15, 17, 48, 96, 127, 129, 256}) {
        each({GV, GA, GC}, "state width", [S](Sizes & z) { z.S = S; });
    }
    for (int64_t D : {16, 32, 64, 128, 256}) {
        each({AT}, "", [D](Sizes & z) {
            z.D = D;
            z.v_type = GGML_TYPE_F32;
        });
    }
    for (int64_t D : {8, 48, 80, 112, 255, 512}) {
        each({AT}, "head width", [D](Sizes & z) {
            z.D = D;
            z.v_type = GGML_TYPE_F32;
        });
    }
    for (int64_t gqa : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
        each({AT}, "", [gqa](Sizes & z) { z.Hq = gqa * z.Hkv; });
    }
    for (int64_t gqa : {9, 10, 15, 17, 32}) {
        each({AT}, "query heads per kv head", [gqa](Sizes & z) { z.Hq = gqa * z.Hkv; });
    }
    each({AT}, "not a multiple", [](Sizes & z) { z.Hq = 7; });
    each({AT}, "query heads", [](Sizes & z) { z.Hq = 0; });
    each({AT}, "kv heads", [](Sizes & z) { z.Hkv = 0; });
    for (int64_t Hv : {2, 4, 6}) {
        each({GV, GA}, "", [Hv](Sizes & z) { z.Hv = Hv; });
    }
    for (int64_t Hv : {1, 3, 5}) {
        each({GV, GA}, "not a multiple of 2 key heads", [Hv](Sizes & z) { z.Hv = Hv; });
    }
    each({GV, GA}, "key heads", [](Sizes & z) { z.Hk = 0; });
    each({GV, GA, GC}, "value heads", [](Sizes & z) { z.Hv = 0; });
    each({GV, GA, GC}, "value heads", [](Sizes & z) { z.Hv = 1026; });
    // blocks: T <= B <= 16 where rows may be rejected, any T where not
    each({GV, CV}, "", [](Sizes & z) {
        z.T = 16;
        z.B = 16;
    });
    each({GV, CV}, "number of rows is 9, must be 1..8", [](Sizes & z) { z.T = 9; });
    each({GV, CV}, "number of rows is 17, must be 1..16", [](Sizes & z) {
        z.T = 17;
        z.B = 16;
    });
    each({GV, CV, GA, CA, AT}, "number of rows", [](Sizes & z) { z.T = 0; });
    each({GA, CA, AT}, "", [](Sizes & z) { z.T = 1000; });
    each({GA, CA, AT}, "number of rows", [](Sizes & z) { z.T = (1 << 20) + 1; });
    each({GV, GA, GC}, "block capacity of log is 17", [](Sizes & z) {
        z.T = 1;
        z.B = 17;
    });
    each({GV, GA, GC}, "block capacity of log is 0", [](Sizes & z) {
        z.T = 1;
        z.B = 0;
    });
    each({CV, CA, CC}, "kept rows is 20", [](Sizes & z) {
        z.T = 1;
        z.B = 17;
    });
    each({CV, CA, CC}, "kept rows is 3", [](Sizes & z) {
        z.T = 1;
        z.B = 0;
    });
    // lanes, slots, channels, pages
    for (ggml_dflash_op op : ALL_OPS) {
        each({op}, "", [](Sizes & z) { z.L = 64; });
        each({op}, "number of lanes is 65", [](Sizes & z) { z.L = 65; });
        each({op}, "number of lanes is 0", [](Sizes & z) { z.L = 0; });
        if (op != GGML_DFLASH_OP_MUL_MAT) {
            each({op}, "number of slots is 0", [](Sizes & z) { z.N = 0; });
            each({op}, "number of slots is 4097", [](Sizes & z) { z.N = 4097; });
        }
    }
    each({CV, CA, CC}, "number of channels is 0", [](Sizes & z) { z.C = 0; });
    each({CV, CA, CC}, "", [](Sizes & z) { z.C = 10240; });
    each({AT}, "number of pages is 0", [](Sizes & z) { z.pages = 0; });
    each({AT}, "pages per slot is 0", [](Sizes & z) { z.max_pages = 0; });
    // page types
    for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
        each({AT}, "", [type](Sizes & z) { z.k_type = type; });
        each({AT}, "", [type](Sizes & z) { z.v_type = type; });
    }
    for (ggml_type type : {GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q5_1, GGML_TYPE_I8, GGML_TYPE_I32}) {
        each({AT}, "k_pages is", [type](Sizes & z) { z.k_type = type; });
        each({AT}, "v_pages is", [type](Sizes & z) { z.v_type = type; });
    }
    // weights
    const ggml_dflash_op MM = GGML_DFLASH_OP_MUL_MAT;
    for (ggml_type type : {GGML_TYPE_IQ4_XS, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0}) {
        each({MM}, "", [type](Sizes & z) { z.w_type = type; });
    }
    for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_0,
                           GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ3_S, GGML_TYPE_I8}) {
        each({MM}, "w is", [type](Sizes & z) { z.w_type = type; });
    }
    each({MM}, "", [](Sizes & z) { z.K = 256; });
    each({MM}, "weights per row is 0", [](Sizes & z) { z.K = 0; });
    each({MM}, "weights per row is 1048832", [](Sizes & z) { z.K = (1 << 20) + 256; });
    for (int64_t K : {288, 480, 544}) {
        each({MM}, "not a multiple of 256", [K](Sizes & z) {
            z.w_type = GGML_TYPE_Q8_0;
            z.K = K;
        });
    }
    each({MM}, "", [](Sizes & z) { z.M = 1; });
    each({MM}, "number of weight rows is 0", [](Sizes & z) { z.M = 0; });
    each({MM}, "number of weight rows is 16777217", [](Sizes & z) { z.M = (1 << 24) + 1; });
    each({MM}, "", [](Sizes & z) { z.T = 1000; });
    each({MM}, "number of rows is 0", [](Sizes & z) { z.T = 0; });
    each({MM}, "number of rows is 1048577", [](Sizes & z) { z.T = (1 << 20) + 1; });
    // parameters of attention
    each({AT}, "", [](Sizes & z) { z.window = INT32_MAX; });
    each({AT}, "window is -1", [](Sizes & z) { z.window = -1; });
    each({AT}, "scale must be finite", [](Sizes & z) { z.scale = INFINITY; });
    each({AT}, "scale must be finite", [](Sizes & z) { z.scale = NAN; });
}

// name of every source, in order: damage to source i must be reported under this name
inline std::vector<const char *> source_names(ggml_dflash_op op) {
    switch (op) {
    case GGML_DFLASH_OP_GDN_VERIFY:
        return {"q", "k", "v", "g", "beta", "state", "log", "slots", "n_pending"};
    case GGML_DFLASH_OP_GDN_ADVANCE:
        return {"q", "k", "v", "g", "beta", "state", "log", "slots", "n_pending", "n_rows"};
    case GGML_DFLASH_OP_GDN_COMMIT:
        return {"state", "log", "slots", "n_pending"};
    case GGML_DFLASH_OP_CONV_VERIFY:
        return {"x", "w", "rows", "slots", "n_pending"};
    case GGML_DFLASH_OP_CONV_ADVANCE:
        return {"x", "w", "rows", "slots", "n_pending", "n_rows"};
    case GGML_DFLASH_OP_CONV_COMMIT:
        return {"rows", "slots", "n_pending"};
    case GGML_DFLASH_OP_ATTENTION:
        return {"q", "k_pages", "v_pages", "table", "slots", "base", "n_rows"};
    case GGML_DFLASH_OP_MUL_MAT:
        return {"w", "x"};
    }
    return {};
}

inline bool may_be_strided(const std::string & op, const std::string & source) {
    const bool rows_only = op == "attention" ? source == "q" || source == "k_pages" || source == "v_pages"
                           : op == "mul_mat" ? source == "w"
                           : op[0] == 'g'
                               ? source == "q" || source == "k" || source == "v" || source == "g" || source == "beta"
                               : source == "x";
    return rows_only;
}

inline void refused_by_source() {
    for (ggml_dflash_op op : ALL_OPS) {
        const std::vector<const char *> names = source_names(op);
        for (size_t i = 0; i < names.size(); i++) {
            const std::string name = names[i];
            expect_damage(op, (name + " is missing").c_str(), true,
                          [i](ggml_context *, ggml_tensor * n) { n->src[i] = nullptr; });
            expect_damage(op, (name + " is ").c_str(), true, [i](ggml_context *, ggml_tensor * n) {
                n->src[i]->type = n->src[i]->type == GGML_TYPE_I32 ? GGML_TYPE_F32 : GGML_TYPE_I32;
            });
            expect_damage(op, (name + " has shape").c_str(), true, [i, name, op](ggml_context *, ggml_tensor * n) {
                // a size that no other rule speaks about first
                const int d = op == GGML_DFLASH_OP_MUL_MAT && name == "x"                ? 0
                              : name == "table" || name == "slots" || name == "k_pages"  ? 3
                              : name == "state"                                          ? 1
                              : name == "log"                                            ? 0
                              : name == "rows"                                           ? 3
                              : n->src[i]->ne[2] > 1 && name[0] != 'q' && name[0] != 'v' ? 2
                                                                                         : 3;
                n->src[i]->ne[d]++;
            });
            expect_damage(op,
                          may_be_strided(ggml_dflash_op_name(op), name) ? (name + " must have contiguous rows").c_str()
                                                                        : (name + " must be contiguous").c_str(),
                          true, [i](ggml_context *, ggml_tensor * n) { n->src[i]->nb[0] *= 2; });
            if (may_be_strided(ggml_dflash_op_name(op), name)) {
                expect_damage(op, (name + " has stride").c_str(), true,
                              [i](ggml_context *, ggml_tensor * n) { n->src[i]->nb[1] += 1; });
            } else if (name == "state" || name == "log" || name == "rows" || name == "w" || name == "table") {
                expect_damage(op, (name + " must be contiguous").c_str(), true,
                              [i](ggml_context *, ggml_tensor * n) { n->src[i]->nb[1] += 4; });
            }
        }
        for (size_t i = names.size(); i < GGML_MAX_SRC; i++) {
            expect_damage(op, "is set, takes", false, [i](ggml_context *, ggml_tensor * n) { n->src[i] = n->src[0]; });
        }
    }
    // written sources must be theirs alone
    expect_damage(GGML_DFLASH_OP_CONV_VERIFY, "rows is written", true,
                  [](ggml_context *, ggml_tensor * n) { n->src[0] = n->src[2]; });
    expect_damage(GGML_DFLASH_OP_GDN_VERIFY, "state is written", true,
                  [](ggml_context *, ggml_tensor * n) { n->src[2] = n->src[5]; });
    expect_damage(GGML_DFLASH_OP_MUL_MAT, "x has shape", true,
                  [](ggml_context *, ggml_tensor * n) { n->src[1]->ne[3]++; });
    expect_damage(GGML_DFLASH_OP_MUL_MAT, "w has shape", true,
                  [](ggml_context *, ggml_tensor * n) { n->src[0]->ne[2]++; });
    // odd sizes that only a hand-made node can have
    expect_damage(GGML_DFLASH_OP_ATTENTION, "not whole pages", true,
                  [](ggml_context *, ggml_tensor * n) { n->src[1]->ne[2]--; });
    expect_damage(GGML_DFLASH_OP_ATTENTION, "not whole blocks", true, [](ggml_context *, ggml_tensor * n) {
        for (int i = 0; i < 3; i++) {
            n->src[i]->ne[0] = 16;
        }
    });
    expect_damage(GGML_DFLASH_OP_CONV_VERIFY, "w has shape", true,
                  [](ggml_context *, ggml_tensor * n) { n->src[1]->ne[0] = 3; });
}

inline void refused_by_node() {
    for (ggml_dflash_op op : ALL_OPS) {
        for (int32_t id : {0, -1, 9, 100, INT32_MAX, INT32_MIN}) {
            expect_damage(op, "unknown sub-op", false, [id](ggml_context *, ggml_tensor * n) { n->op_params[0] = id; });
        }
        for (int i = op == GGML_DFLASH_OP_ATTENTION ? 4 : 1; i < (int) (GGML_MAX_OP_PARAMS / sizeof(int32_t)); i++) {
            expect_damage(op, ("parameter " + std::to_string(i)).c_str(), false,
                          [i](ggml_context *, ggml_tensor * n) { n->op_params[i] = 1; });
        }
        expect_damage(op, "the result must be", false,
                      [](ggml_context *, ggml_tensor * n) { n->type = GGML_TYPE_F16; });
        expect_damage(op, "the result must be", false, [](ggml_context *, ggml_tensor * n) { n->ne[1]++; });
        expect_damage(op, "the result must be", false, [](ggml_context *, ggml_tensor * n) { n->nb[1] += 4; });
        if (op == GGML_DFLASH_OP_GDN_COMMIT || op == GGML_DFLASH_OP_CONV_COMMIT) {
            expect_damage(op, "must be a view", false, [](ggml_context *, ggml_tensor * n) { n->view_src = nullptr; });
            expect_damage(op, "must be a view", false, [](ggml_context *, ggml_tensor * n) { n->view_offs = 64; });
        }
    }
    expect_damage(GGML_DFLASH_OP_ATTENTION, "causal is 2", false,
                  [](ggml_context *, ggml_tensor * n) { n->op_params[3] = 2; });
    counter().expect(contains(ggml_dflash_check(nullptr), "not a DFLASH node"), "check of NULL");

    // no room, no context: a reason, not an abort
    ggml_context * ctx = metadata_context();
    const Sizes z;
    const Sources src = make_sources(ctx, GGML_DFLASH_OP_GDN_VERIFY, z);
    counter().expect(!construct(nullptr, GGML_DFLASH_OP_GDN_VERIFY, src, z) &&
                         contains(ggml_dflash_last_error(), "no context"),
                     "constructor without a context");
    int n = 0;
    while (construct(ctx, GGML_DFLASH_OP_GDN_VERIFY, src, z) && n < 1000) {
        n++;
    }
    counter().expect(n > 0 && n < 256 && contains(ggml_dflash_last_error(), "context is full"),
                     "a full context after %d nodes", n);
    ggml_free(ctx);

    ggml_init_params params = {1 << 20, nullptr, false}; // a context that holds data too
    ctx = ggml_init(params);
    const Sources small = make_sources(ctx, GGML_DFLASH_OP_CONV_ADVANCE, z);
    n = 0;
    while (construct(ctx, GGML_DFLASH_OP_CONV_ADVANCE, small, z) && n < 1000000) {
        n++;
    }
    counter().expect(n > 0 && contains(ggml_dflash_last_error(), "context is full"), "a full context with data");
    ggml_free(ctx);
}

inline void refused_cases() {
    counter().label = "refused by size";
    refused_by_size();
    counter().label = "refused by source";
    refused_by_source();
    counter().label = "refused by node";
    refused_by_node();
}
