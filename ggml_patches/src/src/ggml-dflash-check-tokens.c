// Predicate of the sub-ops around a run: which tokens go in, what comes out, what of it counts.

#include "ggml-dflash-check.h"

// base [N] and history [C,N] from source i on
static bool check_positions(const struct node * n, int i, int64_t N) {
    const int64_t C = n->op->src[i + 1]->ne[0];
    return check_range(n, "number of slots", N, 1, GGML_DFLASH_MAX_SLOTS) &&
           check_range(n, "positions of history", C, 1, GGML_DFLASH_MAX_POSITIONS) && check_i32(n, i, N, 1) &&
           check_i32(n, i + 1, C, N);
}

static bool check_page_table(const struct node * n, int i, const char * what, int64_t N) {
    const struct ggml_tensor * table = n->op->src[i];
    return check_range(n, what, table->ne[0], 1, GGML_DFLASH_MAX_PAGES) && check_i32(n, i, table->ne[0], N);
}

bool dflash_check_place(const struct node * n) {
    const int32_t * params = n->op->op_params;
    const bool has_ring = n->op->src[PLACE_RING] != NULL;
    const int64_t L = n->op->src[PLACE_SLOTS]->ne[0], N = n->op->src[PLACE_BASE]->ne[0];
    const int32_t last_spare = INT32_MAX - (GGML_DFLASH_PAGE_ROWS - 1); // so that all rows of its page have a number
    return check_range(n, "number of rows", params[1], 1, GGML_DFLASH_MAX_ROWS) &&
           check_range(n, "fill", params[2], -1, GGML_DFLASH_MAX_VOCABULARY - 1) &&
           check_range(n, "spare", params[3], 0, last_spare) &&
           check_range(n, "ring_spare", params[4], 0, has_ring ? last_spare : 0) &&
           check_range(n, "number of lanes", L, 1, GGML_DFLASH_MAX_LANES) && check_i32(n, PLACE_SLOTS, L, 1) &&
           check_i32(n, PLACE_ROWS, L, 1) && check_positions(n, PLACE_BASE, N) &&
           check_page_table(n, PLACE_TABLE, "pages per slot", N) &&
           (!has_ring || check_page_table(n, PLACE_RING, "ring pages per slot", N));
}

bool dflash_check_penalise(const struct node * n) {
    struct ggml_tensor * const * src = n->op->src;
    const int64_t T = src[0]->ne[1], L = src[0]->ne[2], C = src[5]->ne[0], N = src[5]->ne[1], NB = src[7]->ne[1];
    return check_logits(n, GGML_DFLASH_MAX_BLOCK) && check_range(n, "number of slots", N, 1, GGML_DFLASH_MAX_SLOTS) &&
           check_range(n, "positions of history", C, 1, GGML_DFLASH_MAX_POSITIONS) &&
           check_range(n, "number of biases", NB, 1, GGML_DFLASH_MAX_BIASES) && check_i32(n, 1, T, L) &&
           check_i32(n, 2, L, 1) && check_i32(n, 3, L, 1) && check_i32(n, 4, L, 1) && check_i32(n, 5, C, N) &&
           check_f32_dense(n, 6, 2, N, 1, 1) && check_i32_dense(n, 7, 2, NB, N);
}

bool dflash_check_sample(const struct node * n) {
    const int64_t L = n->op->src[0]->ne[2];
    return check_logits(n, GGML_DFLASH_MAX_BLOCK) && check_i32(n, 1, L, 1) && check_i32(n, 2, L, 1) &&
           check_i32(n, 3, GGML_DFLASH_SAMPLING_WORDS, L);
}

bool dflash_check_accept(const struct node * n) {
    const int64_t T = n->op->src[0]->ne[0], L = n->op->src[0]->ne[1], N = n->op->src[4]->ne[0];
    return check_range(n, "number of rows", T, 1, GGML_DFLASH_MAX_BLOCK) &&
           check_range(n, "number of lanes", L, 1, GGML_DFLASH_MAX_LANES) && check_i32(n, 0, T, L) &&
           check_i32(n, 1, T, L) && check_i32(n, 2, L, 1) && check_i32(n, 3, L, 1) && check_positions(n, 5, N) &&
           check_i32(n, 4, N, 1);
}
