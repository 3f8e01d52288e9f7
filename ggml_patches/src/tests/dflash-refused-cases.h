#pragma once

// What the predicate accepts and refuses. Every row of a table breaks one thing of a valid node and names words that
// the reason must hold. The same must come from ggml_dflash_check, supports_op and, where the sources are at fault,
// from the constructor.

#include "dflash-refused-draft-sizes.h"

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
    case GGML_DFLASH_OP_DYNAMIC_CONV:
        return {"x", "coef", "base"};
    case GGML_DFLASH_OP_SELECT:
        return {"logits", "anchors", "base", "sampling", "gate", "predecessor", "successor"};
    case GGML_DFLASH_OP_SAMPLE:
        return {"logits", "base", "n_rows", "sampling"};
    case GGML_DFLASH_OP_ACCEPT:
        return {"tokens", "block", "n_rows", "slots", "n_pending", "base", "history"};
    case GGML_DFLASH_OP_PLACE:
        return {"slots", "n_rows", "base", "history", "table", "ring"};
    case GGML_DFLASH_OP_PENALISE:
        return {"logits", "block", "base", "n_rows", "slots", "history", "penalties", "bias"};
    }
    return {};
}

// Sources whose rows may lie apart; the others are contiguous.
inline bool may_be_strided(ggml_dflash_op op, const std::string & source) {
    const auto one_of = [&](std::vector<const char *> names) {
        return std::find(names.begin(), names.end(), source) != names.end();
    };
    switch (op) {
    case GGML_DFLASH_OP_GDN_VERIFY:
    case GGML_DFLASH_OP_GDN_ADVANCE:
        return one_of({"q", "k", "v", "g", "beta"});
    case GGML_DFLASH_OP_CONV_VERIFY:
    case GGML_DFLASH_OP_CONV_ADVANCE:
        return source == "x";
    case GGML_DFLASH_OP_ATTENTION:
        return one_of({"q", "k_pages", "v_pages"});
    case GGML_DFLASH_OP_MUL_MAT:
        return source == "w";
    case GGML_DFLASH_OP_DYNAMIC_CONV:
        return true;
    case GGML_DFLASH_OP_SELECT:
        return one_of({"predecessor", "successor"});
    default:
        return false;
    }
}

// A number per lane or slot: one row.
inline bool is_list(const std::string & source) {
    return source == "slots" || source == "n_pending" || source == "n_rows" || source == "base" || source == "anchors";
}

inline const char * missing_reason(const std::string & source) {
    const bool is_edge = source == "gate" || source == "predecessor" || source == "successor";
    return is_edge            ? "go together, 2 of 3 are there"
           : source == "ring" ? "ring_spare is 48, must be 0..0"
                              : "is missing";
}

// A dimension that, one larger, is the fault of this source and of no rule that is asked before.
inline int odd_dimension(ggml_dflash_op op, const std::string & name, const ggml_tensor * source) {
    const bool is_first = name == "logits" || name == "tokens" || (op == GGML_DFLASH_OP_DYNAMIC_CONV && name == "x");
    return op == GGML_DFLASH_OP_MUL_MAT && name == "x"                           ? 0
           : is_first || name == "table" || name == "slots" || name == "k_pages" ? 3
           : name == "state"                                                     ? 1
           : name == "log"                                                       ? 0
           : name == "rows"                                                      ? 3
           : source->ne[2] > 1 && name[0] != 'q' && name[0] != 'v'               ? 2
                                                                                 : 3;
}

inline void make_dense(ggml_tensor * t) {
    for (int d = 1; d < GGML_MAX_DIMS; d++) {
        t->nb[d] = d == 1 ? ggml_row_size(t->type, t->ne[0]) : t->nb[d - 1] * t->ne[d - 1];
    }
}

inline void refused_by_source() {
    for (ggml_dflash_op op : ALL_OPS) {
        const std::vector<const char *> names = source_names(op);
        for (size_t i = 0; i < names.size(); i++) {
            const std::string name = names[i];
            expect_damage(op, missing_reason(name), true,
                          [i](ggml_context *, ggml_tensor * n) { n->src[i] = nullptr; });
            expect_damage(op, (name + " is ").c_str(), true, [i](ggml_context *, ggml_tensor * n) {
                n->src[i]->type = n->src[i]->type == GGML_TYPE_I32 ? GGML_TYPE_F32 : GGML_TYPE_I32;
            });
            expect_damage(op, (name + " has shape").c_str(), true, [i, name, op](ggml_context *, ggml_tensor * n) {
                n->src[i]->ne[odd_dimension(op, name, n->src[i])]++;
            });
            expect_damage(op,
                          may_be_strided(op, name) ? (name + " must have contiguous rows").c_str()
                                                   : (name + " must be contiguous").c_str(),
                          true, [i](ggml_context *, ggml_tensor * n) { n->src[i]->nb[0] *= 2; });
            if (may_be_strided(op, name)) {
                expect_damage(op, (name + " has stride").c_str(), true,
                              [i](ggml_context *, ggml_tensor * n) { n->src[i]->nb[1] += 1; });
            } else if (!is_list(name)) {
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
    expect_damage(GGML_DFLASH_OP_ACCEPT, "n_pending is written, base cannot be the same tensor", true,
                  [](ggml_context *, ggml_tensor * n) { n->src[5] = n->src[4]; });
    expect_damage(GGML_DFLASH_OP_ACCEPT, "history is written, block cannot be the same tensor", true,
                  [](ggml_context *, ggml_tensor * n) { n->src[1] = n->src[6]; });
    expect_damage(GGML_DFLASH_OP_PENALISE, "logits is written, penalties cannot be the same tensor", true,
                  [](ggml_context *, ggml_tensor * n) { n->src[6] = n->src[0]; });
    // one off, in the other directions
    const struct {
        ggml_dflash_op op;
        int source, dimension;
        const char * wanted;
    } table[] = {
        {GGML_DFLASH_OP_DYNAMIC_CONV, 1, 3, "coef has shape [6,3,8,3], must be [6,3,8,2]"},
        {GGML_DFLASH_OP_DYNAMIC_CONV, 2, 0, "base has shape [49,3,1,1], must be [48,3,1,1]"},
        {GGML_DFLASH_OP_DYNAMIC_CONV, 2, 1, "base has shape [48,4,1,1], must be [48,3,1,1]"},
        {GGML_DFLASH_OP_SELECT, 1, 0, "anchors has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_SELECT, 2, 0, "base has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_SELECT, 3, 0, "sampling has shape [9,2,1,1], must be [8,2,1,1]"},
        {GGML_DFLASH_OP_SELECT, 3, 1, "sampling has shape [8,3,1,1], must be [8,2,1,1]"},
        {GGML_DFLASH_OP_SELECT, 4, 0, "predecessor has shape [64,80,1,1], must be [65,80,1,1]"},
        {GGML_DFLASH_OP_SELECT, 4, 1, "gate has shape [64,4,2,1], must be [64,3,2,1]"},
        {GGML_DFLASH_OP_SELECT, 5, 1, "predecessor has shape [64,81,1,1], must be [64,80,1,1]"},
        {GGML_DFLASH_OP_SELECT, 6, 1, "successor has shape [64,81,1,1], must be [64,80,1,1]"},
        {GGML_DFLASH_OP_SAMPLE, 1, 0, "base has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_SAMPLE, 2, 0, "n_rows has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_SAMPLE, 3, 0, "sampling has shape [9,2,1,1], must be [8,2,1,1]"},
        {GGML_DFLASH_OP_ACCEPT, 1, 0, "block has shape [9,2,1,1], must be [8,2,1,1]"},
        {GGML_DFLASH_OP_ACCEPT, 1, 1, "block has shape [8,3,1,1], must be [8,2,1,1]"},
        {GGML_DFLASH_OP_ACCEPT, 2, 0, "n_rows has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_ACCEPT, 3, 0, "slots has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_ACCEPT, 4, 0, "base has shape [3,1,1,1], must be [4,1,1,1]"},
        {GGML_DFLASH_OP_ACCEPT, 5, 0, "base has shape [4,1,1,1], must be [3,1,1,1]"},
        {GGML_DFLASH_OP_ACCEPT, 6, 1, "history has shape [40,4,1,1], must be [40,3,1,1]"},
        {GGML_DFLASH_OP_PLACE, 1, 0, "n_rows has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_PLACE, 2, 0, "history has shape [40,3,1,1], must be [40,4,1,1]"},
        {GGML_DFLASH_OP_PLACE, 3, 1, "history has shape [40,4,1,1], must be [40,3,1,1]"},
        {GGML_DFLASH_OP_PLACE, 4, 1, "table has shape [5,4,1,1], must be [5,3,1,1]"},
        {GGML_DFLASH_OP_PLACE, 5, 1, "ring has shape [2,4,1,1], must be [2,3,1,1]"},
        {GGML_DFLASH_OP_PENALISE, 1, 0, "block has shape [9,2,1,1], must be [8,2,1,1]"},
        {GGML_DFLASH_OP_PENALISE, 1, 1, "block has shape [8,3,1,1], must be [8,2,1,1]"},
        {GGML_DFLASH_OP_PENALISE, 2, 0, "base has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_PENALISE, 3, 0, "n_rows has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_PENALISE, 4, 0, "slots has shape [3,1,1,1], must be [2,1,1,1]"},
        {GGML_DFLASH_OP_PENALISE, 5, 1, "penalties has shape [2,3,1,1], must be [2,4,1,1]"},
        {GGML_DFLASH_OP_PENALISE, 6, 0, "penalties has shape [3,3,1,1], must be [2,3,1,1]"},
        {GGML_DFLASH_OP_PENALISE, 6, 1, "penalties has shape [2,4,1,1], must be [2,3,1,1]"},
        {GGML_DFLASH_OP_PENALISE, 7, 0, "bias has shape [3,6,3,1], must be [2,6,3,1]"},
        {GGML_DFLASH_OP_PENALISE, 7, 2, "bias has shape [2,6,4,1], must be [2,6,3,1]"},
    };
    for (const auto & row : table) {
        expect_damage(row.op, row.wanted, true, [row](ggml_context *, ggml_tensor * n) {
            n->src[row.source]->ne[row.dimension]++;
            make_dense(n->src[row.source]); // the shape alone is wrong
        });
    }
    // odd sizes that only a hand-made node can have
    for (int i : {5, 6}) {
        expect_damage(GGML_DFLASH_OP_SELECT, "not whole blocks of q8_0", true, [i](ggml_context *, ggml_tensor * n) {
            n->src[i]->type = GGML_TYPE_Q8_0;
            for (int book = 4; book < 7; book++) {
                n->src[book]->ne[0] = 48;
            }
            make_dense(n->src[4]);
        });
    }
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
        for (int32_t id : {0, -1, 15, 100, INT32_MAX, INT32_MIN}) {
            expect_damage(op, "unknown sub-op", false, [id](ggml_context *, ggml_tensor * n) { n->op_params[0] = id; });
        }
        const int n_params = op == GGML_DFLASH_OP_PLACE       ? 5
                             : op == GGML_DFLASH_OP_ATTENTION ? 4
                             : op == GGML_DFLASH_OP_SELECT    ? 2
                                                              : 1;
        for (int i = n_params; i < (int) (GGML_MAX_OP_PARAMS / sizeof(int32_t)); i++) {
            expect_damage(op, ("parameter " + std::to_string(i)).c_str(), false,
                          [i](ggml_context *, ggml_tensor * n) { n->op_params[i] = 1; });
        }
        expect_damage(op, "the result must be", false,
                      [](ggml_context *, ggml_tensor * n) { n->type = GGML_TYPE_F16; });
        expect_damage(op, "the result must be", false, [](ggml_context *, ggml_tensor * n) { n->ne[1]++; });
        expect_damage(op, "the result must be", false,
                      [](ggml_context *, ggml_tensor * n) { n->nb[n->ne[1] > 1 ? 1 : 0] += 4; });
        if (op == GGML_DFLASH_OP_GDN_COMMIT || op == GGML_DFLASH_OP_CONV_COMMIT || op == GGML_DFLASH_OP_PENALISE) {
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
    refused_by_draft_size();
    counter().label = "refused by source";
    refused_by_source();
    counter().label = "refused by node";
    refused_by_node();
}
