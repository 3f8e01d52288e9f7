#pragma once

// GGML_OP_DFLASH: the ops that a hybrid (gated delta net + attention) target and its block draft need and that ggml
// does not have. One ggml op, the sub-op is op_params[0]. The catalogue with every rule is ggml_patches/README.md.
//
// Common rules
//   * Shapes are in ggml order, fastest dimension first. F32 unless said otherwise.
//   * L lanes of T rows each; N slots of persistent memory. slots I32[L] names the slot of a lane. A lane is padded
//   when
//     its slot is outside 0..N-1 (-1 by convention), when an earlier lane names the same slot (ops that write only), or
//     when one of its counts is out of range: nothing is read or written for it, its output rows are zeros.
//   * B is the block capacity of a slot's log. n_pending I32[N], indexed by slot, says how many leading log rows were
//     accepted and are not in the stored state yet: 0..B.
//   * base I32[N], indexed by slot: the position of the slot's anchor, its last token, which no run has computed yet.
//     history I32[C,N]: the token at every position up to it.
//   * A row's numbers depend on that row's lane only: not on T, L, the order of lanes, or the number of threads.
//
// Order of effects
//   Ops that write persistent memory do it to their own sources (state, log, rows). ggml runs nodes in graph order, so
//   add them with ggml_build_forward_expand in the order in which the effects must happen. The commit ops return a view
//   of the memory that they changed: pass that view on as state (or rows) to make a later node depend on the commit.
//
// Errors
//   A constructor that is given something it cannot run returns NULL and changes nothing; ggml_dflash_last_error() then
//   says why. No constructor aborts. ggml_dflash_check() is the predicate behind both the constructors and supports_op.

#include "ggml.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

// op_params[0]. Zero is no sub-op, so that a node without parameters is refused.
enum ggml_dflash_op {
    GGML_DFLASH_OP_GDN_VERIFY = 1,
    GGML_DFLASH_OP_GDN_ADVANCE = 2,
    GGML_DFLASH_OP_GDN_COMMIT = 3,
    GGML_DFLASH_OP_CONV_VERIFY = 4,
    GGML_DFLASH_OP_CONV_ADVANCE = 5,
    GGML_DFLASH_OP_CONV_COMMIT = 6,
    GGML_DFLASH_OP_ATTENTION = 7,
    GGML_DFLASH_OP_MUL_MAT = 8,
    GGML_DFLASH_OP_DYNAMIC_CONV = 9,
    GGML_DFLASH_OP_SELECT = 10,
    GGML_DFLASH_OP_SAMPLE = 11,
    GGML_DFLASH_OP_ACCEPT = 12,
    GGML_DFLASH_OP_PLACE = 13,
    GGML_DFLASH_OP_PENALISE = 14,
};

// How a lane draws its tokens: a column of sampling I32[GGML_DFLASH_SAMPLING_WORDS,L]. The rules and the noise, bit for
// bit, are in ggml_patches/README.md.
enum ggml_dflash_sampling {
    GGML_DFLASH_SAMPLING_SEED_LOW = 0, // 64-bit seed
    GGML_DFLASH_SAMPLING_SEED_HIGH = 1,
    GGML_DFLASH_SAMPLING_TEMPERATURE = 2, // F32 bits; 0 or less, or NaN: greedy, and nothing else of the column counts
    GGML_DFLASH_SAMPLING_TOP_K = 3,       // 0 or less: off
    GGML_DFLASH_SAMPLING_TOP_P_LOW = 4,   // F64 bits; 1 or more, or NaN: off
    GGML_DFLASH_SAMPLING_TOP_P_HIGH = 5,
    GGML_DFLASH_SAMPLING_LOG_MIN_P = 6, // F32 bits of log(min_p); -infinity or NaN: off
    GGML_DFLASH_SAMPLING_RESERVED = 7,  // 0
    GGML_DFLASH_SAMPLING_WORDS = 8,
};

// Gated delta rule on a block that may still be rejected.
//   q, k [S,Hk,T,L]; v [S,Hv,T,L]; g (log decay), beta [Hv,T,L]: any strides with contiguous rows
//   state [S,S,Hv,N] memory [value j][key i], i fastest; log [2S+1,Hv,B,N]; T <= B; value head h reads key head h mod
//   Hk
// Per live lane: state <- replay of log rows 0..n_pending-1; then the T rows run from there without touching state, and
// log row t <- (exp(g) | k | delta). -> [S,Hv,T,L]
GGML_API struct ggml_tensor * ggml_dflash_gdn_verify(struct ggml_context * ctx, struct ggml_tensor * q,
                                                     struct ggml_tensor * k, struct ggml_tensor * v,
                                                     struct ggml_tensor * g, struct ggml_tensor * beta,
                                                     struct ggml_tensor * state, struct ggml_tensor * log,
                                                     struct ggml_tensor * slots, struct ggml_tensor * n_pending);

// The same recurrence on rows that are final: replay, then run the n_rows[lane] leading rows (0..T) and keep the state.
// The log is read, not written; the caller sets n_pending of these slots to 0 afterwards. T is not bounded by B.
// Rows from n_rows on give zeros. -> [S,Hv,T,L]
GGML_API struct ggml_tensor * ggml_dflash_gdn_advance(struct ggml_context * ctx, struct ggml_tensor * q,
                                                      struct ggml_tensor * k, struct ggml_tensor * v,
                                                      struct ggml_tensor * g, struct ggml_tensor * beta,
                                                      struct ggml_tensor * state, struct ggml_tensor * log,
                                                      struct ggml_tensor * slots, struct ggml_tensor * n_pending,
                                                      struct ggml_tensor * n_rows);

// The replay alone. -> view of state
GGML_API struct ggml_tensor * ggml_dflash_gdn_commit(struct ggml_context * ctx, struct ggml_tensor * state,
                                                     struct ggml_tensor * log, struct ggml_tensor * slots,
                                                     struct ggml_tensor * n_pending);

// Causal depthwise convolution + SiLU on a block that may still be rejected.
//   x [C,T,L] any strides with contiguous rows; w [K,C], K = 4, tap K-1 meets the row itself; rows [C,K-1+B,N]; T <= B
// Per live lane: window = rows[n_pending .. n_pending+K-2]; in = window ++ x; y[t] = silu(sum_j w[j]*in[t+j]);
// afterwards rows[0 .. K-2+T] = in. -> [C,T,L]
GGML_API struct ggml_tensor * ggml_dflash_conv_verify(struct ggml_context * ctx, struct ggml_tensor * x,
                                                      struct ggml_tensor * w, struct ggml_tensor * rows,
                                                      struct ggml_tensor * slots, struct ggml_tensor * n_pending);

// The same on rows that are final: afterwards rows[0 .. K-2] = the last K-1 of (window ++ x[0 .. n_rows-1]). The caller
// sets n_pending of these slots to 0. T is not bounded by B. Rows from n_rows on give zeros. -> [C,T,L]
GGML_API struct ggml_tensor * ggml_dflash_conv_advance(struct ggml_context * ctx, struct ggml_tensor * x,
                                                       struct ggml_tensor * w, struct ggml_tensor * rows,
                                                       struct ggml_tensor * slots, struct ggml_tensor * n_pending,
                                                       struct ggml_tensor * n_rows);

// rows[0 .. K-2] <- rows[n_pending .. n_pending+K-2]. -> view of rows
GGML_API struct ggml_tensor * ggml_dflash_conv_commit(struct ggml_context * ctx, struct ggml_tensor * rows,
                                                      struct ggml_tensor * slots, struct ggml_tensor * n_pending);

// Attention over paged keys and values.
//   q [D,Hq,T,L] any strides with contiguous rows; k_pages, v_pages [D,Hkv,16*P] F32, F16 or Q8_0 (each its own type),
//   rows of D contiguous; table I32[max_pages,N]: position j of slot s is physical row table[j/16,s]*16 + j%16
//   base I32[L]: position of row 0; n_rows I32[L]: live rows, 0..T
// Row t at p = base+t sees j with: causal: j <= p, otherwise j < base+n_rows; and p-j < window when window > 0 (later
// rows of the block stay visible when not causal). Rows from n_rows on, rows whose visible pages are not all in the
// table or not all in 0..P-1, and rows that see nothing give zeros. Query head h reads kv head h / (Hq/Hkv). ->
// [D,Hq,T,L]
GGML_API struct ggml_tensor * ggml_dflash_attention(struct ggml_context * ctx, struct ggml_tensor * q,
                                                    struct ggml_tensor * k_pages, struct ggml_tensor * v_pages,
                                                    struct ggml_tensor * table, struct ggml_tensor * slots,
                                                    struct ggml_tensor * base, struct ggml_tensor * n_rows, float scale,
                                                    int32_t window, bool causal);

// Quantised weights times columns, y[i,t,l] = sum_k w[k,i] x[k,t,l].
//   w [K,M] IQ4_XS, Q4_K, Q5_K, Q6_K or Q8_0, K a multiple of 256, rows contiguous, any row stride; x [K,T,L]
//   contiguous
// A column's numbers depend on w and that column only: not on T, L, its place, or the number of threads. Activations
// are rounded to 12 bits (16 for Q8_0) of the largest of each 256, weights not at all; a column with an infinity or a
// NaN gives NaN. -> [M,T,L]
GGML_API struct ggml_tensor * ggml_dflash_mul_mat(struct ggml_context * ctx, struct ggml_tensor * w,
                                                  struct ggml_tensor * x);

// Grouped dynamic convolution of a draft block. x [E,T,L], coef [G,K,T,L], base [E,K]: any strides with contiguous
// rows; E a multiple of G. Channel e is in group e / (E/G); rows before the block are zero:
//   y[e,t] = sum_{tap=0..min(K-1,t)} (base[e,tap] + coef[e/(E/G),tap,t]) * x[e,t-tap]     in order of tap, by fma
// -> [E,T,L]
GGML_API struct ggml_tensor * ggml_dflash_dynamic_conv(struct ggml_context * ctx, struct ggml_tensor * x,
                                                       struct ggml_tensor * coef, struct ggml_tensor * base);

// A draft's block: the anchor and P proposals. logits [V,P,L] of the P rows behind the anchor; anchors I32[L] (not in
// 0..V-1: a dead lane, all 0, which a target can embed); base I32[L]: position of the anchor; sampling I32[8,L]; gate
// [R,P,L], predecessor and successor [R,V] F32, F16, BF16 or Q8_0 (each its own type), rows contiguous, or all three
// NULL: no edge scores. Candidates of row p: its top_k logits, falling, equal ones by rising id (NaN counts as
// -infinity). Walk, a_0 = anchor:
//   score(b) = sum_r predecessor[r,a_p] gate[r,p] successor[r,b] + logit[b,p]
//   a_{p+1}  = argmax over candidates b of row p of score(b), or with a temperature T of
//              score(b) / T + G(seed, base + p + 1, b);  the first candidate wins ties, NaN never wins
// logits and gate contiguous. -> I32 [P+1,L]: a_0 .. a_P
GGML_API struct ggml_tensor * ggml_dflash_select(struct ggml_context * ctx, struct ggml_tensor * logits,
                                                 struct ggml_tensor * anchors, struct ggml_tensor * base,
                                                 struct ggml_tensor * sampling, struct ggml_tensor * gate,
                                                 struct ggml_tensor * predecessor, struct ggml_tensor * successor,
                                                 int32_t top_k);

// The target's tokens. logits [V,T,L] contiguous; base I32[L]: position of row 0's input, so that row t's token stands
// at base+t+1; n_rows I32[L]: live rows; sampling I32[8,L]. Greedy: the largest logit, the lowest id of equals. Else
// the largest logit / T + G(seed, base + t + 1, id) of the ids that top-k, then top-p, then min-p leave; the lowest id
// of equals. -1 for rows from n_rows on, all rows of a lane whose n_rows is outside 0..T or whose base is negative, and
// rows whose largest logit is not finite or that hold a NaN. -> I32 [T,L]
GGML_API struct ggml_tensor * ggml_dflash_sample(struct ggml_context * ctx, struct ggml_tensor * logits,
                                                 struct ggml_tensor * base, struct ggml_tensor * n_rows,
                                                 struct ggml_tensor * sampling);

// What of a verified block counts. tokens I32[T,L] as sample gives them; block I32[T,L] as select gives it: the anchor,
// which is not read, and T-1 proposals; n_rows I32[L]: live rows of the block, anchor included; slots I32[L];
// n_pending, base I32[N]; history I32[C,N]. Live lanes: their slot is theirs alone, n_rows in 0..T, base[slot] >= 0.
// Per live lane: n = the rows whose token is final: row 0, and row t while tokens[i] = block[i+1] for all i < t; a row
// whose token is -1 ends them. n_pending[slot] <- n; history[base+1+i,slot] <- tokens[i] for i < n where base+1+i < C;
// base[slot] <- base[slot] + n.
// -> I32 [T+1,L]: n, tokens[0 .. n-1], then -1. Padded lanes: 0, then -1.
GGML_API struct ggml_tensor * ggml_dflash_accept(struct ggml_context * ctx, struct ggml_tensor * tokens,
                                                 struct ggml_tensor * block, struct ggml_tensor * n_rows,
                                                 struct ggml_tensor * slots, struct ggml_tensor * n_pending,
                                                 struct ggml_tensor * base, struct ggml_tensor * history);

// Where the rows of a run stand, T = rows of a lane. slots, n_rows I32[L]; base I32[N], history I32[C,N]; table
// I32[M,N] as attention's; ring I32[R,N] the same of another memory, or NULL. fill: token of the rows behind the
// anchor, or -1: theirs come from history. spare, ring_spare: first row of a page that takes the rows nobody reads (0
// without a ring). Live lanes: their slot is theirs alone, n_rows in 0..T, base[slot] >= 0. A row t of a live lane is
// live if t < n_rows and p = base+t has a place: p < C, p/16 < M, and p/16 < R with a ring.
//   live row: token max(history[p,slot], 0), or fill if fill >= 0 and t > 0; position p;
//             row table[p/16,slot]*16 + p%16, ring row likewise
//   dead row: token 0, position 0, row spare + t%16, ring row ring_spare + t%16
// -> I32 [L*(4T+1)], [L*(3T+1)] without a ring: tokens, positions, rows, ring rows [T,L] each, then the lanes' base
// [L], -1 for lanes that are not live
GGML_API struct ggml_tensor * ggml_dflash_place(struct ggml_context * ctx, struct ggml_tensor * slots,
                                                struct ggml_tensor * n_rows, struct ggml_tensor * base,
                                                struct ggml_tensor * history, struct ggml_tensor * table,
                                                struct ggml_tensor * ring, int32_t rows, int32_t fill, int32_t spare,
                                                int32_t ring_spare);

// Biases, then penalties, in the logits themselves. logits [V,T,L] contiguous; block I32[T,L] as select gives it; base,
// n_rows I32[L] as sample's; slots I32[L]; history I32[C,N]; penalties [2,N]: repetition r, presence p; bias
// I32[2,NB,N]: pairs of a token id and the bits of an F32, up to the first id below 0, no id twice. Live lanes: slot in
// 0..N-1, n_rows in 0..T, base >= 0. Per row t < n_rows of a live lane, every operation rounded:
//   x[id] <- x[id] + b                                    for every pair with id < V, then, unless r = 1 and p = 0,
//   x[v]  <- (x[v] > 0 ? x[v] / r : x[v] * r) - p         once for every token v in 0..V-1 of
//                                                         history[0 .. min(base, C-1), slot] and block[1 .. t, lane]
// Nothing else of the logits is read or written. -> view of logits
GGML_API struct ggml_tensor * ggml_dflash_penalise(struct ggml_context * ctx, struct ggml_tensor * logits,
                                                   struct ggml_tensor * block, struct ggml_tensor * base,
                                                   struct ggml_tensor * n_rows, struct ggml_tensor * slots,
                                                   struct ggml_tensor * history, struct ggml_tensor * penalties,
                                                   struct ggml_tensor * bias);

// NULL when a kernel can run the node, otherwise the reason, naming sub-op, source and limit. Valid until the next call
// in the same thread. Checks the sub-op, every parameter, and type, shape and strides of every source and of the
// result.
GGML_API const char * ggml_dflash_check(const struct ggml_tensor * op);

// A backend whose supports_op for GGML_OP_DFLASH is ggml_dflash_supported: a node that passes ggml_dflash_check and
// whose sub-op the backend has a kernel for. It asks no device, so the table of all backends can be made anywhere.
enum ggml_dflash_backend {
    GGML_DFLASH_BACKEND_CPU = 0,
    GGML_DFLASH_BACKEND_CUDA = 1,
    GGML_DFLASH_BACKEND_HIP = 2,
    GGML_DFLASH_BACKEND_SYCL = 3,
};

GGML_API bool ggml_dflash_supported(enum ggml_dflash_backend backend, const struct ggml_tensor * op);

// The same for upstream's GGML_OP_GATED_DELTA_NET: what the CUDA, HIP and SYCL launchers of the pinned tree really run.
GGML_API const char * ggml_dflash_check_gated_delta_net(const struct ggml_tensor * op);

// Why the last constructor call in this thread returned NULL; "" if it did not. Never NULL.
GGML_API const char * ggml_dflash_last_error(void);

// "gdn_verify", ...; "unknown" for a value outside the enum.
GGML_API const char * ggml_dflash_op_name(enum ggml_dflash_op op);

// The sub-op of a GGML_OP_DFLASH node.
GGML_API enum ggml_dflash_op ggml_dflash_get_op(const struct ggml_tensor * op);

#ifdef __cplusplus
}
#endif
