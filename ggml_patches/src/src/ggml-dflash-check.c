// Predicate of GGML_OP_DFLASH: what the sub-ops take. See ggml-dflash.h for the contracts, ggml-dflash-limits.h for the
// limits.

#include "ggml-dflash-impl.h"
#include "ggml-dflash-limits.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static DFLASH_THREAD_LOCAL char check_text[DFLASH_TEXT_SIZE];

// index of a source in gdn_verify and gdn_advance
enum { GDN_Q, GDN_K, GDN_V, GDN_G, GDN_BETA, GDN_STATE, GDN_LOG, GDN_SLOTS, GDN_PENDING, GDN_ROWS };

enum { SELECT_LOGITS, SELECT_ANCHORS, SELECT_BASE, SELECT_SAMPLING, SELECT_GATE, SELECT_BEFORE, SELECT_AFTER };
enum { ACCEPT_PROPOSALS = 5 };

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
                               6,
                               0,
                               false,
                               1u << 3 | 1u << 4,
                               {"tokens", "n_rows", "slots", "n_pending", "anchors", "proposals"},
                               1u << ACCEPT_PROPOSALS,
                               GGML_TYPE_I32},
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
    case GGML_DFLASH_OP_SELECT:
    case GGML_DFLASH_OP_SAMPLE: // a number per row of logits
        ne[0] = like[1], ne[1] = like[2], ne[2] = 1;
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

//
// checks: each returns true, or writes the reason to check_text and returns false
//

struct node {
    const struct ggml_tensor * op;
    const struct dflash_sub_op * sub;
};

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static bool refuse(const struct node * n, const char * format, ...) {
    const int used = snprintf(check_text, sizeof(check_text), "%s: ", n->sub ? n->sub->name : "dflash");

    va_list args;
    va_start(args, format);
    vsnprintf(check_text + used, sizeof(check_text) - (size_t) used, format, args);
    va_end(args);
    return false;
}

static bool check_range(const struct node * n, const char * what, int64_t value, int64_t low, int64_t high) {
    return (value >= low && value <= high) ||
           refuse(n, "%s is %lld, must be %lld..%lld", what, (long long) value, (long long) low, (long long) high);
}

static bool check_shape(const struct node * n, int i, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    const struct ggml_tensor * t = n->op->src[i];
    return (t->ne[0] == ne0 && t->ne[1] == ne1 && t->ne[2] == ne2 && t->ne[3] == ne3) ||
           refuse(n, "%s has shape [%lld,%lld,%lld,%lld], must be [%lld,%lld,%lld,%lld]", n->sub->src[i],
                  (long long) t->ne[0], (long long) t->ne[1], (long long) t->ne[2], (long long) t->ne[3],
                  (long long) ne0, (long long) ne1, (long long) ne2, (long long) ne3);
}

static bool check_type(const struct node * n, int i, enum ggml_type type) {
    const struct ggml_tensor * t = n->op->src[i];
    return t->type == type ||
           refuse(n, "%s is %s, must be %s", n->sub->src[i], ggml_type_name(t->type), ggml_type_name(type));
}

// Rows of elements that follow each other; the other strides are free, but keep elements aligned.
static bool check_rows(const struct node * n, int i) {
    const struct ggml_tensor * t = n->op->src[i];
    const size_t align = t->type == GGML_TYPE_F32 ? 4 : 2;
    if (t->nb[0] != ggml_type_size(t->type)) {
        return refuse(n, "%s must have contiguous rows", n->sub->src[i]);
    }
    for (int d = 1; d < GGML_MAX_DIMS; d++) {
        if (t->nb[d] % align != 0) {
            return refuse(n, "%s has stride %zu in dimension %d, not a multiple of %zu", n->sub->src[i], t->nb[d], d,
                          align);
        }
    }
    return true;
}

static bool check_dense(const struct node * n, int i) {
    return ggml_is_contiguous(n->op->src[i]) || refuse(n, "%s must be contiguous", n->sub->src[i]);
}

static bool check_f32_rows(const struct node * n, int i, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    return check_type(n, i, GGML_TYPE_F32) && check_shape(n, i, ne0, ne1, ne2, ne3) && check_rows(n, i);
}

static bool check_f32_dense(const struct node * n, int i, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    return check_type(n, i, GGML_TYPE_F32) && check_shape(n, i, ne0, ne1, ne2, ne3) && check_dense(n, i);
}

static bool check_i32(const struct node * n, int i, int64_t ne0, int64_t ne1) {
    return check_type(n, i, GGML_TYPE_I32) && check_shape(n, i, ne0, ne1, 1, 1) && check_dense(n, i);
}

static bool check_state_width(const struct node * n, int64_t width) {
#define SAME(W)                                                                                                        \
    if (width == W) {                                                                                                  \
        return true;                                                                                                   \
    }
    GGML_DFLASH_STATE_WIDTHS(SAME)
#undef SAME
    return refuse(n, "state width %lld is not one of 16, 32, 64, 128", (long long) width);
}

static bool check_head_dim(const struct node * n, int64_t dim) {
#define SAME(D)                                                                                                        \
    if (dim == D) {                                                                                                    \
        return true;                                                                                                   \
    }
    GGML_DFLASH_HEAD_DIMS(SAME)
#undef SAME
    return refuse(n, "head width %lld is not one of 16, 32, 64, 128, 256", (long long) dim);
}

static bool check_gqa(const struct node * n, int64_t n_head, int64_t n_head_kv) {
    if (n_head % n_head_kv != 0) {
        return refuse(n, "%lld query heads are not a multiple of %lld kv heads", (long long) n_head,
                      (long long) n_head_kv);
    }
    const int64_t ratio = n_head / n_head_kv;
#define SAME(R)                                                                                                        \
    if (ratio == R) {                                                                                                  \
        return true;                                                                                                   \
    }
    GGML_DFLASH_GQA_RATIOS(SAME)
#undef SAME
    return refuse(n, "%lld query heads per kv head is not one of 1..8, 16", (long long) ratio);
}

// state, log, slots and n_pending from source i on; the other sources take their sizes from these
static bool check_gdn_memory(const struct node * n, int i) {
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

static bool check_gdn(const struct node * n, bool verify) {
    if (!check_gdn_memory(n, GDN_STATE)) {
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
        return refuse(n, "%lld value heads are not a multiple of %lld key heads", (long long) Hv, (long long) Hk);
    }
    return check_f32_rows(n, GDN_Q, S, Hk, T, L) && check_f32_rows(n, GDN_K, S, Hk, T, L) &&
           check_f32_rows(n, GDN_V, S, Hv, T, L) && check_f32_rows(n, GDN_G, Hv, T, L, 1) &&
           check_f32_rows(n, GDN_BETA, Hv, T, L, 1) && (verify || check_i32(n, GDN_ROWS, L, 1));
}

// rows, slots and n_pending from source i on
static bool check_conv_memory(const struct node * n, int i) {
    const struct ggml_tensor * rows = n->op->src[i];
    return check_range(n, "number of channels", rows->ne[0], 1, GGML_DFLASH_MAX_CHANNELS) &&
           check_range(n, "number of kept rows", rows->ne[1], GGML_DFLASH_CONV_TAPS,
                       GGML_DFLASH_CONV_TAPS - 1 + GGML_DFLASH_MAX_BLOCK) &&
           check_range(n, "number of slots", rows->ne[2], 1, GGML_DFLASH_MAX_SLOTS) &&
           check_f32_dense(n, i, rows->ne[0], rows->ne[1], rows->ne[2], 1) &&
           check_range(n, "number of lanes", n->op->src[i + 1]->ne[0], 1, GGML_DFLASH_MAX_LANES) &&
           check_i32(n, i + 1, n->op->src[i + 1]->ne[0], 1) && check_i32(n, i + 2, rows->ne[2], 1);
}

static bool check_conv(const struct node * n, bool verify) {
    if (!check_conv_memory(n, 2)) {
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
        return refuse(n, "%s is %s, must be f32, f16 or q8_0", n->sub->src[i], ggml_type_name(type));
    }
    if (D % ggml_blck_size(type) != 0) {
        return refuse(n, "%s has rows of %lld, not whole blocks of %s", n->sub->src[i], (long long) D,
                      ggml_type_name(type));
    }
    return check_shape(n, i, D, Hkv, n_rows, 1) && check_rows(n, i);
}

static bool check_attention(const struct node * n) {
    const struct ggml_tensor * q = n->op->src[0];
    const struct ggml_tensor * k = n->op->src[1];
    const struct ggml_tensor * table = n->op->src[3];
    const int64_t D = q->ne[0];
    const int64_t L = n->op->src[4]->ne[0];

    float scale;
    memcpy(&scale, &n->op->op_params[1], sizeof(scale));
    if (!isfinite(scale)) {
        return refuse(n, "scale must be finite");
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
        return refuse(n, "k_pages has %lld rows, not whole pages of %d", (long long) k->ne[2], GGML_DFLASH_PAGE_ROWS);
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
    return refuse(n, "w is %s, must be iq4_xs, q4_K, q5_K, q6_K or q8_0", ggml_type_name(type));
}

static bool check_mul_mat(const struct node * n) {
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
        return refuse(n, "w has rows of %lld, not a multiple of %d", (long long) w->ne[0], GGML_DFLASH_SUPER_BLOCK);
    }
    return check_shape(n, 0, w->ne[0], w->ne[1], 1, 1) && check_rows(n, 0) &&
           check_f32_dense(n, 1, w->ne[0], x->ne[1], x->ne[2], 1);
}

static bool check_dynamic_conv(const struct node * n) {
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
        return refuse(n, "%lld channels are no multiple of %lld groups", (long long) E, (long long) G);
    }
    return check_f32_rows(n, 0, E, T, L, 1) && check_f32_rows(n, 1, G, K, T, L) && check_f32_rows(n, 2, E, K, 1, 1);
}

static bool check_logits(const struct node * n, int64_t max_rows) {
    const struct ggml_tensor * logits = n->op->src[0];
    return check_range(n, "vocabulary", logits->ne[0], 1, GGML_DFLASH_MAX_VOCABULARY) &&
           check_range(n, "number of rows", logits->ne[1], 1, max_rows) &&
           check_range(n, "number of lanes", logits->ne[2], 1, GGML_DFLASH_MAX_LANES) &&
           check_f32_dense(n, 0, logits->ne[0], logits->ne[1], logits->ne[2], 1);
}

static bool check_codebook(const struct node * n, int i, int64_t R, int64_t V) {
    const struct ggml_tensor * book = n->op->src[i];
#define SAME(TYPE)                                                                                                     \
    if (book->type == TYPE) {                                                                                          \
        return (R % ggml_blck_size(TYPE) == 0 || refuse(n, "%s has rows of %lld, not whole blocks of %s",              \
                                                        n->sub->src[i], (long long) R, ggml_type_name(TYPE))) &&       \
               check_shape(n, i, R, V, 1, 1) && check_rows(n, i);                                                      \
    }
    GGML_DFLASH_CODEBOOK_TYPES(SAME)
#undef SAME
    return refuse(n, "%s is %s, must be f32, f16, bf16 or q8_0", n->sub->src[i], ggml_type_name(book->type));
}

static bool check_top_k(const struct node * n, int32_t top_k) {
#define SAME(K)                                                                                                        \
    if (top_k == K) {                                                                                                  \
        return true;                                                                                                   \
    }
    GGML_DFLASH_TOP_KS(SAME)
#undef SAME
    return refuse(n, "top_k %d is not one of 1..8, 12, 16", top_k);
}

static bool check_select(const struct node * n) {
    struct ggml_tensor * const * src = n->op->src;
    if (!check_logits(n, GGML_DFLASH_MAX_BLOCK - 1) || !check_top_k(n, n->op->op_params[1])) {
        return false;
    }
    const int64_t V = src[SELECT_LOGITS]->ne[0], P = src[SELECT_LOGITS]->ne[1], L = src[SELECT_LOGITS]->ne[2];
    if (V < n->op->op_params[1]) {
        return refuse(n, "top_k %d of a vocabulary of %lld", n->op->op_params[1], (long long) V);
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
        return refuse(n, "gate, predecessor and successor go together, %d of 3 are there", n_given);
    }
    const int64_t R = src[SELECT_GATE]->ne[0];
    return check_range(n, "rank", R, 1, GGML_DFLASH_MAX_RANK) && check_f32_dense(n, SELECT_GATE, R, P, L, 1) &&
           check_codebook(n, SELECT_BEFORE, R, V) && check_codebook(n, SELECT_AFTER, R, V);
}

static bool check_sample(const struct node * n) {
    const int64_t L = n->op->src[0]->ne[2];
    return check_logits(n, GGML_DFLASH_MAX_BLOCK) && check_i32(n, 1, L, 1) && check_i32(n, 2, L, 1) &&
           check_i32(n, 3, GGML_DFLASH_SAMPLING_WORDS, L);
}

static bool check_accept(const struct node * n) {
    const int64_t T = n->op->src[0]->ne[0], L = n->op->src[0]->ne[1], N = n->op->src[3]->ne[0];
    if (!check_range(n, "number of rows", T, 1, GGML_DFLASH_MAX_BLOCK) ||
        !check_range(n, "number of lanes", L, 1, GGML_DFLASH_MAX_LANES) ||
        !check_range(n, "number of slots", N, 1, GGML_DFLASH_MAX_SLOTS) || !check_i32(n, 0, T, L) ||
        !check_i32(n, 1, L, 1) || !check_i32(n, 2, L, 1) || !check_i32(n, 3, N, 1) || !check_i32(n, 4, N, 1)) {
        return false;
    }
    if ((T == 1) != (n->op->src[ACCEPT_PROPOSALS] == NULL)) {
        return refuse(n, "proposals must be there for blocks of 2 rows and more, and only then");
    }
    return T == 1 || check_i32(n, ACCEPT_PROPOSALS, T - 1, L);
}

// Parameters a sub-op has, itself included.
static int count_params(const struct node * n) {
    switch (ggml_dflash_get_op(n->op)) {
    case GGML_DFLASH_OP_ATTENTION:
        return 4;
    case GGML_DFLASH_OP_SELECT:
        return 2;
    default:
        return 1;
    }
}

static bool check_params(const struct node * n) {
    const int n_used = count_params(n);
    for (int i = n_used; i < (int) (GGML_MAX_OP_PARAMS / sizeof(int32_t)); i++) {
        if (n->op->op_params[i] != 0) {
            return refuse(n, "parameter %d is %d, has no meaning and must be 0", i, n->op->op_params[i]);
        }
    }
    return true;
}

static bool check_sources(const struct node * n) {
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        const struct ggml_tensor * t = n->op->src[i];
        if (i < n->sub->n_src && t == NULL && !(n->sub->optional >> i & 1)) {
            return refuse(n, "%s is missing", n->sub->src[i]);
        }
        if (i >= n->sub->n_src && t != NULL) {
            return refuse(n, "source %d is set, takes %d sources", i, n->sub->n_src);
        }
    }
    for (int i = 0; i < n->sub->n_src; i++) {
        for (int j = 0; j < n->sub->n_src; j++) {
            if (i != j && (n->sub->writes >> i & 1) && n->op->src[i] && n->op->src[i] == n->op->src[j]) {
                return refuse(n, "%s is written, %s cannot be the same tensor", n->sub->src[i], n->sub->src[j]);
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
        return refuse(n, "the result must be %s, contiguous and of shape [%lld,%lld,%lld,%lld]",
                      ggml_type_name(n->sub->type), (long long) ne[0], (long long) ne[1], (long long) ne[2],
                      (long long) ne[3]);
    }
    if (n->sub->is_view) {
        const struct ggml_tensor * root = like->view_src ? like->view_src : like;
        if (op->view_src != root || op->view_offs != like->view_offs) {
            return refuse(n, "the result must be a view of %s", n->sub->src[n->sub->like]);
        }
    }
    return true;
}

static bool check_sub_op(const struct node * n) {
    switch (ggml_dflash_get_op(n->op)) {
    case GGML_DFLASH_OP_GDN_VERIFY:
        return check_gdn(n, true);
    case GGML_DFLASH_OP_GDN_ADVANCE:
        return check_gdn(n, false);
    case GGML_DFLASH_OP_GDN_COMMIT:
        return check_gdn_memory(n, 0);
    case GGML_DFLASH_OP_CONV_VERIFY:
        return check_conv(n, true);
    case GGML_DFLASH_OP_CONV_ADVANCE:
        return check_conv(n, false);
    case GGML_DFLASH_OP_CONV_COMMIT:
        return check_conv_memory(n, 0);
    case GGML_DFLASH_OP_ATTENTION:
        return check_attention(n);
    case GGML_DFLASH_OP_MUL_MAT:
        return check_mul_mat(n);
    case GGML_DFLASH_OP_DYNAMIC_CONV:
        return check_dynamic_conv(n);
    case GGML_DFLASH_OP_SELECT:
        return check_select(n);
    case GGML_DFLASH_OP_SAMPLE:
        return check_sample(n);
    case GGML_DFLASH_OP_ACCEPT:
        return check_accept(n);
    }
    return refuse(n, "sub-op %d has no check", n->op->op_params[0]);
}

const char * ggml_dflash_check(const struct ggml_tensor * op) {
    struct node n = {op, NULL};
    if (op == NULL || op->op != GGML_OP_DFLASH) {
        refuse(&n, "not a DFLASH node");
        return check_text;
    }
    n.sub = dflash_find_sub_op(op->op_params[0]);
    if (n.sub == NULL) {
        refuse(&n, "unknown sub-op %d", op->op_params[0]);
        return check_text;
    }
    return check_params(&n) && check_sources(&n) && check_sub_op(&n) && check_result(&n) ? NULL : check_text;
}
