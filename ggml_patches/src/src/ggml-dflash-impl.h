#pragma once

// Shared by the constructors (ggml-dflash.c), the table of sub-ops and the predicate (ggml-dflash-check*.c); nobody
// else includes this.

#include "ggml-dflash.h"

#if defined(_MSC_VER)
#define DFLASH_THREAD_LOCAL __declspec(thread)
#else
#define DFLASH_THREAD_LOCAL _Thread_local
#endif

#define DFLASH_TEXT_SIZE 256

struct dflash_sub_op {
    const char * name;
    int n_src;
    int like;                       // the result has the shape of this source, unless dflash_result_shape says more
    bool is_view;                   // ... and is a view of it
    unsigned writes;                // bit i: source i is written
    const char * src[GGML_MAX_SRC]; // names of the sources, for messages
    unsigned optional;              // bit i: source i may be NULL
    enum ggml_type type;            // of the result
};

// index of a source in gdn_verify and gdn_advance
enum { GDN_Q, GDN_K, GDN_V, GDN_G, GDN_BETA, GDN_STATE, GDN_LOG, GDN_SLOTS, GDN_PENDING, GDN_ROWS };

enum { SELECT_LOGITS, SELECT_ANCHORS, SELECT_BASE, SELECT_SAMPLING, SELECT_GATE, SELECT_BEFORE, SELECT_AFTER };
enum { PLACE_SLOTS, PLACE_ROWS, PLACE_BASE, PLACE_HISTORY, PLACE_TABLE, PLACE_RING };

// NULL for an id outside enum ggml_dflash_op
const struct dflash_sub_op * dflash_find_sub_op(int32_t id);

// Shape of the result of a node whose sources are set.
void dflash_result_shape(const struct ggml_tensor * op, const struct dflash_sub_op * sub, int64_t * ne);
