#pragma once

// select: the block, its candidates and walk, against the rule in double. Where all numbers are whole the edge scores
// are exact, and so are the proposals; elsewhere every step of the walk is held to the best one within the rounding of
// its score.

#include "dflash-tokens.h"

struct Codebook {
    ggml_type type;
    std::vector<uint8_t> rows;
    Floats values; // what the rows mean

    Codebook(ggml_type type, int64_t R, int64_t V, const Floats & from)
        : type(type), rows(ggml_row_size(type, R) * V), values(from) {
        ggml_quantize_chunk(type, from.data(), rows.data(), 0, V, R, nullptr);
        if (type != GGML_TYPE_F32) {
            ggml_get_type_traits(type)->to_float(rows.data(), values.data(), R * V);
        }
    }
};

struct SelectCase {
    int64_t V, P, L, R; // R 0: no edge scores
    int32_t top_k;
    bool whole;
    Floats logits, gate;
    Ints anchors, base;
    std::vector<Drawing> how;
    std::vector<Codebook> books; // predecessor, successor

    SelectCase(int64_t V, int64_t P, int64_t L, int64_t R, int32_t top_k, bool whole, ggml_type before = GGML_TYPE_F32,
               ggml_type after = GGML_TYPE_F32)
        : V(V), P(P), L(L), R(R), top_k(top_k), whole(whole), logits(numbers(V * P * L, 4)),
          gate(numbers(R * P * L, 1)), base(L, 7), how(L) {
        for (int64_t lane = 0; lane < L; lane++) {
            anchors.push_back((int32_t) (lane * 31 % V));
        }
        for (ggml_type type : {before, after}) {
            if (R > 0) {
                books.emplace_back(type, R, V, book_numbers(V * R));
            }
        }
    }

    // the first n rows of one lane
    SelectCase part(int64_t n, int64_t lane) const {
        SelectCase c = *this;
        c.P = n;
        c.L = 1;
        c.logits.assign(logits.begin() + lane * P * V, logits.begin() + (lane * P + n) * V);
        c.gate.assign(gate.begin() + lane * P * R, gate.begin() + (lane * P + n) * R);
        c.anchors = {anchors[lane]}, c.base = {base[lane]}, c.how = {how[lane]};
        return c;
    }

  private:
    Floats numbers(size_t n, float size) const {
        Floats data = normal(n, size);
        for (float & x : data) {
            x = whole ? std::round(x) : x;
        }
        return data;
    }

    // Whole numbers -2..2 and 127 first in every block of 32, so that the scale of a Q8_0 block is 1.
    Floats book_numbers(size_t n) const {
        Floats data = numbers(n, 1);
        for (size_t i = 0; whole && i < n; i += 1) {
            data[i] = i % 32 == 0 ? 127.0f : std::max(-2.0f, std::min(2.0f, data[i]));
        }
        return data;
    }
};

// A codebook as a source; apart: its rows are slices of wider ones.
inline ggml_tensor * book_source(Run & run, const Codebook & book, int64_t R, int64_t V, bool apart) {
    if (!apart) {
        return run.source({R, V}, book.rows.data(), book.type);
    }
    const size_t row = ggml_row_size(book.type, R), gap = ggml_row_size(book.type, 32);
    std::vector<uint8_t> wide((row + gap) * V, 0xFF);
    for (int64_t i = 0; i < V; i++) {
        std::copy_n(&book.rows[i * row], row, &wide[i * (row + gap)]);
    }
    ggml_tensor * t = run.source({R + 32, V}, wide.data(), book.type);
    t = ggml_view_2d(run.ctx(), t, R, V, row + gap, 0);
    ggml_backend_view_init(t);
    return t;
}

inline Ints select_run(const SelectCase & c, int n_threads = 1, bool apart = false) {
    Run run((c.logits.size() + c.gate.size() + 2 * c.V * (c.R + 32)) * sizeof(float) + (1 << 16));
    const Ints columns = sampling_columns(c.how);
    ggml_tensor * logits = run.source({c.V, c.P, c.L}, c.logits);
    ggml_tensor * anchors = run.source(c.anchors);
    ggml_tensor * base = run.source(c.base);
    ggml_tensor * sampling = run.source({GGML_DFLASH_SAMPLING_WORDS, c.L}, columns.data(), GGML_TYPE_I32);
    ggml_tensor *gate = nullptr, *before = nullptr, *after = nullptr;
    if (c.R > 0) {
        gate = run.source({c.R, c.P, c.L}, c.gate);
        before = book_source(run, c.books[0], c.R, c.V, apart);
        after = book_source(run, c.books[1], c.R, c.V, apart);
    }
    ggml_tensor * out =
        run.result(ggml_dflash_select(run.ctx(), logits, anchors, base, sampling, gate, before, after, c.top_k));
    run.compute({out}, n_threads);
    return Run::ints(out);
}

inline Ints candidates_of(const SelectCase & c, int64_t p, int64_t lane) {
    Floats row(&c.logits[(lane * c.P + p) * c.V], &c.logits[(lane * c.P + p) * c.V] + c.V);
    for (float & x : row) {
        x = std::isnan(x) ? -INFINITY : x;
    }
    Ints ids = falling_order(row, rising_ids(c.V));
    ids.resize(c.top_k);
    return ids;
}

struct Score {
    double value;
    double tolerance; // of a kernel that sums in floats, in any order
};

inline Score score_of(const SelectCase & c, int64_t p, int64_t lane, int32_t before, int32_t after) {
    const float given = c.logits[(lane * c.P + p) * c.V + after];
    const double logit = std::isnan(given) ? -INFINITY : given;
    double edge = 0, size = 0;
    for (int64_t r = 0; r < c.R; r++) {
        const double term = (double) c.books[0].values[before * c.R + r] * c.gate[(lane * c.P + p) * c.R + r] *
                            c.books[1].values[after * c.R + r];
        edge += term;
        size += std::fabs(term);
    }
    const Drawing & how = c.how[lane];
    const double u = std::ldexp(1.0, -24);
    Score score = {edge + logit, c.whole ? 0.0 : u * ((c.R + 4) * size + 2 * std::fabs(logit))};
    if (how.temperature > 0) { // exact for a whole score
        score.value = scaled_with_noise((float) score.value, how, (int64_t) c.base[lane] + p + 1, after);
        score.tolerance = score.tolerance / how.temperature + (c.whole ? 0.0 : 4 * u * (std::fabs(score.value) + 23));
    }
    if (std::isnan(score.value)) {
        score.value = -INFINITY; // never taken before another
    }
    return score;
}

// Every step of the walk that was taken, from the token that was taken before.
inline void select_check(const SelectCase & c, const Ints & blocks, const char * what) {
    counter().expect((int64_t) blocks.size() == c.L * (1 + c.P), "%s: %d tokens", what, (int) blocks.size());
    for (int64_t lane = 0; lane < c.L; lane++) {
        const int32_t *block = &blocks[lane * (1 + c.P)], *walk = block + 1;
        if (c.anchors[lane] < 0 || c.anchors[lane] >= c.V) {
            counter().expect(all_zero(block, 1 + c.P), "%s: dead lane %d has a block", what, (int) lane);
            continue;
        }
        counter().expect(block[0] == c.anchors[lane], "%s: lane %d begins with %d", what, (int) lane, block[0]);
        for (int64_t p = 0; p < c.P; p++) {
            const int32_t before = p == 0 ? c.anchors[lane] : walk[p - 1];
            const Ints ids = candidates_of(c, p, lane);
            Score best = {-INFINITY, 0}, taken = {NAN, 0};
            int32_t first = ids[0];
            for (int32_t id : ids) {
                const Score score = score_of(c, p, lane, before, id);
                if (score.value > best.value) {
                    best = score;
                    first = id;
                }
                taken = id == walk[p] ? score : taken;
            }
            if (c.whole) {
                counter().expect(walk[p] == first, "%s: lane %d row %d is %d, not %d", what, (int) lane, (int) p,
                                 walk[p], first);
            } else {
                counter().expect(taken.value == best.value ||
                                     taken.value >= best.value - best.tolerance - taken.tolerance,
                                 "%s: lane %d row %d: %d is no best candidate", what, (int) lane, (int) p, walk[p]);
            }
            if (std::find(ids.begin(), ids.end(), walk[p]) == ids.end()) {
                break; // the rest of the walk has no meaning
            }
        }
    }
}

inline void select_independence(const SelectCase & c, const Ints & together) {
    for (int n_threads : thread_counts({2, 3})) {
        counter().expect(select_run(c, n_threads, true) == together, "%d threads, wider rows", n_threads);
    }
    for (int64_t lane = 0; lane < c.L; lane++) {
        for (int64_t n = 1; n <= c.P; n++) { // rows that follow change nothing
            const Ints alone = select_run(c.part(n, lane));
            counter().expect(std::equal(alone.begin(), alone.end(), &together[lane * (1 + c.P)]),
                             "%d rows of lane %d alone", (int) n, (int) lane);
        }
    }
}

inline void select_case(SelectCase c) {
    char label[128];
    std::snprintf(label, sizeof(label), "select V=%d P=%d L=%d R=%d k=%d%s %s", (int) c.V, (int) c.P, (int) c.L,
                  (int) c.R, c.top_k, c.whole ? " whole" : "", c.R ? ggml_type_name(c.books[0].type) : "without edges");
    counter().label = label;
    select_check(c, select_run(c), "greedy");
    for (int64_t lane = 0; lane < c.L; lane++) {
        c.how[lane].seed = 1000 + lane;
        c.how[lane].temperature = lane % 3 == 2 ? 0.0f : 0.7f;
        c.base[lane] = lane == 0 ? INT32_MAX : (int32_t) lane;
    }
    const Ints drawn = select_run(c);
    select_check(c, drawn, "drawn");
    select_independence(c, drawn);
}

inline void select_bad_data() {
    counter().label = "select, dead lanes";
    SelectCase c(40, 3, 6, 32, 4, true);
    c.anchors = {39, -1, 40, 0, INT32_MIN, INT32_MAX};
    std::fill_n(&c.logits[3 * 40], 3 * 40, NAN);
    const Ints out = select_run(c, 2);
    select_check(c, out, "anchors");
    counter().expect(!all_zero(&out[0], 4) && !all_zero(&out[12], 4), "live lanes are dead");

    counter().label = "select, edges that are NaN";
    SelectCase edges(50, 2, 1, 32, 8, true);
    const Ints ids = candidates_of(edges, 0, 0);
    for (int32_t n : {1, 4, 7, 8}) { // of 8: all NaN, so the first
        std::fill_n(&edges.gate[0], 32, 1.0f);
        std::vector<Codebook> & books = edges.books;
        for (int32_t i = 0; i < n; i++) {
            books[1].values[ids[i] * 32 + 5] = NAN;
        }
        std::memcpy(books[1].rows.data(), books[1].values.data(), books[1].rows.size());
        for (float temperature : {0.0f, 1.0f}) {
            edges.how[0].temperature = temperature;
            const Ints walk = select_run(edges);
            select_check(edges, walk, "NaN");
            const bool is_nan = std::find(ids.begin(), ids.begin() + n, walk[1]) != ids.begin() + n;
            counter().expect(is_nan == (n == 8), "%d NaN: takes %d", n, walk[1]);
        }
    }

    counter().label = "select, bad numbers";
    for (int64_t R : {0, 32}) {
        for (int32_t top_k : {1, 4, 16}) {
            SelectCase bad(100, 8, 1, R, top_k, true);
            float * rows = bad.logits.data();
            std::fill_n(rows, 100, NAN);                // nothing but NaN: the lowest ids
            std::fill_n(rows + 100, 100, -INFINITY);    // the same
            std::fill_n(rows + 200, 97, NAN);           // three numbers at the end
            std::fill_n(rows + 300, 100, -1.0f);        // all equal
            rows[400] = NAN, rows[450] = INFINITY;      // infinity wins
            rows[520] = INFINITY, rows[599] = INFINITY; // the first of two
            rows[600] = NAN, rows[603] = -INFINITY;     // NaN and -infinity are equal
            std::fill_n(rows + 600, 90, -INFINITY);
            for (int64_t i = 700; i < 800; i++) {
                rows[i] = i % 2 ? 0.0f : -0.0f; // equal
            }
            select_check(bad, select_run(bad), "greedy");
            bad.how[0].temperature = 1.0f;
            select_check(bad, select_run(bad), "drawn");
        }
    }
}

inline void select_cases() {
    check_noise_reference();
    for (int32_t top_k : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}) {
        select_case(SelectCase(1000, 3, 3, 64, top_k, true));
        select_case(SelectCase(33, 7, 2, 20, top_k, false));
        select_case(SelectCase(top_k, 2, 1, 32, top_k, true)); // every token is a candidate
        select_case(SelectCase(4099, 7, 2, 0, top_k, false));
    }
    const ggml_type types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0};
    for (ggml_type before : types) {
        for (ggml_type after : types) {
            select_case(SelectCase(300, 7, 2, 64, 8, true, before, after));
            select_case(SelectCase(300, 7, 2, 256, 16, false, before, after));
        }
    }
    select_case(SelectCase(1, 15, 1, 1, 1, false));
    select_case(SelectCase(64, 15, 1, 1024, 16, false));
    select_case(SelectCase(64, 1, 64, 7, 3, false));
    select_case(SelectCase(248320, 1, 1, 8, 16, true));
    select_bad_data();

    counter().label = "select, control"; // the edge scores decide
    SelectCase c(1000, 7, 1, 64, 8, true), plain = c;
    plain.R = 0;
    counter().expect(select_run(c) != select_run(plain), "edge scores without effect");
}
