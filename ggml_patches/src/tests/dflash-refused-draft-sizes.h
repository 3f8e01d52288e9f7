#pragma once

// The same as dflash-refused-sizes.h for the ops on a draft block and on tokens.

#include "dflash-refused-sizes.h"

inline void refused_by_draft_size() {
    const ggml_dflash_op DC = GGML_DFLASH_OP_DYNAMIC_CONV, SE = GGML_DFLASH_OP_SELECT, SA = GGML_DFLASH_OP_SAMPLE,
                         AC = GGML_DFLASH_OP_ACCEPT, PL = GGML_DFLASH_OP_PLACE, PE = GGML_DFLASH_OP_PENALISE;
    const auto each = each_size;
    // rows of a block
    for (int64_t T : {1, 2, 16}) {
        each({DC, SA, AC, PL, PE}, "", [T](Sizes & z) { z.T = T; });
    }
    each({DC, SA, AC, PE}, "number of rows is 0, must be 1..16", [](Sizes & z) { z.T = 0; });
    each({DC, SA, AC, PE}, "number of rows is 17, must be 1..16", [](Sizes & z) { z.T = 17; });
    each({PL}, "", [](Sizes & z) { z.T = 1 << 20; });
    for (int64_t T : {-1, 0, (1 << 20) + 1}) {
        const std::string reason = "number of rows is " + std::to_string(T) + ", must be 1..1048576";
        each({PL}, reason.c_str(), [T](Sizes & z) { z.T = T; });
    }
    for (int64_t P : {1, 15}) {
        each({SE}, "", [P](Sizes & z) { z.P = P; });
    }
    each({SE}, "number of rows is 0, must be 1..15", [](Sizes & z) { z.P = 0; });
    each({SE}, "number of rows is 16, must be 1..15", [](Sizes & z) { z.P = 16; });
    // dynamic_conv
    each({DC}, "number of channels is 0", [](Sizes & z) { z.C = 0; });
    each({DC}, "number of channels is 1048577", [](Sizes & z) { z.C = (1 << 20) + 1; });
    each({DC}, "", [](Sizes & z) {
        z.C = 1 << 20;
        z.G = 1 << 20;
    });
    each({DC}, "number of groups is 0, must be 1..48", [](Sizes & z) { z.G = 0; });
    each({DC}, "number of groups is 49, must be 1..48", [](Sizes & z) { z.G = 49; });
    for (int64_t G : {1, 48}) {
        each({DC}, "", [G](Sizes & z) { z.G = G; });
    }
    for (int64_t G : {5, 47}) {
        each({DC}, "48 channels are no multiple of", [G](Sizes & z) { z.G = G; });
    }
    for (int64_t taps : {1, 8}) {
        each({DC}, "", [taps](Sizes & z) { z.taps = taps; });
    }
    each({DC}, "number of taps is 0, must be 1..8", [](Sizes & z) { z.taps = 0; });
    each({DC}, "number of taps is 9, must be 1..8", [](Sizes & z) { z.taps = 9; });
    // vocabulary
    each({SA, PE}, "", [](Sizes & z) { z.V = 1; });
    each({SE, SA, PE}, "", [](Sizes & z) { z.V = 1 << 20; });
    each({SE, SA, PE}, "vocabulary is 0, must be 1..1048576", [](Sizes & z) { z.V = 0; });
    each({SE, SA, PE}, "vocabulary is 1048577, must be 1..1048576", [](Sizes & z) { z.V = (1 << 20) + 1; });
    // candidates
    for (int32_t top_k : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}) {
        each({SE}, "", [top_k](Sizes & z) { z.top_k = top_k; });
        each({SE}, "", [top_k](Sizes & z) { z.V = z.top_k = top_k; });
        const std::string few = "top_k " + std::to_string(top_k) + " of a vocabulary of " + std::to_string(top_k - 1);
        each({SE}, top_k == 1 ? "vocabulary is 0" : few.c_str(), [top_k](Sizes & z) {
            z.top_k = top_k;
            z.V = top_k - 1;
        });
    }
    for (int32_t top_k : {0, 9, 10, 11, 13, 14, 15, 17, 32, -1, INT32_MAX, INT32_MIN}) {
        const std::string reason = "top_k " + std::to_string(top_k) + " is not one of 1..8, 12, 16";
        each({SE}, reason.c_str(), [top_k](Sizes & z) { z.top_k = top_k; });
    }
    // edge scores: all three sources or none
    for (int given = 0; given < 8; given++) {
        const int n = (given & 1) + (given >> 1 & 1) + (given >> 2);
        const std::string reason = "go together, " + std::to_string(n) + " of 3 are there";
        each({SE}, n % 3 == 0 ? "" : reason.c_str(), [given](Sizes & z) { z.edge_sources = given; });
    }
    for (int64_t R : {1, 31, 1023, 1024}) {
        each({SE}, "", [R](Sizes & z) {
            z.R = R;
            z.after_type = GGML_TYPE_BF16;
        });
    }
    each({SE}, "rank is 0, must be 1..1024", [](Sizes & z) { z.R = 0; });
    each({SE}, "rank is 1056, must be 1..1024", [](Sizes & z) { z.R = 1056; });
    for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0}) {
        each({SE}, "", [type](Sizes & z) { z.before_type = type; });
        each({SE}, "", [type](Sizes & z) { z.after_type = type; });
    }
    for (ggml_type type :
         {GGML_TYPE_Q4_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL, GGML_TYPE_I8, GGML_TYPE_I32, GGML_TYPE_F64}) {
        each({SE}, "predecessor is", [type](Sizes & z) { z.before_type = type; });
        each({SE}, "successor is", [type](Sizes & z) { z.after_type = type; });
    }
    // what a slot remembers
    for (int64_t positions : {1, 1 << 24}) {
        each({AC, PL, PE}, "", [positions](Sizes & z) { z.positions = positions; });
    }
    each({AC, PL, PE}, "positions of history is 0, must be 1..16777216", [](Sizes & z) { z.positions = 0; });
    each({AC, PL, PE}, "positions of history is 16777217", [](Sizes & z) { z.positions = (1 << 24) + 1; });
    for (int64_t biases : {1, 4096}) {
        each({PE}, "", [biases](Sizes & z) { z.biases = biases; });
    }
    each({PE}, "number of biases is 0, must be 1..4096", [](Sizes & z) { z.biases = 0; });
    each({PE}, "number of biases is 4097, must be 1..4096", [](Sizes & z) { z.biases = 4097; });
    // place: pages, and what stands where there are none
    each({PL}, "pages per slot is 0", [](Sizes & z) { z.max_pages = 0; });
    each({PL}, "ring pages per slot is 0", [](Sizes & z) { z.ring_pages = 0; });
    each({PL}, "", [](Sizes & z) {
        z.has_ring = false;
        z.ring_spare = 0;
    });
    each({PL}, "ring_spare is 48, must be 0..0", [](Sizes & z) { z.has_ring = false; });
    for (int32_t fill : {-1, 0, (1 << 20) - 1}) {
        each({PL}, "", [fill](Sizes & z) { z.fill = fill; });
    }
    each({PL}, "fill is -2, must be -1..1048575", [](Sizes & z) { z.fill = -2; });
    each({PL}, "fill is 1048576, must be -1..1048575", [](Sizes & z) { z.fill = 1 << 20; });
    for (int32_t spare : {0, INT32_MAX - 15}) {
        each({PL}, "", [spare](Sizes & z) { z.spare = z.ring_spare = spare; });
    }
    for (int32_t spare : {-1, INT32_MIN, INT32_MAX - 14, INT32_MAX}) {
        const std::string reason = "spare is " + std::to_string(spare) + ", must be 0..2147483632";
        each({PL}, reason.c_str(), [spare](Sizes & z) { z.spare = spare; });
        each({PL}, ("ring_" + reason).c_str(), [spare](Sizes & z) { z.ring_spare = spare; });
    }
}
