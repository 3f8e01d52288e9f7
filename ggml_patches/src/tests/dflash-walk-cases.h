#pragma once

// The walk: nodes of every sub-op over a product of small sizes, each size one off, and each node with one thing
// changed. supports_op must be ggml_dflash_supported, for all four backends; what is accepted runs and gives what the
// CPU gives; what is refused has a reason, and the constructor refuses it with a reason too.

#include "dflash-walk.h"

struct WalkCount {
    int refused = 0, run = 0;
};

// The predicate, all backends and this device must agree about a node. -> whether a kernel of this device takes it
inline bool walk_ask(const ggml_tensor * node) {
    const char * reason = ggml_dflash_check(node);
    const bool named = !reason || contains(reason, ggml_dflash_op_name(ggml_dflash_get_op(node))) ||
                       contains(reason, "unknown sub-op");
    counter().expect(named, "reason \"%s\" does not name the sub-op", reason ? reason : "");
    expect_backends(node, !reason);
    return ggml_dflash_supported(backend().kind, node);
}

// A node of these sizes with a change, made by the constructor from what it is given.
inline void walk_node(ggml_dflash_op op, const Sizes & z, const Change & change, Walk how, WalkCount & count) {
    counter().label = std::string("walk ") + ggml_dflash_op_name(op) + ", " + change.what;
    ggml_context * ctx = metadata_context();
    ggml_tensor * node = construct(ctx, op, make_sources(ctx, op, z), z);
    if (!node) {
        counter().expect(contains(ggml_dflash_last_error(), ggml_dflash_op_name(op)), "refused for \"%s\"",
                         ggml_dflash_last_error());
        count.refused++;
        ggml_free(ctx);
        return;
    }
    change.apply(ctx, node);
    if (change.in_sources) {
        ggml_tensor * again = construct(ctx, op, Sources(node->src, node->src + GGML_MAX_SRC), z);
        counter().expect(again || ggml_dflash_check(node), "the constructor refuses what check takes: %s",
                         ggml_dflash_last_error());
        node = again ? again : node;
    }
    if (!walk_ask(node)) {
        count.refused++;
    } else if (how != Walk::ASKED) {
        walk_run(node, source_names(op), how);
        count.run++;
    }
    ggml_free(ctx);
}

inline const Change & no_change() {
    static const Change none = {"as it is", false, [](ggml_context *, ggml_tensor *) {}};
    return none;
}

// Sizes that a sub-op has, to be moved by one. Rows of quantised types cannot be: those stay.
inline std::vector<int64_t Sizes::*> sizes_of(ggml_dflash_op op) {
    switch (op) {
    case GGML_DFLASH_OP_GDN_VERIFY:
    case GGML_DFLASH_OP_GDN_ADVANCE:
        return {&Sizes::S, &Sizes::Hk, &Sizes::Hv, &Sizes::T, &Sizes::L, &Sizes::N, &Sizes::B};
    case GGML_DFLASH_OP_GDN_COMMIT:
        return {&Sizes::S, &Sizes::Hv, &Sizes::L, &Sizes::N, &Sizes::B};
    case GGML_DFLASH_OP_CONV_VERIFY:
    case GGML_DFLASH_OP_CONV_ADVANCE:
        return {&Sizes::C, &Sizes::T, &Sizes::L, &Sizes::N, &Sizes::B};
    case GGML_DFLASH_OP_CONV_COMMIT:
        return {&Sizes::C, &Sizes::L, &Sizes::N, &Sizes::B};
    case GGML_DFLASH_OP_ATTENTION:
        return {&Sizes::Hq, &Sizes::Hkv, &Sizes::T, &Sizes::L, &Sizes::N, &Sizes::pages, &Sizes::max_pages};
    case GGML_DFLASH_OP_MUL_MAT:
        return {&Sizes::M, &Sizes::T, &Sizes::L};
    case GGML_DFLASH_OP_DYNAMIC_CONV:
        return {&Sizes::C, &Sizes::G, &Sizes::taps, &Sizes::T, &Sizes::L};
    case GGML_DFLASH_OP_SELECT:
        return {&Sizes::V, &Sizes::P, &Sizes::L};
    case GGML_DFLASH_OP_SAMPLE:
        return {&Sizes::V, &Sizes::T, &Sizes::L};
    case GGML_DFLASH_OP_ACCEPT:
        return {&Sizes::T, &Sizes::L, &Sizes::N, &Sizes::positions};
    case GGML_DFLASH_OP_PLACE:
        return {&Sizes::T, &Sizes::L, &Sizes::N, &Sizes::positions, &Sizes::max_pages, &Sizes::ring_pages};
    case GGML_DFLASH_OP_PENALISE:
        return {&Sizes::V, &Sizes::T, &Sizes::L, &Sizes::N, &Sizes::positions, &Sizes::biases};
    }
    return {};
}

// All sizes run. Every `sparse`-th is walked around: sizes one off, and every change; the first of them runs these too.
inline void walk_op(ggml_dflash_op op, const std::vector<Sizes> & table, size_t sparse) {
    WalkCount count;
    for (size_t i = 0; i < table.size(); i++) {
        walk_node(op, table[i], no_change(), Walk::WITH_THREADS, count);
        if (i % sparse != 0) {
            continue;
        }
        const Walk how = i < 3 * sparse ? Walk::PLAIN : Walk::ASKED;
        for (int64_t Sizes::* size : sizes_of(op)) {
            for (int64_t by : {-1, 1}) {
                Sizes z = table[i];
                z.*size += by;
                walk_node(op, z, {"a size one off", false, no_change().apply}, how, count);
            }
        }
        ggml_context * ctx = metadata_context();
        const ggml_tensor * node = construct(ctx, op, make_sources(ctx, op, table[i]), table[i]);
        std::vector<Change> changes = node ? source_changes(node) : std::vector<Change>();
        ggml_free(ctx);
        for (const Change & change : node_changes()) {
            changes.push_back(change);
        }
        for (const Change & change : changes) {
            walk_node(op, table[i], change, how, count);
        }
    }
    counter().label = std::string("walk ") + ggml_dflash_op_name(op);
    const bool has_kernel = op != GGML_DFLASH_OP_MUL_MAT || backend().kind != GGML_DFLASH_BACKEND_SYCL;
    counter().expect(count.refused > 0 && (count.run > 0) == has_kernel, "%d refused, %d run", count.refused,
                     count.run);
    std::printf("  walk %-13s %6d refused, %5d accepted and run\n", ggml_dflash_op_name(op), count.refused, count.run);
}

// The default sizes with each value of each list in turn, all combinations.
class SizeProduct {
  public:
    SizeProduct & by(const std::vector<std::function<void(Sizes &)>> & changes) {
        std::vector<Sizes> next;
        for (const Sizes & z : table_) {
            for (const auto & change : changes) {
                next.push_back(z);
                change(next.back());
            }
        }
        table_ = next;
        return *this;
    }

    template <typename T> SizeProduct & by(T Sizes::* field, const std::vector<T> & values) {
        std::vector<std::function<void(Sizes &)>> changes;
        for (T value : values) {
            changes.push_back([field, value](Sizes & z) { z.*field = value; });
        }
        return by(changes);
    }

    const std::vector<Sizes> & table() const { return table_; }

  private:
    std::vector<Sizes> table_ = std::vector<Sizes>(1);
};

inline void walk_gdn() {
    const auto heads = [](int64_t Hk, int64_t Hv) {
        return [Hk, Hv](Sizes & z) {
            z.Hk = Hk;
            z.Hv = Hv;
        };
    };
    SizeProduct p;
    p.by(&Sizes::S, {16, 32, 64, 128}).by({heads(1, 1), heads(2, 4), heads(1, 3)}).by(&Sizes::T, {1, 3, 4});
    p.by(&Sizes::L, {1, 3}).by(&Sizes::N, {1, 4}).by(&Sizes::B, {4, 16});
    walk_op(GGML_DFLASH_OP_GDN_VERIFY, p.table(), 41);
    walk_op(GGML_DFLASH_OP_GDN_ADVANCE, p.table(), 41);
    SizeProduct commit;
    commit.by(&Sizes::S, {16, 32, 64, 128}).by(&Sizes::Hv, {1, 3}).by(&Sizes::L, {1, 3}).by(&Sizes::B, {1, 16});
    walk_op(GGML_DFLASH_OP_GDN_COMMIT, commit.table(), 7);
}

inline void walk_conv() {
    SizeProduct p;
    p.by(&Sizes::C, {1, 7, 64, 260}).by(&Sizes::T, {1, 3}).by(&Sizes::L, {1, 3}).by(&Sizes::N, {1, 4});
    p.by(&Sizes::B, {3, 16});
    walk_op(GGML_DFLASH_OP_CONV_VERIFY, p.table(), 13);
    walk_op(GGML_DFLASH_OP_CONV_ADVANCE, p.table(), 13);
    walk_op(GGML_DFLASH_OP_CONV_COMMIT, p.table(), 13);
}

inline void walk_attention() {
    const auto heads = [](int64_t Hq, int64_t Hkv) {
        return [Hq, Hkv](Sizes & z) {
            z.Hq = Hq;
            z.Hkv = Hkv;
        };
    };
    std::vector<std::function<void(Sizes &)>> pages;
    for (int64_t D : {16, 32, 64, 128, 256}) {
        for (ggml_type k : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
            for (ggml_type v : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0}) {
                if (D >= 32 || (k != GGML_TYPE_Q8_0 && v != GGML_TYPE_Q8_0)) {
                    pages.push_back([D, k, v](Sizes & z) {
                        z.D = D;
                        z.k_type = k;
                        z.v_type = v;
                    });
                }
            }
        }
    }
    SizeProduct p;
    p.by({heads(6, 2), heads(16, 1), heads(1, 1)}).by(pages).by(&Sizes::window, {0, 5}).by(&Sizes::T, {1, 9});
    walk_op(GGML_DFLASH_OP_ATTENTION, p.table(), 61);
    SizeProduct ratios;
    ratios.by({heads(2, 1), heads(9, 3), heads(4, 1), heads(5, 1), heads(12, 2), heads(7, 1), heads(8, 1)});
    walk_op(GGML_DFLASH_OP_ATTENTION, ratios.table(), 7);
}

inline void walk_mul_mat() {
    SizeProduct p;
    p.by(&Sizes::w_type, {GGML_TYPE_IQ4_XS, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_0});
    p.by(&Sizes::K, {256, 512}).by(&Sizes::M, {1, 9}).by(&Sizes::T, {1, 9}).by(&Sizes::L, {1, 2});
    walk_op(GGML_DFLASH_OP_MUL_MAT, p.table(), 7);
}

inline void walk_draft() {
    const auto groups = [](int64_t C, int64_t G) {
        return [C, G](Sizes & z) {
            z.C = C;
            z.G = G;
        };
    };
    SizeProduct conv;
    conv.by({groups(6, 3), groups(33, 1), groups(64, 64), groups(320, 20)}).by(&Sizes::taps, {1, 2, 8});
    conv.by(&Sizes::T, {1, 3, 16}).by(&Sizes::L, {1, 3});
    walk_op(GGML_DFLASH_OP_DYNAMIC_CONV, conv.table(), 11);

    SizeProduct ks;
    ks.by(&Sizes::top_k, {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}).by(&Sizes::V, {16, 300}).by(&Sizes::P, {1, 3, 15});
    ks.by(&Sizes::edge_sources, {7, 0});
    walk_op(GGML_DFLASH_OP_SELECT, ks.table(), 29);
    const std::vector<ggml_type> types = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0};
    SizeProduct books;
    books.by(&Sizes::before_type, types).by(&Sizes::after_type, types).by(&Sizes::R, {32, 256});
    walk_op(GGML_DFLASH_OP_SELECT, books.table(), 7);
}

// The ops around a run.
inline void walk_tokens() {
    SizeProduct sample;
    sample.by(&Sizes::V, {1, 33, 1100, 5000}).by(&Sizes::T, {1, 16}).by(&Sizes::L, {1, 3});
    walk_op(GGML_DFLASH_OP_SAMPLE, sample.table(), 5);

    SizeProduct accept;
    accept.by(&Sizes::T, {1, 2, 8, 16}).by(&Sizes::L, {1, 3, 64}).by(&Sizes::N, {1, 4, 80});
    accept.by(&Sizes::positions, {1, 100});
    walk_op(GGML_DFLASH_OP_ACCEPT, accept.table(), 13);

    const auto without_ring = [](Sizes & z) {
        z.has_ring = false;
        z.ring_spare = 0;
    };
    SizeProduct place;
    place.by(&Sizes::T, {1, 16, 300}).by(&Sizes::L, {1, 3, 64}).by(&Sizes::N, {1, 80}).by(&Sizes::positions, {1, 400});
    place.by(&Sizes::fill, {-1, 5}).by({[](Sizes &) {}, without_ring});
    walk_op(GGML_DFLASH_OP_PLACE, place.table(), 29);

    SizeProduct penalise;
    penalise.by(&Sizes::V, {1, 33, 5000}).by(&Sizes::T, {1, 16}).by(&Sizes::L, {1, 3}).by(&Sizes::N, {1, 4});
    penalise.by(&Sizes::positions, {1, 400}).by(&Sizes::biases, {1, 300});
    walk_op(GGML_DFLASH_OP_PENALISE, penalise.table(), 17);
}

inline void walk_cases() {
    walk_gdn();
    walk_conv();
    walk_attention();
    walk_mul_mat();
    walk_draft();
    walk_tokens();
}

// Views begin anywhere that an element may: nothing that a predicate sees.
inline void walk_shifted_cases() {
    for (ggml_dflash_op op : ALL_OPS) {
        for (int64_t wide : {0, 1}) {
            Sizes z;
            z.S = z.D = z.R = wide ? 128 : 32;
            ggml_context * ctx = metadata_context();
            const ggml_tensor * node = construct(ctx, op, make_sources(ctx, op, z), z);
            counter().label = std::string("sources of ") + ggml_dflash_op_name(op) + " one element behind alignment";
            counter().expect(node, "refused: %s", ggml_dflash_last_error());
            if (node && ggml_dflash_supported(backend().kind, node)) {
                walk_run(node, source_names(op), Walk::SHIFTED);
            }
            ggml_free(ctx);
        }
    }
}
