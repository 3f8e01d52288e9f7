#pragma once

// Sizes that the predicate takes, literally, and what lies beside them.

#include "dflash-refused-nodes.h"

inline Sizes sizes(const std::function<void(Sizes &)> & change) {
    Sizes z;
    change(z);
    return z;
}

inline void each_size(const std::vector<ggml_dflash_op> & ops, const char * wanted,
                      const std::function<void(Sizes &)> & change) {
    for (ggml_dflash_op op : ops) {
        expect_sizes(op, sizes(change), wanted);
    }
}

inline void refused_by_size() {
    const ggml_dflash_op GV = GGML_DFLASH_OP_GDN_VERIFY, GA = GGML_DFLASH_OP_GDN_ADVANCE,
                         GC = GGML_DFLASH_OP_GDN_COMMIT;
    const ggml_dflash_op CV = GGML_DFLASH_OP_CONV_VERIFY, CA = GGML_DFLASH_OP_CONV_ADVANCE,
                         CC = GGML_DFLASH_OP_CONV_COMMIT;
    const ggml_dflash_op AT = GGML_DFLASH_OP_ATTENTION;
    const auto each = each_size;
    for (ggml_dflash_op op : ALL_OPS) {
        expect_sizes(op, Sizes(), "");
    }
    // the accepted sets, literally, and what lies beside them
    for (int64_t S : {16, 32, 64, 128}) {
        each({GV, GA, GC}, "", [S](Sizes & z) { z.S = S; });
    }
    for (int64_t S : {0, 1, 15, 17, 48, 96, 127, 129, 256}) {
        each({GV, GA, GC}, "state width", [S](Sizes & z) { z.S = S; });
    }
    for (int64_t D : {16, 32, 64, 128, 256}) {
        each({AT}, "", [D](Sizes & z) {
            z.D = D;
            z.v_type = GGML_TYPE_F32;
        });
    }
    for (int64_t D : {8, 48, 80, 112, 255, 512}) {
        each({AT}, "head width", [D](Sizes & z) {
            z.D = D;
            z.v_type = GGML_TYPE_F32;
        });
    }
    for (int64_t gqa : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
        each({AT}, "", [gqa](Sizes & z) { z.Hq = gqa * z.Hkv; });
    }
    for (int64_t gqa : {9, 10, 15, 17, 32}) {
        each({AT}, "query heads per kv head", [gqa](Sizes & z) { z.Hq = gqa * z.Hkv; });
    }
    each({AT}, "not a multiple", [](Sizes & z) { z.Hq = 7; });
    each({AT}, "query heads", [](Sizes & z) { z.Hq = 0; });
    each({AT}, "kv heads", [](Sizes & z) { z.Hkv = 0; });
    for (int64_t Hv : {2, 4, 6}) {
        each({GV, GA}, "", [Hv](Sizes & z) { z.Hv = Hv; });
    }
    for (int64_t Hv : {1, 3, 5}) {
        each({GV, GA}, "not a multiple of 2 key heads", [Hv](Sizes & z) { z.Hv = Hv; });
    }
    each({GV, GA}, "key heads", [](Sizes & z) { z.Hk = 0; });
    each({GV, GA, GC}, "value heads", [](Sizes & z) { z.Hv = 0; });
    each({GV, GA, GC}, "value heads", [](Sizes & z) { z.Hv = 1026; });
    // blocks: T <= B <= 16 where rows may be rejected, any T where not
    each({GV, CV}, "", [](Sizes & z) {
        z.T = 16;
        z.B = 16;
    });
    each({GV, CV}, "number of rows is 9, must be 1..8", [](Sizes & z) { z.T = 9; });
    each({GV, CV}, "number of rows is 17, must be 1..16", [](Sizes & z) {
        z.T = 17;
        z.B = 16;
    });
    each({GV, CV, GA, CA, AT}, "number of rows", [](Sizes & z) { z.T = 0; });
    each({GA, CA, AT}, "", [](Sizes & z) { z.T = 1000; });
    each({GA, CA, AT}, "number of rows", [](Sizes & z) { z.T = (1 << 20) + 1; });
    each({GV, GA, GC}, "block capacity of log is 17", [](Sizes & z) {
        z.T = 1;
        z.B = 17;
    });
    each({GV, GA, GC}, "block capacity of log is 0", [](Sizes & z) {
        z.T = 1;
        z.B = 0;
    });
    each({CV, CA, CC}, "kept rows is 20", [](Sizes & z) {
        z.T = 1;
        z.B = 17;
    });
    each({CV, CA, CC}, "kept rows is 3", [](Sizes & z) {
        z.T = 1;
        z.B = 0;
    });
    // lanes, slots, channels, pages
    for (ggml_dflash_op op : ALL_OPS) {
        each({op}, "", [](Sizes & z) { z.L = 64; });
        each({op}, "number of lanes is 65", [](Sizes & z) { z.L = 65; });
        each({op}, "number of lanes is 0", [](Sizes & z) { z.L = 0; });
        if (has_slots(op)) {
            each({op}, "number of slots is 0", [](Sizes & z) { z.N = 0; });
            each({op}, "number of slots is 4097", [](Sizes & z) { z.N = 4097; });
        }
    }
    each({CV, CA, CC}, "number of channels is 0", [](Sizes & z) { z.C = 0; });
    each({CV, CA, CC}, "", [](Sizes & z) { z.C = 10240; });
    each({AT}, "number of pages is 0", [](Sizes & z) { z.pages = 0; });
    each({AT}, "pages per slot is 0", [](Sizes & z) { z.max_pages = 0; });
    // page types
    for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
        each({AT}, "", [type](Sizes & z) { z.k_type = type; });
        each({AT}, "", [type](Sizes & z) { z.v_type = type; });
    }
    for (ggml_type type : {GGML_TYPE_BF16, GGML_TYPE_Q4_0, GGML_TYPE_Q5_1, GGML_TYPE_I8, GGML_TYPE_I32}) {
        each({AT}, "k_pages is", [type](Sizes & z) { z.k_type = type; });
        each({AT}, "v_pages is", [type](Sizes & z) { z.v_type = type; });
    }
    // weights
    const ggml_dflash_op MM = GGML_DFLASH_OP_MUL_MAT;
    for (ggml_type type : {GGML_TYPE_IQ4_XS, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0}) {
        each({MM}, "", [type](Sizes & z) { z.w_type = type; });
    }
    for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_0,
                           GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ3_S, GGML_TYPE_I8}) {
        each({MM}, "w is", [type](Sizes & z) { z.w_type = type; });
    }
    each({MM}, "", [](Sizes & z) { z.K = 256; });
    each({MM}, "weights per row is 0", [](Sizes & z) { z.K = 0; });
    each({MM}, "weights per row is 1048832", [](Sizes & z) { z.K = (1 << 20) + 256; });
    for (int64_t K : {288, 480, 544}) {
        each({MM}, "not a multiple of 256", [K](Sizes & z) {
            z.w_type = GGML_TYPE_Q8_0;
            z.K = K;
        });
    }
    each({MM}, "", [](Sizes & z) { z.M = 1; });
    each({MM}, "number of weight rows is 0", [](Sizes & z) { z.M = 0; });
    each({MM}, "number of weight rows is 16777217", [](Sizes & z) { z.M = (1 << 24) + 1; });
    each({MM}, "", [](Sizes & z) { z.T = 1000; });
    each({MM}, "number of rows is 0", [](Sizes & z) { z.T = 0; });
    each({MM}, "number of rows is 1048577", [](Sizes & z) { z.T = (1 << 20) + 1; });
    // parameters of attention
    each({AT}, "", [](Sizes & z) { z.window = INT32_MAX; });
    each({AT}, "window is -1", [](Sizes & z) { z.window = -1; });
    each({AT}, "scale must be finite", [](Sizes & z) { z.scale = INFINITY; });
    each({AT}, "scale must be finite", [](Sizes & z) { z.scale = NAN; });
}
