// Predicate of GGML_OP_DFLASH: what the sub-ops take. See ggml-dflash.h for the contracts, ggml-dflash-limits.h for the
// limits.

#include "ggml-dflash-check.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static DFLASH_THREAD_LOCAL char check_text[DFLASH_TEXT_SIZE];

bool dflash_refuse(const struct node * n, const char * format, ...) {
    const int used = snprintf(check_text, sizeof(check_text), "%s: ", n->sub ? n->sub->name : "dflash");

    va_list args;
    va_start(args, format);
    vsnprintf(check_text + used, sizeof(check_text) - (size_t) used, format, args);
    va_end(args);
    return false;
}

// Parameters a sub-op has, itself included.
static int count_params(const struct node * n) {
    switch (ggml_dflash_get_op(n->op)) {
    case GGML_DFLASH_OP_ATTENTION:
        return 4;
    case GGML_DFLASH_OP_SELECT:
        return 2;
    case GGML_DFLASH_OP_PLACE:
        return 5;
    default:
        return 1;
    }
}

static bool check_params(const struct node * n) {
    const int n_used = count_params(n);
    for (int i = n_used; i < (int) (GGML_MAX_OP_PARAMS / sizeof(int32_t)); i++) {
        if (n->op->op_params[i] != 0) {
            return dflash_refuse(n, "parameter %d is %d, has no meaning and must be 0", i, n->op->op_params[i]);
        }
    }
    return true;
}

static bool check_sources(const struct node * n) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        const struct ggml_tensor * t = n->op->src[i];
        if (i < n->sub->n_src && t == NULL && !(n->sub->optional >> i & 1)) {
            return dflash_refuse(n, "%s is missing", n->sub->src[i]);
        }
        if (i >= n->sub->n_src && t != NULL) {
            return dflash_refuse(n, "source %d is set, takes %d sources", i, n->sub->n_src);
        }
    }
    for (int i = 0; i < n->sub->n_src; i++) {
        for (int j = 0; j < n->sub->n_src; j++) {
            if (i != j && (n->sub->writes >> i & 1) && n->op->src[i] && n->op->src[i] == n->op->src[j]) {
                return dflash_refuse(n, "%s is written, %s cannot be the same tensor", n->sub->src[i], n->sub->src[j]);
            }
        }
    }
    return true;
}

static bool check_result(const struct node * n) {
    const struct ggml_tensor * op = n->op;
    const struct ggml_tensor * like = op->src[n->sub->like];
    int64_t ne[GGML_MAX_DIMS];
    dflash_result_shape(op, n->sub, ne);
    if (op->type != n->sub->type || memcmp(op->ne, ne, sizeof(ne)) != 0 || !ggml_is_contiguous(op)) {
        return dflash_refuse(n, "the result must be %s, contiguous and of shape [%lld,%lld,%lld,%lld]",
                             ggml_type_name(n->sub->type), (long long) ne[0], (long long) ne[1], (long long) ne[2],
                             (long long) ne[3]);
    }
    if (n->sub->is_view) {
        const struct ggml_tensor * root = like->view_src ? like->view_src : like;
        if (op->view_src != root || op->view_offs != like->view_offs) {
            return dflash_refuse(n, "the result must be a view of %s", n->sub->src[n->sub->like]);
        }
    }
    return true;
}

static bool check_sub_op(const struct node * n) {
    switch (ggml_dflash_get_op(n->op)) {
    case GGML_DFLASH_OP_GDN_VERIFY:
        return dflash_check_gdn(n, true);
    case GGML_DFLASH_OP_GDN_ADVANCE:
        return dflash_check_gdn(n, false);
    case GGML_DFLASH_OP_GDN_COMMIT:
        return dflash_check_gdn_memory(n, 0);
    case GGML_DFLASH_OP_CONV_VERIFY:
        return dflash_check_conv(n, true);
    case GGML_DFLASH_OP_CONV_ADVANCE:
        return dflash_check_conv(n, false);
    case GGML_DFLASH_OP_CONV_COMMIT:
        return dflash_check_conv_memory(n, 0);
    case GGML_DFLASH_OP_ATTENTION:
        return dflash_check_attention(n);
    case GGML_DFLASH_OP_MUL_MAT:
        return dflash_check_mul_mat(n);
    case GGML_DFLASH_OP_DYNAMIC_CONV:
        return dflash_check_dynamic_conv(n);
    case GGML_DFLASH_OP_SELECT:
        return dflash_check_select(n);
    case GGML_DFLASH_OP_SAMPLE:
        return dflash_check_sample(n);
    case GGML_DFLASH_OP_ACCEPT:
        return dflash_check_accept(n);
    case GGML_DFLASH_OP_PLACE:
        return dflash_check_place(n);
    case GGML_DFLASH_OP_PENALISE:
        return dflash_check_penalise(n);
    }
    return dflash_refuse(n, "sub-op %d has no check", n->op->op_params[0]);
}

const char * ggml_dflash_check(const struct ggml_tensor * op) {
    struct node n = {op, NULL};
    if (op == NULL || op->op != GGML_OP_DFLASH) {
        dflash_refuse(&n, "not a DFLASH node");
        return check_text;
    }
    n.sub = dflash_find_sub_op(op->op_params[0]);
    if (n.sub == NULL) {
        dflash_refuse(&n, "unknown sub-op %d", op->op_params[0]);
        return check_text;
    }
    return check_params(&n) && check_sources(&n) && check_sub_op(&n) && check_result(&n) ? NULL : check_text;
}
