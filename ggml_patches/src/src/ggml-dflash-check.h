#pragma once

// What the files of the predicate share: the node that is asked about, and the checks that more than one of them needs.
// A check returns true, or has dflash_refuse write the reason and returns false.

#include "ggml-dflash-impl.h"
#include "ggml-dflash-limits.h"

struct node {
    const struct ggml_tensor * op;
    const struct dflash_sub_op * sub;
};

// Writes "sub-op: ..." to the text that ggml_dflash_check returns. -> false
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
bool dflash_refuse(const struct node * n, const char * format, ...);

static inline bool check_range(const struct node * n, const char * what, int64_t value, int64_t low, int64_t high) {
    return (value >= low && value <= high) || dflash_refuse(n, "%s is %lld, must be %lld..%lld", what,
                                                            (long long) value, (long long) low, (long long) high);
}

static inline bool check_shape(const struct node * n, int i, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    const struct ggml_tensor * t = n->op->src[i];
    return (t->ne[0] == ne0 && t->ne[1] == ne1 && t->ne[2] == ne2 && t->ne[3] == ne3) ||
           dflash_refuse(n, "%s has shape [%lld,%lld,%lld,%lld], must be [%lld,%lld,%lld,%lld]", n->sub->src[i],
                         (long long) t->ne[0], (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3],
                         (long long) ne0, (long long) ne1, (long long) ne2, (long long) ne3);
}

static inline bool check_type(const struct node * n, int i, enum ggml_type type) {
    const struct ggml_tensor * t = n->op->src[i];
    return t->type == type ||
           dflash_refuse(n, "%s is %s, must be %s", n->sub->src[i], ggml_type_name(t->type), ggml_type_name(type));
}

// Rows of elements that follow each other; the other strides are free, but keep elements aligned.
static inline bool check_rows(const struct node * n, int i) {
    const struct ggml_tensor * t = n->op->src[i];
    const size_t align = t->type == GGML_TYPE_F32 ? 4 : 2;
    if (t->nb[0] != ggml_type_size(t->type)) {
        return dflash_refuse(n, "%s must have contiguous rows", n->sub->src[i]);
    }
    for (int d = 1; d < GGML_MAX_DIMS; d++) {
        if (t->nb[d] % align != 0) {
            return dflash_refuse(n, "%s has stride %zu in dimension %d, not a multiple of %zu", n->sub->src[i],
                                 t->nb[d], d, align);
        }
    }
    return true;
}

static inline bool check_dense(const struct node * n, int i) {
    return ggml_is_contiguous(n->op->src[i]) || dflash_refuse(n, "%s must be contiguous", n->sub->src[i]);
}

static inline bool check_f32_rows(const struct node * n, int i, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    return check_type(n, i, GGML_TYPE_F32) && check_shape(n, i, ne0, ne1, ne2, ne3) && check_rows(n, i);
}

static inline bool check_f32_dense(const struct node * n, int i, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    return check_type(n, i, GGML_TYPE_F32) && check_shape(n, i, ne0, ne1, ne2, ne3) && check_dense(n, i);
}

static inline bool check_i32_dense(const struct node * n, int i, int64_t ne0, int64_t ne1, int64_t ne2) {
    return check_type(n, i, GGML_TYPE_I32) && check_shape(n, i, ne0, ne1, ne2, 1) && check_dense(n, i);
}

static inline bool check_i32(const struct node * n, int i, int64_t ne0, int64_t ne1) {
    return check_i32_dense(n, i, ne0, ne1, 1);
}

static inline bool check_logits(const struct node * n, int64_t max_rows) {
    const struct ggml_tensor * logits = n->op->src[0];
    return check_range(n, "vocabulary", logits->ne[0], 1, GGML_DFLASH_MAX_VOCABULARY) &&
           check_range(n, "number of rows", logits->ne[1], 1, max_rows) &&
           check_range(n, "number of lanes", logits->ne[2], 1, GGML_DFLASH_MAX_LANES) &&
           check_f32_dense(n, 0, logits->ne[0], logits->ne[1], logits->ne[2], 1);
}

// ggml-dflash-check-target.c
bool dflash_check_gdn(const struct node * n, bool verify);
bool dflash_check_gdn_memory(const struct node * n, int i);
bool dflash_check_conv(const struct node * n, bool verify);
bool dflash_check_conv_memory(const struct node * n, int i);
bool dflash_check_attention(const struct node * n);
bool dflash_check_mul_mat(const struct node * n);

// ggml-dflash-check-draft.c
bool dflash_check_dynamic_conv(const struct node * n);
bool dflash_check_select(const struct node * n);

// ggml-dflash-check-tokens.c
bool dflash_check_place(const struct node * n);
bool dflash_check_penalise(const struct node * n);
bool dflash_check_sample(const struct node * n);
bool dflash_check_accept(const struct node * n);
