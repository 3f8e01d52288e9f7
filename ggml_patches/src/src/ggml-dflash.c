// Constructors of GGML_OP_DFLASH.
//
// A constructor fills in a node on the stack, asks ggml_dflash_check about it and only then makes the tensor: there is
// one set of rules, and what a constructor builds is what supports_op accepts.

#include "ggml-dflash-impl.h"

#include <stdio.h>
#include <string.h>

static DFLASH_THREAD_LOCAL char error_text[DFLASH_TEXT_SIZE];

const char * ggml_dflash_last_error(void) {
    return error_text;
}

static struct ggml_tensor * fail(const char * reason) {
    snprintf(error_text, sizeof(error_text), "%s", reason);
    return NULL;
}

// ggml aborts when a context is full, so ask first.
static bool has_room(struct ggml_context * ctx, size_t data_size) {
    const size_t need = ggml_tensor_overhead() + (ggml_get_no_alloc(ctx) ? 0 : data_size + GGML_MEM_ALIGN);
    return ggml_get_mem_size(ctx) - ggml_used_mem(ctx) >= need;
}

// params: GGML_MAX_OP_PARAMS bytes, the sub-op first; src: GGML_MAX_SRC entries, unused ones NULL
static struct ggml_tensor * build(struct ggml_context * ctx, const int32_t * params, struct ggml_tensor * const * src) {
    const struct dflash_sub_op * sub = dflash_find_sub_op(params[0]);
    const struct ggml_tensor * like = src[sub->like];

    struct ggml_tensor node;
    memset(&node, 0, sizeof(node));
    node.type = sub->type;
    node.op = GGML_OP_DFLASH;
    memcpy(node.op_params, params, sizeof(node.op_params));
    memcpy(node.src, src, sizeof(node.src));
    if (like != NULL && src[0] != NULL) {
        dflash_result_shape(&node, sub, node.ne);
        for (int d = 0; d < GGML_MAX_DIMS; d++) {
            node.nb[d] = d == 0 ? ggml_type_size(sub->type) : node.nb[d - 1] * (size_t) node.ne[d - 1];
        }
        if (sub->is_view) {
            node.view_src = like->view_src ? like->view_src : src[sub->like];
            node.view_offs = like->view_offs;
        }
    }

    const char * reason = ggml_dflash_check(&node);
    if (reason != NULL) {
        return fail(reason);
    }
    if (ctx == NULL) {
        return fail("dflash: no context");
    }
    if (!has_room(ctx, sub->is_view ? 0 : ggml_nbytes(&node))) {
        return fail("dflash: the context is full");
    }

    struct ggml_tensor * result =
        sub->is_view ? ggml_view_tensor(ctx, src[sub->like]) : ggml_new_tensor(ctx, sub->type, GGML_MAX_DIMS, node.ne);
    result->op = GGML_OP_DFLASH;
    memcpy(result->op_params, params, sizeof(result->op_params));
    memcpy(result->src, src, sizeof(result->src));
    error_text[0] = '\0';
    return result;
}

#define DFLASH_PARAMS(...)                                                                                             \
    (const int32_t[GGML_MAX_OP_PARAMS / sizeof(int32_t)]) {                                                            \
        __VA_ARGS__                                                                                                    \
    }
#define DFLASH_SOURCES(...)                                                                                            \
    (struct ggml_tensor * const[GGML_MAX_SRC]) {                                                                       \
        __VA_ARGS__                                                                                                    \
    }

struct ggml_tensor * ggml_dflash_gdn_verify(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k,
                                            struct ggml_tensor * v, struct ggml_tensor * g, struct ggml_tensor * beta,
                                            struct ggml_tensor * state, struct ggml_tensor * log,
                                            struct ggml_tensor * slots, struct ggml_tensor * n_pending) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_GDN_VERIFY),
                 DFLASH_SOURCES(q, k, v, g, beta, state, log, slots, n_pending));
}

struct ggml_tensor * ggml_dflash_gdn_advance(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k,
                                             struct ggml_tensor * v, struct ggml_tensor * g, struct ggml_tensor * beta,
                                             struct ggml_tensor * state, struct ggml_tensor * log,
                                             struct ggml_tensor * slots, struct ggml_tensor * n_pending,
                                             struct ggml_tensor * n_rows) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_GDN_ADVANCE),
                 DFLASH_SOURCES(q, k, v, g, beta, state, log, slots, n_pending, n_rows));
}

struct ggml_tensor * ggml_dflash_gdn_commit(struct ggml_context * ctx, struct ggml_tensor * state,
                                            struct ggml_tensor * log, struct ggml_tensor * slots,
                                            struct ggml_tensor * n_pending) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_GDN_COMMIT), DFLASH_SOURCES(state, log, slots, n_pending));
}

struct ggml_tensor * ggml_dflash_conv_verify(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * w,
                                             struct ggml_tensor * rows, struct ggml_tensor * slots,
                                             struct ggml_tensor * n_pending) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_CONV_VERIFY), DFLASH_SOURCES(x, w, rows, slots, n_pending));
}

struct ggml_tensor * ggml_dflash_conv_advance(struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * w,
                                              struct ggml_tensor * rows, struct ggml_tensor * slots,
                                              struct ggml_tensor * n_pending, struct ggml_tensor * n_rows) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_CONV_ADVANCE), DFLASH_SOURCES(x, w, rows, slots, n_pending, n_rows));
}

struct ggml_tensor * ggml_dflash_conv_commit(struct ggml_context * ctx, struct ggml_tensor * rows,
                                             struct ggml_tensor * slots, struct ggml_tensor * n_pending) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_CONV_COMMIT), DFLASH_SOURCES(rows, slots, n_pending));
}

struct ggml_tensor * ggml_dflash_attention(struct ggml_context * ctx, struct ggml_tensor * q,
                                           struct ggml_tensor * k_pages, struct ggml_tensor * v_pages,
                                           struct ggml_tensor * table, struct ggml_tensor * slots,
                                           struct ggml_tensor * base, struct ggml_tensor * n_rows, float scale,
                                           int32_t window, bool causal) {
    int32_t scale_bits;
    memcpy(&scale_bits, &scale, sizeof(scale_bits));
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_ATTENTION, scale_bits, window, causal),
                 DFLASH_SOURCES(q, k_pages, v_pages, table, slots, base, n_rows));
}

struct ggml_tensor * ggml_dflash_mul_mat(struct ggml_context * ctx, struct ggml_tensor * w, struct ggml_tensor * x) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_MUL_MAT), DFLASH_SOURCES(w, x));
}

struct ggml_tensor * ggml_dflash_dynamic_conv(struct ggml_context * ctx, struct ggml_tensor * x,
                                              struct ggml_tensor * coef, struct ggml_tensor * base) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_DYNAMIC_CONV), DFLASH_SOURCES(x, coef, base));
}

struct ggml_tensor * ggml_dflash_select(struct ggml_context * ctx, struct ggml_tensor * logits,
                                        struct ggml_tensor * anchors, struct ggml_tensor * base,
                                        struct ggml_tensor * sampling, struct ggml_tensor * gate,
                                        struct ggml_tensor * predecessor, struct ggml_tensor * successor,
                                        int32_t top_k) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_SELECT, top_k),
                 DFLASH_SOURCES(logits, anchors, base, sampling, gate, predecessor, successor));
}

struct ggml_tensor * ggml_dflash_sample(struct ggml_context * ctx, struct ggml_tensor * logits,
                                        struct ggml_tensor * base, struct ggml_tensor * n_rows,
                                        struct ggml_tensor * sampling) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_SAMPLE), DFLASH_SOURCES(logits, base, n_rows, sampling));
}

struct ggml_tensor * ggml_dflash_accept(struct ggml_context * ctx, struct ggml_tensor * tokens,
                                        struct ggml_tensor * block, struct ggml_tensor * n_rows,
                                        struct ggml_tensor * slots, struct ggml_tensor * n_pending,
                                        struct ggml_tensor * base, struct ggml_tensor * history) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_ACCEPT),
                 DFLASH_SOURCES(tokens, block, n_rows, slots, n_pending, base, history));
}

struct ggml_tensor * ggml_dflash_place(struct ggml_context * ctx, struct ggml_tensor * slots,
                                       struct ggml_tensor * n_rows, struct ggml_tensor * base,
                                       struct ggml_tensor * history, struct ggml_tensor * table,
                                       struct ggml_tensor * ring, int32_t rows, int32_t fill, int32_t spare,
                                       int32_t ring_spare) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_PLACE, rows, fill, spare, ring_spare),
                 DFLASH_SOURCES(slots, n_rows, base, history, table, ring));
}

struct ggml_tensor * ggml_dflash_penalise(struct ggml_context * ctx, struct ggml_tensor * logits,
                                          struct ggml_tensor * block, struct ggml_tensor * base,
                                          struct ggml_tensor * n_rows, struct ggml_tensor * slots,
                                          struct ggml_tensor * history, struct ggml_tensor * penalties,
                                          struct ggml_tensor * bias) {
    return build(ctx, DFLASH_PARAMS(GGML_DFLASH_OP_PENALISE),
                 DFLASH_SOURCES(logits, block, base, n_rows, slots, history, penalties, bias));
}
