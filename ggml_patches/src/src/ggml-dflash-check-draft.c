// Predicate of the sub-ops of the draft.

#include "ggml-dflash-check.h"

bool dflash_check_dynamic_conv(const struct node * n) {
    const struct ggml_tensor * x = n->op->src[0];
    const struct ggml_tensor * coef = n->op->src[1];
    const int64_t E = x->ne[0], T = x->ne[1], L = x->ne[2], G = coef->ne[0], K = coef->ne[1];
    if (!check_range(n, "number of channels", E, 1, GGML_DFLASH_MAX_CHANNELS) ||
        !check_range(n, "number of rows", T, 1, GGML_DFLASH_MAX_BLOCK) ||
        !check_range(n, "number of lanes", L, 1, GGML_DFLASH_MAX_LANES) ||
        !check_range(n, "number of groups", G, 1, E) ||
        !check_range(n, "number of taps", K, 1, GGML_DFLASH_MAX_DYNAMIC_TAPS)) {
        return false;
    }
    if (E % G != 0) {
        return dflash_refuse(n, "%lld channels are no multiple of %lld groups", (long long) E, (long long) G);
    }
    return check_f32_rows(n, 0, E, T, L, 1) && check_f32_rows(n, 1, G, K, T, L) && check_f32_rows(n, 2, E, K, 1, 1);
}

static bool check_codebook(const struct node * n, int i, int64_t R, int64_t V) {
    const struct ggml_tensor * book = n->op->src[i];
#define SAME(TYPE)                                                                                                     \
    if (book->type == TYPE) {                                                                                          \
        return (R % ggml_blck_size(TYPE) == 0 ||                                                                       \
                dflash_refuse(n, "%s has rows of %lld, not whole blocks of %s", n->sub->src[i], (long long) R,         \
                              ggml_type_name(TYPE))) &&                                                                \
               check_shape(n, i, R, V, 1, 1) && check_rows(n, i);                                                      \
    }
    GGML_DFLASH_CODEBOOK_TYPES(SAME)
#undef SAME
    return dflash_refuse(n, "%s is %s, must be f32, f16, bf16 or q8_0", n->sub->src[i], ggml_type_name(book->type));
}

static bool check_top_k(const struct node * n, int32_t top_k) {
#define SAME(K)                                                                                                        \
    if (top_k == K) {                                                                                                  \
        return true;                                                                                                   \
    }
    GGML_DFLASH_TOP_KS(SAME)
#undef SAME
    return dflash_refuse(n, "top_k %d is not one of 1..8, 12, 16", top_k);
}

bool dflash_check_select(const struct node * n) {
    struct ggml_tensor * const * src = n->op->src;
    if (!check_logits(n, GGML_DFLASH_MAX_BLOCK - 1) || !check_top_k(n, n->op->op_params[1])) {
        return false;
    }
    const int64_t V = src[SELECT_LOGITS]->ne[0], P = src[SELECT_LOGITS]->ne[1], L = src[SELECT_LOGITS]->ne[2];
    if (V < n->op->op_params[1]) {
        return dflash_refuse(n, "top_k %d of a vocabulary of %lld", n->op->op_params[1], (long long) V);
    }
    if (!check_i32(n, SELECT_ANCHORS, L, 1) || !check_i32(n, SELECT_BASE, L, 1) ||
        !check_i32(n, SELECT_SAMPLING, GGML_DFLASH_SAMPLING_WORDS, L)) {
        return false;
    }
    const int n_given = !!src[SELECT_GATE] + !!src[SELECT_BEFORE] + !!src[SELECT_AFTER];
    if (n_given == 0) {
        return true;
    }
    if (n_given != 3) {
        return dflash_refuse(n, "gate, predecessor and successor go together, %d of 3 are there", n_given);
    }
    const int64_t R = src[SELECT_GATE]->ne[0];
    return check_range(n, "rank", R, 1, GGML_DFLASH_MAX_RANK) && check_f32_dense(n, SELECT_GATE, R, P, L, 1) &&
           check_codebook(n, SELECT_BEFORE, R, V) && check_codebook(n, SELECT_AFTER, R, V);
}
