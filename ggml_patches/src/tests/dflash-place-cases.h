#pragma once

// place: by hand, and against the rule said row by row; slots, counts and positions of every kind.

#include "dflash-tokens.h"

struct PlaceCase {
    int64_t T, N, C, M, R; // R 0: no ring
    int32_t fill, spare, ring_spare;
    Ints slots, n_rows, base, history, table, ring;

    int64_t lanes() const { return (int64_t) slots.size(); }
};

inline Ints place_run(const PlaceCase & c, int n_threads) {
    Run run(4 * ((size_t) c.lanes() * (4 * c.T + 1) + c.history.size() + c.table.size() + c.ring.size()) + (1 << 14));
    const auto memory = [&](int64_t n, const Ints & data) { return run.source({n, c.N}, data.data(), GGML_TYPE_I32); };
    ggml_tensor *slots = run.source(c.slots), *n_rows = run.source(c.n_rows), *base = run.source(c.base);
    ggml_tensor *history = memory(c.C, c.history), *table = memory(c.M, c.table);
    ggml_tensor * ring = c.R > 0 ? memory(c.R, c.ring) : nullptr;
    ggml_tensor * out = run.result(ggml_dflash_place(run.ctx(), slots, n_rows, base, history, table, ring,
                                                     (int32_t) c.T, c.fill, c.spare, c.ring_spare));
    run.compute({out}, n_threads);
    return Run::ints(out);
}

inline Ints place_reference(const PlaceCase & c) {
    Ints tokens, positions, rows, ring_rows, bases;
    for (int64_t lane = 0; lane < c.lanes(); lane++) {
        const int32_t slot = c.slots[lane], n = c.n_rows[lane];
        const bool repeated = std::count(c.slots.begin(), c.slots.begin() + lane, slot) > 0;
        const bool has_slot = slot >= 0 && slot < c.N && !repeated;
        const bool live = has_slot && n >= 0 && n <= c.T && c.base[slot] >= 0;
        bases.push_back(live ? c.base[slot] : -1);
        for (int64_t t = 0; t < c.T; t++) {
            const int64_t p = (int64_t) bases.back() + t, page = p / 16;
            const bool has_pages = page < c.M && (c.R == 0 || page < c.R);
            if (!live || t >= n || p >= c.C || !has_pages) {
                tokens.push_back(0);
                positions.push_back(0);
                rows.push_back(c.spare + (int32_t) (t % 16));
                ring_rows.push_back(c.ring_spare + (int32_t) (t % 16));
                continue;
            }
            const bool is_known = t == 0 || c.fill < 0;
            tokens.push_back(is_known ? std::max(c.history[slot * c.C + p], 0) : c.fill);
            positions.push_back((int32_t) p);
            rows.push_back(c.table[slot * c.M + page] * 16 + (int32_t) (p % 16));
            ring_rows.push_back(c.R > 0 ? c.ring[slot * c.R + page] * 16 + (int32_t) (p % 16) : 0);
        }
    }
    Ints out = tokens;
    for (const Ints & plane : {positions, rows, c.R > 0 ? ring_rows : Ints(), bases}) {
        out.insert(out.end(), plane.begin(), plane.end());
    }
    return out;
}

inline void place_check(const PlaceCase & c) {
    const Ints want = place_reference(c);
    for (int n_threads : thread_counts({1, 3})) {
        counter().expect(place_run(c, n_threads) == want, "result with %d threads", n_threads);
    }
}

inline PlaceCase random_place_case(int64_t T, int64_t L, int64_t N, int64_t R) {
    std::mt19937 & engine = random_engine();
    const auto below = [&](int64_t n) { return (int32_t) (engine() % (uint64_t) n); };
    const int64_t C = 1 + below(2 * T + 40), M = 1 + below(C / 16 + 2);
    PlaceCase c = {T,  N,  C,  M,  R, below(2) ? -1 : below(248320), below(100000), R > 0 ? below(1000) : 0, {},
                   {}, {}, {}, {}, {}};
    const auto fill = [&](Ints & list, int64_t n, int64_t limit) {
        for (int64_t i = 0; i < n; i++) {
            list.push_back(below(limit));
        }
    };
    for (int64_t lane = 0; lane < L; lane++) {
        const int32_t strange[] = {-1, (int32_t) N, INT32_MIN, INT32_MAX};
        const int32_t counts[] = {-1, (int32_t) T + 1, INT32_MIN, INT32_MAX};
        c.slots.push_back(below(6) == 0 ? strange[below(4)] : below(N));
        c.n_rows.push_back(below(8) == 0 ? counts[below(4)] : below(T + 1));
    }
    for (int64_t slot = 0; slot < N; slot++) {
        const int32_t strange[] = {-1, (int32_t) C, INT32_MIN, INT32_MAX};
        c.base.push_back(below(6) == 0 ? strange[below(4)] : below(C));
    }
    fill(c.history, C * N, 248320);
    for (size_t i = below(9); i < c.history.size(); i += 1 + below(9)) {
        c.history[i] = below(2) ? -1 : INT32_MIN; // what sample gives for no token, and what nobody gives
    }
    fill(c.table, M * N, 10000);
    fill(c.ring, R * N, 50);
    return c;
}

// Every number of the result written out: a lane with a gap in its history, one that ends early, a slot that is taken,
// and one that runs out of ring.
inline void place_by_hand() {
    counter().label = "place by hand";
    PlaceCase c = {3,        3, 20, 2, 1, -1, 160, 320, {1, 0, 1, 2}, {3, 2, 1, 3}, {0, 4, 15}, {}, {4, 7, 2, 9, 1, 0},
                   {3, 5, 8}};
    for (int32_t i = 0; i < 60; i++) {
        c.history.push_back(i / 20 * 100 + i % 20);
    }
    c.history[25] = -1;
    const Ints positions = {4, 5, 6, 0, 1, 0, 0, 0, 0, 15, 0, 0}, bases = {4, 0, -1, 15};
    const Ints rows = {36, 37, 38, 64, 65, 162, 160, 161, 162, 31, 161, 162};
    const Ints ring_rows = {84, 85, 86, 48, 49, 322, 320, 321, 322, 143, 321, 322};
    Ints want = {104, 0, 106, 0, 1, 0, 0, 0, 0, 215, 0, 0};
    for (const Ints & plane : {positions, rows, ring_rows, bases}) {
        want.insert(want.end(), plane.begin(), plane.end());
    }
    counter().expect(place_run(c, 1) == want && place_reference(c) == want, "from history, with a ring");

    c.fill = 9; // behind the anchors
    want[1] = want[2] = want[4] = 9;
    counter().expect(place_run(c, 1) == want && place_reference(c) == want, "filled, with a ring");

    c.R = 0, c.ring.clear(), c.ring_spare = 0; // lane 3 goes on into its second page
    want = {104, 9, 9, 0, 9, 0, 0, 0, 0, 215, 9, 9};
    for (const Ints & plane :
         {Ints{4, 5, 6, 0, 1, 0, 0, 0, 0, 15, 16, 17}, Ints{36, 37, 38, 64, 65, 162, 160, 161, 162, 31, 0, 1}, bases}) {
        want.insert(want.end(), plane.begin(), plane.end());
    }
    counter().expect(place_run(c, 1) == want && place_reference(c) == want, "filled, without a ring");
}

inline void place_cases() {
    place_by_hand();
    for (int64_t T : {1, 3, 16, 17, 300}) {
        for (int64_t L : {1, 2, 7, 64}) {
            for (int64_t N : {1, 5, 80}) {
                char label[64];
                std::snprintf(label, sizeof(label), "place T=%d L=%d N=%d", (int) T, (int) L, (int) N);
                counter().label = label;
                for (int64_t R : {0, 1, 3, 40}) {
                    place_check(random_place_case(T, L, N, R));
                }
            }
        }
    }
    counter().label = "place, the most rows";
    const int64_t most = 1 << 20;
    PlaceCase c = {most, 1, most + 5, most / 16, 0, -1, 7, 0, {0}, {(int32_t) most}, {3}, {}, {}, {}};
    c.history.resize(c.C);
    c.table.resize(c.M);
    std::iota(c.history.begin(), c.history.end(), 0);
    std::iota(c.table.rbegin(), c.table.rend(), 0);
    place_check(c);
}
