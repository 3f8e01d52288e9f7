// Guards for upstream ops whose supports_op says yes to nodes that the launcher aborts on or computes wrongly. One
// predicate for the CUDA, HIP and SYCL backends, since their launchers are of one make.

#include "ggml-dflash-limits.h"
#include "ggml-dflash.h"

#include <stdbool.h>
#include <stddef.h>

static bool is_launchable_width(int64_t width) {
    switch (width) {
#define CASE(W) case W:
        GGML_DFLASH_STATE_WIDTHS(CASE)
#undef CASE
        return true;
    default:
        return false;
    }
}

// The launcher divides byte strides by the size of a float and steps through rows by them.
static bool has_f32_rows(const struct ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && ggml_is_contiguous_rows(t) && t->nb[1] % sizeof(float) == 0 &&
           t->nb[2] % sizeof(float) == 0 && t->nb[3] % sizeof(float) == 0;
}

// q, k [S,Hk,T,M]; v [S,H,T,N]; g [1 or S,H,T,N]; beta [1,H,T,N]; state [S,S,H,N]; K snapshots in the first parameter.
// -> [S*H, T*N + K*S*N]
const char * ggml_dflash_check_gated_delta_net(const struct ggml_tensor * op) {
    if (op == NULL || op->op != GGML_OP_GATED_DELTA_NET) {
        return "gated_delta_net: not such a node";
    }
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if ((i < 6) != (op->src[i] != NULL)) {
            return "gated_delta_net: takes six sources";
        }
    }
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2];
    const struct ggml_tensor *g = op->src[3], *beta = op->src[4], *state = op->src[5];
    const int64_t S = v->ne[0], H = v->ne[1], T = v->ne[2], N = v->ne[3];
    if (!is_launchable_width(S)) {
        return "gated_delta_net: state width is not one of 16, 32, 64, 128";
    }
    if (!has_f32_rows(q) || !has_f32_rows(k) || !has_f32_rows(v)) {
        return "gated_delta_net: q, k and v must be f32 with contiguous rows";
    }
    if (!ggml_are_same_shape(q, k) || !ggml_are_same_stride(q, k)) {
        return "gated_delta_net: q and k must have one shape and one layout";
    }
    if (q->ne[0] != S || q->ne[2] != T || H % q->ne[1] != 0 || N % q->ne[3] != 0 || N > 65535) {
        return "gated_delta_net: q does not fit v";
    }
    if (g->type != GGML_TYPE_F32 || beta->type != GGML_TYPE_F32 || state->type != GGML_TYPE_F32 ||
        !ggml_is_contiguous(g) || !ggml_is_contiguous(beta) || !ggml_is_contiguous(state)) {
        return "gated_delta_net: g, beta and state must be f32 and contiguous";
    }
    if (beta->ne[0] != 1 || beta->ne[1] != H || beta->ne[2] != T || beta->ne[3] != N ||
        (g->ne[0] != 1 && g->ne[0] != S) || g->ne[1] != H || g->ne[2] != T || g->ne[3] != N) {
        return "gated_delta_net: g and beta must be [1,H,T,N], g perhaps [S,H,T,N]";
    }
    if (ggml_nelements(state) != S * S * H * N) {
        return "gated_delta_net: state must hold S*S*H*N numbers";
    }
    const int32_t K = op->op_params[0];
    if (K < 1 || op->type != GGML_TYPE_F32 || !ggml_is_contiguous(op) || op->ne[0] != S * H ||
        op->ne[1] != (T + (int64_t) K * S) * N) {
        return "gated_delta_net: the result must have room for the rows and every snapshot";
    }
    for (size_t i = 1; i < GGML_MAX_OP_PARAMS / sizeof(int32_t); i++) {
        if (op->op_params[i] != 0) {
            return "gated_delta_net: a parameter behind the snapshot count has no meaning here";
        }
    }
    return NULL;
}
