#pragma once

// Order on the device: a slow node makes what our ops read, our ops follow it in one graph, and the host waits only at
// the end. The result must be that of running node by node with a wait behind each. A kernel that is launched anywhere
// but on the backend's own stream reads here what is not there yet.

#include "dflash-tokens.h"

// What the slow node leaves behind, and the nodes that it takes.
struct SlowStart {
    ggml_tensor *rows, *state; // [S,H,T,1], [S,S,H,1]
    std::vector<ggml_tensor *> nodes;
};

constexpr int64_t ORDER_S = 128, ORDER_H = 4, ORDER_T = 1024, ORDER_BLOCK = 8, ORDER_POSITIONS = 64;

// An advance of 1024 rows: each depends on the one before, so it takes a millisecond and more wherever it runs.
inline SlowStart slow_advance(Run & run, ggml_tensor * log, ggml_tensor * slots, ggml_tensor * none) {
    const int64_t S = ORDER_S, H = ORDER_H, T = ORDER_T;
    const auto rows = [&] { return run.source({S, H, T, 1}, normal(S * H * T, 1.0f / std::sqrt((float) S))); };
    ggml_tensor * state = run.source({S, S, H, 1}, normal(S * S * H, 0.5f));
    ggml_tensor *q = rows(), *k = rows(), *v = rows();
    ggml_tensor * g = run.source({H, T, 1}, Floats(H * T, -0.05f));
    ggml_tensor * beta = run.source({H, T, 1}, Floats(H * T, 0.5f));
    ggml_tensor * y = run.result(
        ggml_dflash_gdn_advance(run.ctx(), q, k, v, g, beta, state, log, slots, none, run.source(Ints{(int32_t) T})));
    return {y, state, {y}};
}

// Products by ggml's own kernels, and a copy into the state.
inline SlowStart slow_products(Run & run, ggml_tensor *, ggml_tensor *, ggml_tensor *) {
    const int64_t n = backend().is_cpu() ? 128 : 2048, columns = ORDER_S * ORDER_H * ORDER_T / n;
    const int steps = backend().is_cpu() ? 2 : 12;
    SlowStart start;
    ggml_tensor * a = run.source({n, n}, normal(n * n, 1.0f / std::sqrt((float) n)));
    ggml_tensor * x = run.source({n, columns}, normal(n * columns, 1.0f / std::sqrt((float) ORDER_S)));
    for (int i = 0; i < steps; i++) {
        x = run.result(ggml_mul_mat(run.ctx(), a, x));
        start.nodes.push_back(x);
    }
    start.rows = run.result(ggml_reshape_4d(run.ctx(), x, ORDER_S, ORDER_H, ORDER_T, 1));
    ggml_tensor * part = run.result(ggml_view_4d(run.ctx(), x, ORDER_S, ORDER_S, ORDER_H, 1, ORDER_S * 4,
                                                 ORDER_S * ORDER_S * 4, ORDER_S * ORDER_S * ORDER_H * 4, 0));
    ggml_tensor * state = run.source({ORDER_S, ORDER_S, ORDER_H, 1}, nans(ORDER_S * ORDER_S * ORDER_H));
    start.state = run.result(ggml_cpy(run.ctx(), part, state));
    start.nodes.push_back(start.state);
    return start;
}

// The ops of a round behind it, each on what the one before wrote: places, block, acceptance, the next block.
inline std::vector<ggml_tensor *> order_nodes(Run & run, bool with_products) {
    const int64_t S = ORDER_S, H = ORDER_H, T = ORDER_BLOCK, B = ORDER_BLOCK, C = S * H;
    ggml_context * ctx = run.ctx();
    const auto ints = [&](int32_t x) { return run.source(Ints{x}); };
    ggml_tensor *slots = ints(0), *none = ints(0), *pending = ints(0), *live = ints((int32_t) T);
    ggml_tensor * log = run.source({2 * S + 1, H, B, 1}, nans((2 * S + 1) * H * B));
    const SlowStart slow = (with_products ? slow_products : slow_advance)(run, log, slots, none);
    std::vector<ggml_tensor *> nodes = slow.nodes;
    const auto add = [&](ggml_tensor * node) {
        nodes.push_back(run.result(node));
        return node;
    };
    const auto rows = [&](int64_t first) { // T rows of what the slow node made
        return run.result(ggml_view_4d(ctx, slow.rows, S, H, T, 1, S * 4, C * 4, C * T * 4, first * C * 4));
    };
    const auto flat = [&](ggml_tensor * t) { return run.result(ggml_reshape_3d(ctx, t, C, T, 1)); };
    const auto decay = [&] { return run.source({H, T, 1}, Floats(H * T, -0.1f)); };
    const auto half = [&] { return run.source({H, T, 1}, Floats(H * T, 0.5f)); };

    ggml_tensor * out = add(ggml_dflash_gdn_verify(ctx, rows(ORDER_T - T), rows(ORDER_T - 2 * T), rows(ORDER_T - 3 * T),
                                                   decay(), half(), slow.state, log, slots, none));
    ggml_tensor * kept = run.source({C, 3 + B, 1}, normal(C * (3 + B)));
    ggml_tensor * taps = run.source({4, C}, normal(4 * C));
    ggml_tensor * conv = add(ggml_dflash_conv_verify(ctx, flat(out), taps, kept, slots, none));
    ggml_tensor * q = run.result(ggml_reshape_4d(ctx, conv, S, H, T, 1));

    Ints table(ORDER_T / 16);
    for (size_t i = 0; i < table.size(); i++) {
        table[i] = (int32_t) (table.size() - 1 - i);
    }
    ggml_tensor * pages = run.result(ggml_reshape_3d(ctx, slow.rows, S, H, ORDER_T));
    ggml_tensor * seen =
        add(ggml_dflash_attention(ctx, q, pages, pages, run.source({ORDER_T / 16, 1}, table.data(), GGML_TYPE_I32),
                                  slots, ints((int32_t) (ORDER_T - T)), live, 0.1f, 0, true));
    ggml_tensor * coef = run.source({16, 2, T, 1}, normal(32 * T));
    ggml_tensor * logits = add(ggml_dflash_dynamic_conv(ctx, flat(seen), coef, run.source({C, 2}, normal(2 * C))));

    const Ints greedy = sampling_columns({Drawing()});
    ggml_tensor * sampling = run.source({GGML_DFLASH_SAMPLING_WORDS, 1}, greedy.data(), GGML_TYPE_I32);
    Ints known = {7, 3, 7, 7, 1, 3}; // the anchor last
    known.resize(ORDER_POSITIONS, 9);
    ggml_tensor * history = run.source({ORDER_POSITIONS, 1}, known.data(), GGML_TYPE_I32);
    ggml_tensor *base = ints(5), *numbers = run.source({ORDER_POSITIONS / 16, 1}, table.data(), GGML_TYPE_I32);
    const auto place = [&] {
        return add(ggml_dflash_place(ctx, slots, live, base, history, numbers, nullptr, (int32_t) T, 11, 0, 0));
    };
    ggml_tensor * placed = place(); // tokens, positions and rows of the block, then the position of its anchor
    const auto part = [&](int64_t n, int64_t first) {
        return run.result(ggml_view_1d(ctx, placed, n, (size_t) first * 4));
    };
    ggml_tensor *anchors = part(1, 0), *filled = run.result(ggml_view_2d(ctx, placed, T, 1, T * 4, 0));
    ggml_tensor * at = part(1, 3 * T);
    const Ints pairs = {3, (int32_t) 0xC0000000, 500, 0x40000000, -1, 0}; // -2 and 2
    logits = add(ggml_dflash_penalise(ctx, logits, filled, at, live, slots, history, run.source({2, 1}, {1.5f, 0.25f}),
                                      run.source({2, 3, 1}, pairs.data(), GGML_TYPE_I32)));
    ggml_tensor * drafted = run.result(ggml_view_3d(ctx, logits, C, T - 1, 1, C * 4, C * (T - 1) * 4, 0));
    ggml_tensor * block = add(ggml_dflash_select(ctx, drafted, anchors, at, sampling, nullptr, nullptr, nullptr, 4));
    ggml_tensor * tokens = add(ggml_dflash_sample(ctx, logits, at, live, sampling));
    add(ggml_dflash_accept(ctx, tokens, block, live, slots, pending, base, history));
    place(); // the next one's

    // pending is now what accept wrote: greedy proposals without edges are the target's tokens, so all rows count
    ggml_tensor * window = add(ggml_dflash_conv_commit(ctx, kept, slots, pending));
    ggml_tensor * state = add(ggml_dflash_gdn_commit(ctx, slow.state, log, slots, pending));
    ggml_tensor * again = add(
        ggml_dflash_gdn_advance(ctx, rows(0), rows(T), rows(2 * T), decay(), half(), state, log, slots, none, live));
    add(ggml_dflash_conv_advance(ctx, flat(again), taps, window, slots, none, live));
    return nodes;
}

inline void order_of(bool with_products) {
    Run run(((size_t) 1 << 23) * (with_products && !backend().is_cpu() ? 16 : 8));
    const std::vector<ggml_tensor *> nodes = order_nodes(run, with_products);
    const std::vector<uint8_t> before = run.image();
    run.compute_apart(nodes);
    const std::vector<uint8_t> apart = run.image();
    const Ints accepted = Run::ints(nodes[nodes.size() - 6]);
    counter().expect(accepted[0] == ORDER_BLOCK, "%d rows count, not all %d", accepted[0], (int) ORDER_BLOCK);
    for (const ggml_tensor * node : nodes) {
        const Floats x = node->type == GGML_TYPE_F32 ? Run::floats(node) : Floats();
        counter().expect(std::all_of(x.begin(), x.end(), [](float v) { return std::isfinite(v); }),
                         "a result of %s is not finite", ggml_op_desc(node));
    }
    for (int i = 0; i < 4; i++) { // from the third time on a captured graph is replayed where there is such a thing
        run.image() = before;
        run.compute(nodes, 2, Beside::NOTHING);
        counter().expect(run.image() == apart, "time %d: one graph is not node by node", i);
    }
}

inline void order_cases() {
    counter().label = "order behind a long advance";
    order_of(false);
}

inline void order_products_cases() {
    counter().label = "order behind products";
    order_of(true);
}
