#pragma once

// Every limit of GGML_OP_DFLASH, once: ggml_dflash_check (constructors, supports_op) and the launchers of all backends
// read the same lists, so that no node is accepted that a launcher has no case for.

// GDN state widths S, as an X-macro so that launchers can expand it into their switch.
#define GGML_DFLASH_STATE_WIDTHS(X) X(16) X(32) X(64) X(128)
#define GGML_DFLASH_MAX_STATE_WIDTH 128

// Attention head widths D.
#define GGML_DFLASH_HEAD_DIMS(X) X(16) X(32) X(64) X(128) X(256)
#define GGML_DFLASH_MAX_HEAD_DIM 256

// Query heads per kv head.
#define GGML_DFLASH_GQA_RATIOS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(16)

// Rows of a block that may be rejected, and block capacity of a log (B): 1..16.
#define GGML_DFLASH_MAX_BLOCK 16

// Rows of a lane in an op without rollback (advance, attention, place): 1..2^20.
#define GGML_DFLASH_MAX_ROWS (1 << 20)

// Lanes L of one node: 1..64.
#define GGML_DFLASH_MAX_LANES 64

// Slots, heads, channels, pages: indices are 32 bit, and so is any product of two that a kernel forms as an index.
#define GGML_DFLASH_MAX_SLOTS 4096
#define GGML_DFLASH_MAX_HEADS 1024
#define GGML_DFLASH_MAX_CHANNELS (1 << 20)
#define GGML_DFLASH_MAX_PAGES (1 << 24)

// Taps of the causal convolution.
#define GGML_DFLASH_CONV_TAPS 4

// Weight types of mul_mat; their rows are whole super-blocks, Q8_0 included.
#define GGML_DFLASH_WEIGHT_TYPES(X)                                                                                    \
    X(GGML_TYPE_IQ4_XS) X(GGML_TYPE_Q4_K) X(GGML_TYPE_Q5_K) X(GGML_TYPE_Q6_K) X(GGML_TYPE_Q8_0)
#define GGML_DFLASH_SUPER_BLOCK 256

// Weights of a row, weight rows.
#define GGML_DFLASH_MAX_ROW_WEIGHTS (1 << 20)
#define GGML_DFLASH_MAX_WEIGHT_ROWS (1 << 24)

// Positions per page.
#define GGML_DFLASH_PAGE_ROWS 16

// Taps of the draft's dynamic convolution, its groups.
#define GGML_DFLASH_MAX_DYNAMIC_TAPS 8

// Candidates a row of select keeps.
#define GGML_DFLASH_TOP_KS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(12) X(16)
#define GGML_DFLASH_MAX_TOP_K 16

// Positions of a slot's history; biases of a slot.
#define GGML_DFLASH_MAX_POSITIONS (1 << 24)
#define GGML_DFLASH_MAX_BIASES 4096

// Codebook types of select and the rank of its edge scores; vocabulary of select, sample and penalise.
#define GGML_DFLASH_CODEBOOK_TYPES(X) X(GGML_TYPE_F32) X(GGML_TYPE_F16) X(GGML_TYPE_BF16) X(GGML_TYPE_Q8_0)
#define GGML_DFLASH_MAX_RANK 1024
#define GGML_DFLASH_MAX_VOCABULARY (1 << 20)
