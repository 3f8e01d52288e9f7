// Predicate of the sub-ops of the target.

#include "ggml-dflash-check.h"

#include <math.h>
#include <string.h>

static bool check_state_width(const struct node * n, int64_t width) {
#define SAME(W)                                                                                                        \
    if (width == W) {                                                                                                  \
        return true;                                                                                                   \
    }
    GGML_DFLASH_STATE_WIDTHS(SAME)
#undef SAME
    return dflash_refuse(n, "state width %lld is not one of 16, 32, 64, 128", (long long) width);
}

static bool check_head_dim(const struct node * n, int64_t dim) {
#define SAME(D)                                                                                                        \
    if (dim == D) {                                                                                                    \
        return true;                                                                                                   \
    }
    GGML_DFLASH_HEAD_DIMS(SAME)
#undef SAME
    return dflash_refuse(n, "head width %lld is not one of 16, 32, 64, 128, 256", (long long) dim);
}

static bool check_gqa(const struct node * n, int64_t n_head, int64_t n_head_kv) {
    if (n_head % n_head_kv != 0) {
        return dflash_refuse(n, "%lld query heads are not a multiple of %lld kv heads", (long long) n_head,
                             (long long) n_head_kv);
    }
    const int64_t ratio = n_head / n_head_kv;
#define SAME(R)                                                                                                        \
    if (ratio == R) {                                                                                                  \
        return true;                                                                                                   \
    }
    GGML_DFLASH_GQA_RATIOS(SAME)
#undef SAME
    return dflash_refuse(n, "%lld query heads per kv head is not one of 1..8, 16", (long long) ratio);
}

// state, log, slots and n_pending from source i on; the other sources take their sizes from these
bool dflash_check_gdn_memory(const struct node * n, int i) {
    const struct ggml_tensor * state = n->op->src[i];
    const struct ggml_tensor * log = n->op->src[i + 1];
    const int64_t S = state->ne[0];
    return check_state_width(n, S) && check_range(n, "number of value heads", state->ne[2], 1, GGML_DFLASH_MAX_HEADS) &&
           check_range(n, "number of slots", state->ne[3], 1, GGML_DFLASH_MAX_SLOTS) &&
           check_f32_dense(n, i, S, S, state->ne[2], state->ne[3]) &&
           check_range(n, "block capacity of log", log->ne[2], 1, GGML_DFLASH_MAX_BLOCK) &&
           check_f32_dense(n, i + 1, 2 * S + 1, state->ne[2], log->ne[2], state->ne[3]) &&
           check_range(n, "number of lanes", n->op->src[i + 2]->ne[0], 1, GGML_DFLASH_MAX_LANES) &&
           check_i32(n, i + 2, n->op->src[i + 2]->ne[0], 1) && check_i32(n, i + 3, state->ne[3], 1);
}

bool dflash_check_gdn(const struct node * n, bool verify) {
    if (!dflash_check_gdn_memory(n, GDN_STATE)) {
        return false;
    }
    const int64_t S = n->op->src[GDN_STATE]->ne[0];
    const int64_t Hv = n->op->src[GDN_STATE]->ne[2];
    const int64_t B = n->op->src[GDN_LOG]->ne[2];
    const int64_t L = n->op->src[GDN_SLOTS]->ne[0];
    const int64_t Hk = n->op->src[GDN_Q]->ne[1];
    const int64_t T = n->op->src[GDN_V]->ne[2];
    if (!check_range(n, "number of key heads", Hk, 1, GGML_DFLASH_MAX_HEADS) ||
        !check_range(n, "number of rows", T, 1, verify ? B : GGML_DFLASH_MAX_ROWS)) {
        return false;
    }
    if (Hv % Hk != 0) {
        return dflash_refuse(n, "%lld value heads are not a multiple of %lld key heads", (long long) Hv,
                             (long long) Hk);
    }
    return check_f32_rows(n, GDN_Q, S, Hk, T, L) && check_f32_rows(n, GDN_K, S, Hk, T, L) &&
           check_f32_rows(n, GDN_V, S, Hv, T, L) && check_f32_rows(n, GDN_G, Hv, T, L, 1) &&
           check_f32_rows(n, GDN_BETA, Hv, T, L, 1) && (verify || check_i32(n, GDN_ROWS, L, 1));
}

// rows, slots and n_pending from source i on
bool dflash_check_conv_memory(const struct node * n, int i) {
    const struct ggml_tensor * rows = n->op->src[i];
    return check_range(n, "number of channels", rows->ne[0], 1, GGML_DFLASH_MAX_CHANNELS) &&
           check_range(n, "number of kept rows", rows->ne[1], GGML_DFLASH_CONV_TAPS,
                       GGML_DFLASH_CONV_TAPS - 1 + GGML_DFLASH_MAX_BLOCK) &&
           check_range(n, "number of slots", rows->ne[2], 1, GGML_DFLASH_MAX_SLOTS) &&
           check_f32_dense(n, i, rows->ne[0], rows->ne[1], rows->ne[2], 1) &&
           check_range(n, "number of lanes", n->op->src[i + 1]->ne[0], 1, GGML_DFLASH_MAX_LANES) &&
           check_i32(n, i + 1, n->op->src[i + 1]->ne[0], 1) && check_i32(n, i + 2, rows->ne[2], 1);
}

bool dflash_check_conv(const struct node * n, bool verify) {
    if (!dflash_check_conv_memory(n, 2)) {
        return false;
    }
    const int64_t C = n->op->src[2]->ne[0];
    const int64_t B = n->op->src[2]->ne[1] - (GGML_DFLASH_CONV_TAPS - 1);
    const int64_t L = n->op->src[3]->ne[0];
    const int64_t T = n->op->src[0]->ne[1];
    return check_range(n, "number of rows", T, 1, verify ? B : GGML_DFLASH_MAX_ROWS) &&
           check_f32_rows(n, 0, C, T, L, 1) && check_f32_dense(n, 1, GGML_DFLASH_CONV_TAPS, C, 1, 1) &&
           (verify || check_i32(n, 5, L, 1));
}

static bool check_pages(const struct node * n, int i, int64_t D, int64_t Hkv, int64_t n_rows) {
    const enum ggml_type type = n->op->src[i]->type;
    if (type != GGML_TYPE_F32 && type != GGML_TYPE_F16 && type != GGML_TYPE_Q8_0) {
        return dflash_refuse(n, "%s is %s, must be f32, f16 or q8_0", n->sub->src[i], ggml_type_name(type));
    }
    if (D % ggml_blck_size(type) != 0) {
        return dflash_refuse(n, "%s has rows of %lld, not whole blocks of %s", n->sub->src[i], (long long) D,
                             ggml_type_name(type));
    }
    return check_shape(n, i, D, Hkv, n_rows, 1) && check_rows(n, i);
}

bool dflash_check_attention(const struct node * n) {
    const struct ggml_tensor * q = n->op->src[0];
    const struct ggml_tensor * k = n->op->src[1];
    const struct ggml_tensor * table = n->op->src[3];
    const int64_t D = q->ne[0];
    const int64_t L = n->op->src[4]->ne[0];

    float scale;
    memcpy(&scale, &n->op->op_params[1], sizeof(scale));
    if (!isfinite(scale)) {
        return dflash_refuse(n, "scale must be finite");
    }
    if (!check_range(n, "window", n->op->op_params[2], 0, INT32_MAX) ||
        !check_range(n, "causal", n->op->op_params[3], 0, 1) || !check_head_dim(n, D) ||
        !check_range(n, "number of query heads", q->ne[1], 1, GGML_DFLASH_MAX_HEADS) ||
        !check_range(n, "number of kv heads", k->ne[1], 1, GGML_DFLASH_MAX_HEADS) ||
        !check_gqa(n, q->ne[1], k->ne[1]) || !check_range(n, "number of rows", q->ne[2], 1, GGML_DFLASH_MAX_ROWS) ||
        !check_range(n, "number of lanes", L, 1, GGML_DFLASH_MAX_LANES)) {
        return false;
    }
    if (k->ne[2] % GGML_DFLASH_PAGE_ROWS != 0) {
        return dflash_refuse(n, "k_pages has %lld rows, not whole pages of %d", (long long) k->ne[2],
                             GGML_DFLASH_PAGE_ROWS);
    }
    return check_range(n, "number of pages", k->ne[2] / GGML_DFLASH_PAGE_ROWS, 1, GGML_DFLASH_MAX_PAGES) &&
           check_range(n, "pages per slot", table->ne[0], 1, GGML_DFLASH_MAX_PAGES) &&
           check_range(n, "number of slots", table->ne[1], 1, GGML_DFLASH_MAX_SLOTS) &&
           check_f32_rows(n, 0, D, q->ne[1], q->ne[2], L) && check_pages(n, 1, D, k->ne[1], k->ne[2]) &&
           check_pages(n, 2, D, k->ne[1], k->ne[2]) && check_i32(n, 3, table->ne[0], table->ne[1]) &&
           check_i32(n, 4, L, 1) && check_i32(n, 5, L, 1) && check_i32(n, 6, L, 1);
}

static bool check_weight_type(const struct node * n, enum ggml_type type) {
#define SAME(W)                                                                                                        \
    if (type == W) {                                                                                                   \
        return true;                                                                                                   \
    }
    GGML_DFLASH_WEIGHT_TYPES(SAME)
#undef SAME
    return dflash_refuse(n, "w is %s, must be iq4_xs, q4_K, q5_K, q6_K or q8_0", ggml_type_name(type));
}

bool dflash_check_mul_mat(const struct node * n) {
    const struct ggml_tensor * w = n->op->src[0];
    const struct ggml_tensor * x = n->op->src[1];
    if (!check_weight_type(n, w->type) ||
        !check_range(n, "weights per row", w->ne[0], GGML_DFLASH_SUPER_BLOCK, GGML_DFLASH_MAX_ROW_WEIGHTS) ||
        !check_range(n, "number of weight rows", w->ne[1], 1, GGML_DFLASH_MAX_WEIGHT_ROWS) ||
        !check_range(n, "number of rows", x->ne[1], 1, GGML_DFLASH_MAX_ROWS) ||
        !check_range(n, "number of lanes", x->ne[2], 1, GGML_DFLASH_MAX_LANES)) {
        return false;
    }
    if (w->ne[0] % GGML_DFLASH_SUPER_BLOCK != 0) {
        return dflash_refuse(n, "w has rows of %lld, not a multiple of %d", (long long) w->ne[0],
                             GGML_DFLASH_SUPER_BLOCK);
    }
    return check_shape(n, 0, w->ne[0], w->ne[1], 1, 1) && check_rows(n, 0) &&
           check_f32_dense(n, 1, w->ne[0], x->ne[1], x->ne[2], 1);
}
