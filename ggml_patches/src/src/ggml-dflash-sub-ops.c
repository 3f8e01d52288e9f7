// The table of sub-ops: names, sources, and what the result looks like.

#include "ggml-dflash-impl.h"

#include <string.h>

static const struct dflash_sub_op SUB_OPS[] = {
    [GGML_DFLASH_OP_GDN_VERIFY] = {"gdn_verify",
                                   9,
                                   GDN_V,
                                   false,
                                   1u << GDN_STATE | 1u << GDN_LOG,
                                   {"q", "k", "v", "g", "beta", "state", "log", "slots", "n_pending"}},
    [GGML_DFLASH_OP_GDN_ADVANCE] = {"gdn_advance",
                                    10,
                                    GDN_V,
                                    false,
                                    1u << GDN_STATE,
                                    {"q", "k", "v", "g", "beta", "state", "log", "slots", "n_pending", "n_rows"}},
    [GGML_DFLASH_OP_GDN_COMMIT] = {"gdn_commit", 4, 0, true, 1u << 0, {"state", "log", "slots", "n_pending"}},
    [GGML_DFLASH_OP_CONV_VERIFY] = {"conv_verify", 5, 0, false, 1u << 2, {"x", "w", "rows", "slots", "n_pending"}},
    [GGML_DFLASH_OP_CONV_ADVANCE] =
        {"conv_advance", 6, 0, false, 1u << 2, {"x", "w", "rows", "slots", "n_pending", "n_rows"}},
    [GGML_DFLASH_OP_CONV_COMMIT] = {"conv_commit", 3, 0, true, 1u << 0, {"rows", "slots", "n_pending"}},
    [GGML_DFLASH_OP_ATTENTION] =
        {"attention", 7, 0, false, 0, {"q", "k_pages", "v_pages", "table", "slots", "base", "n_rows"}},
    [GGML_DFLASH_OP_MUL_MAT] = {"mul_mat", 2, 1, false, 0, {"w", "x"}},
    [GGML_DFLASH_OP_DYNAMIC_CONV] = {"dynamic_conv", 3, 0, false, 0, {"x", "coef", "base"}},
    [GGML_DFLASH_OP_SELECT] = {"select",
                               7,
                               0,
                               false,
                               0,
                               {"logits", "anchors", "base", "sampling", "gate", "predecessor", "successor"},
                               1u << SELECT_GATE | 1u << SELECT_BEFORE | 1u << SELECT_AFTER,
                               GGML_TYPE_I32},
    [GGML_DFLASH_OP_SAMPLE] = {"sample", 4, 0, false, 0, {"logits", "base", "n_rows", "sampling"}, 0, GGML_TYPE_I32},
    [GGML_DFLASH_OP_ACCEPT] = {"accept",
                               7,
                               0,
                               false,
                               1u << 4 | 1u << 5 | 1u << 6,
                               {"tokens", "block", "n_rows", "slots", "n_pending", "base", "history"},
                               0,
                               GGML_TYPE_I32},
    [GGML_DFLASH_OP_PLACE] = {"place",
                              6,
                              PLACE_SLOTS,
                              false,
                              0,
                              {"slots", "n_rows", "base", "history", "table", "ring"},
                              1u << PLACE_RING,
                              GGML_TYPE_I32},
    [GGML_DFLASH_OP_PENALISE] = {"penalise",
                                 8,
                                 0,
                                 true,
                                 1u << 0,
                                 {"logits", "block", "base", "n_rows", "slots", "history", "penalties", "bias"}},
};

const struct dflash_sub_op * dflash_find_sub_op(int32_t id) {
    const int32_t n = (int32_t) (sizeof(SUB_OPS) / sizeof(SUB_OPS[0]));
    return id > 0 && id < n && SUB_OPS[id].name ? &SUB_OPS[id] : NULL;
}

void dflash_result_shape(const struct ggml_tensor * op, const struct dflash_sub_op * sub, int64_t * ne) {
    const int64_t * like = op->src[sub->like]->ne;
    memcpy(ne, like, sizeof(op->ne));
    switch (ggml_dflash_get_op(op)) {
    case GGML_DFLASH_OP_MUL_MAT:
        ne[0] = op->src[0]->ne[1];
        break;
    case GGML_DFLASH_OP_SELECT: // the anchor and a number per row of logits
        ne[0] = like[1] + 1, ne[1] = like[2], ne[2] = 1;
        break;
    case GGML_DFLASH_OP_SAMPLE: // a number per row of logits
        ne[0] = like[1], ne[1] = like[2], ne[2] = 1;
        break;
    case GGML_DFLASH_OP_PLACE: // planes of a number per row, then one of a number per lane
        ne[0] = like[0] * ((op->src[PLACE_RING] ? 4 : 3) * (int64_t) op->op_params[1] + 1);
        break;
    case GGML_DFLASH_OP_ACCEPT:
        ne[0] = like[0] + 1;
        break;
    default:
        break;
    }
}

const char * ggml_dflash_op_name(enum ggml_dflash_op op) {
    const struct dflash_sub_op * sub = dflash_find_sub_op((int32_t) op);
    return sub ? sub->name : "unknown";
}

enum ggml_dflash_op ggml_dflash_get_op(const struct ggml_tensor * op) {
    return (enum ggml_dflash_op) op->op_params[0];
}
