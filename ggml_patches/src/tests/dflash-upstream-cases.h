#pragma once

// Upstream's GATED_DELTA_NET, whose supports_op on CUDA, HIP and SYCL we narrow to what the launcher really runs: nodes
// around everything the launcher assumes. Accepted: runs and gives what ggml's CPU kernel gives. Refused: never
// launched. Upstream's constructor aborts on some of these, so nodes are filled in by hand.

#include "dflash-walk.h"

struct UpstreamShape {
    int64_t S, Hk, H, T, N, K;
    bool gate_per_row;
};

inline ggml_tensor * upstream_node(ggml_context * ctx, const UpstreamShape & s) {
    const int64_t ne[] = {s.S * s.H, s.T * s.N + s.K * s.S * s.N};
    ggml_tensor * node = ggml_new_tensor(ctx, GGML_TYPE_F32, 2, ne);
    node->op = GGML_OP_GATED_DELTA_NET;
    node->op_params[0] = (int32_t) s.K;
    node->src[0] = f32(ctx, {s.S, s.Hk, s.T, s.N});
    node->src[1] = f32(ctx, {s.S, s.Hk, s.T, s.N});
    node->src[2] = f32(ctx, {s.S, s.H, s.T, s.N});
    node->src[3] = f32(ctx, {s.gate_per_row ? s.S : 1, s.H, s.T, s.N});
    node->src[4] = f32(ctx, {1, s.H, s.T, s.N});
    node->src[5] = f32(ctx, {s.S, s.S, s.H, s.N});
    return node;
}

// The answer of this device, which has to be the guard's where the guard is in its supports_op.
inline bool upstream_ask(const ggml_tensor * node, const std::string & what) {
    const bool accepted = ggml_dflash_check_gated_delta_net(node) == nullptr;
    if (!backend().is_cpu()) {
        counter().expect(ggml_backend_dev_supports_op(backend().device, node) == accepted,
                         "%s: supports_op says %s, the guard says %s", what.c_str(), accepted ? "no" : "yes",
                         accepted ? "yes" : ggml_dflash_check_gated_delta_net(node));
    }
    return accepted;
}

inline const std::vector<const char *> & upstream_names() {
    static const std::vector<const char *> names = {"q", "k", "v", "g", "beta", "state"};
    return names;
}

struct UpstreamWalk {
    int refused = 0, run = 0;

    // -> whether the guard takes the node; a node that it takes runs
    bool node(const UpstreamShape & s, const Change & change, bool run_it) {
        ggml_context * ctx = metadata_context();
        ggml_tensor * n = upstream_node(ctx, s);
        change.apply(ctx, n);
        char label[128];
        std::snprintf(label, sizeof(label), "gated_delta_net S=%d Hk=%d H=%d T=%d N=%d K=%d%s, %s", (int) s.S,
                      (int) s.Hk, (int) s.H, (int) s.T, (int) s.N, (int) s.K, s.gate_per_row ? " gates" : "",
                      change.what.c_str());
        counter().label = label;
        const bool accepted = upstream_ask(n, change.what);
        if (accepted && run_it) {
            walk_run(n, upstream_names(), Walk::PLAIN);
        }
        (accepted ? run : refused) += accepted ? run_it : 1;
        ggml_free(ctx);
        return accepted;
    }
};

inline void upstream_cases() {
    const Change none = {"as it is", false, [](ggml_context *, ggml_tensor *) {}};
    UpstreamWalk walk;
    for (int64_t S : {8, 16, 24, 32, 48, 64, 96, 128, 256}) {
        const bool launchable = S == 16 || S == 32 || S == 64 || S == 128;
        for (int64_t K : {1, 2, 8}) {
            for (bool gate_per_row : {false, true}) {
                for (int64_t T : {1, 3}) {
                    const bool accepted = walk.node({S, 2, 4, T, 2, K, gate_per_row}, none, true);
                    counter().expect(accepted == launchable, "width %d is %s", (int) S,
                                     accepted ? "accepted" : "refused");
                }
            }
        }
    }
    const auto expect_refused = [&](const char * what, const std::function<void(ggml_context *, ggml_tensor *)> & f) {
        counter().expect(!walk.node({32, 2, 4, 3, 2, 2, true}, {what, false, f}, false), "accepted: %s", what);
    };
    expect_refused("k with other strides than q", [](ggml_context *, ggml_tensor * n) {
        n->src[1]->nb[1] += 64;
        n->src[1]->nb[2] = 2 * n->src[1]->nb[1];
        n->src[1]->nb[3] = 3 * n->src[1]->nb[2];
    });
    expect_refused("k with other heads than q", [](ggml_context *, ggml_tensor * n) {
        n->src[1]->ne[1] = 1;
        make_contiguous(n->src[1]);
    });
    expect_refused("g not contiguous", [](ggml_context *, ggml_tensor * n) { n->src[3]->nb[2] += 128; });
    expect_refused("g of half a row", [](ggml_context *, ggml_tensor * n) {
        n->src[3]->ne[0] = 16;
        make_contiguous(n->src[3]);
    });
    expect_refused("no snapshot", [](ggml_context *, ggml_tensor * n) { n->op_params[0] = 0; });
    expect_refused("more snapshots than room", [](ggml_context *, ggml_tensor * n) { n->op_params[0]++; });
    expect_refused("a second parameter", [](ggml_context *, ggml_tensor * n) { n->op_params[1] = 1; });
    expect_refused("heads that are no multiple", [](ggml_context *, ggml_tensor * n) {
        for (int i = 0; i < 2; i++) {
            n->src[i]->ne[1] = 3;
            make_contiguous(n->src[i]);
        }
    });

    for (const UpstreamShape & s : {UpstreamShape{32, 2, 4, 3, 2, 2, true}, UpstreamShape{128, 1, 3, 2, 1, 1, false}}) {
        ggml_context * ctx = metadata_context();
        std::vector<Change> changes = source_changes(upstream_node(ctx, s));
        ggml_free(ctx);
        for (const Change & change : node_changes()) {
            changes.push_back(change);
        }
        for (const Change & change : changes) {
            walk.node(s, change, true);
        }
    }
    counter().label = "gated_delta_net";
    counter().expect(walk.refused > 0 && walk.run > 0, "%d refused, %d run", walk.refused, walk.run);
    std::printf("  walk %-13s %6d refused, %5d accepted and run\n", "upstream gdn", walk.refused, walk.run);
}
