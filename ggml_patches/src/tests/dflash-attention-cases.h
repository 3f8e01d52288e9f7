#pragma once

// attention over pages: against a double reference, and bit for bit against itself under everything that must not
// matter.

#include "dflash-harness.h"

struct AttentionShape {
    int64_t D, Hq, Hkv, T, L, N, max_pages, P;
    ggml_type k_type, v_type;
    int32_t window;
    bool causal;
};

struct AttentionCase {
    AttentionShape s;
    Ints slots, base, n_rows;
    Floats q;
    Floats k, v; // [D,Hkv,16*P] by physical row: what the pages are made from
    Ints table;  // [max_pages,N]

    AttentionCase(const AttentionShape & shape, const Ints & slot_ids, const Ints & bases, const Ints & rows)
        : s(shape), slots(slot_ids), base(bases), n_rows(rows) {
        q = normal(s.D * s.Hq * s.T * s.L);
        k = nans(s.D * s.Hkv * 16 * s.P);
        v = k;
        // every slot gets pages of its own from a shuffled pool
        Ints pool(s.P);
        for (int32_t i = 0; i < s.P; i++) {
            pool[i] = i;
        }
        std::shuffle(pool.begin(), pool.end(), random_engine());
        table.assign(s.max_pages * s.N, -1);
        for (size_t lane = 0; lane < slots.size(); lane++) {
            if (slots[lane] < 0) {
                continue;
            }
            const int64_t n = base[lane] + n_rows[lane];
            for (int64_t page = 0; page * 16 < n; page++) {
                if (pool.empty()) {
                    die("a case needs more pages");
                }
                table[slots[lane] * s.max_pages + page] = pool.back();
                pool.pop_back();
            }
            for (int64_t j = 0; j < n; j++) {
                const Floats key = normal(s.D * s.Hkv), value = normal(s.D * s.Hkv);
                std::copy(key.begin(), key.end(), k.begin() + physical(slots[lane], j) * s.D * s.Hkv);
                std::copy(value.begin(), value.end(), v.begin() + physical(slots[lane], j) * s.D * s.Hkv);
            }
        }
    }

    int64_t physical(int64_t slot, int64_t j) const { return table[slot * s.max_pages + j / 16] * 16 + j % 16; }
    int64_t row_size() const { return s.D * s.Hq; }
    int64_t lane_size() const { return row_size() * s.T; }
};

// rows as a type stores them; NaN rows stay NaN
inline std::vector<uint8_t> encode(const Floats & x, int64_t D, ggml_type type) {
    std::vector<uint8_t> bytes(x.size() / D * ggml_row_size(type, D));
    if (type == GGML_TYPE_F32) {
        std::memcpy(bytes.data(), x.data(), bytes.size());
        return bytes;
    }
    for (size_t row = 0; row < x.size() / D; row++) {
        uint8_t * to = bytes.data() + row * ggml_row_size(type, D);
        if (std::isnan(x[row * D])) {
            std::memset(to, 0xFF, ggml_row_size(type, D));
        } else {
            ggml_quantize_chunk(type, &x[row * D], to, 0, 1, D, nullptr);
        }
    }
    return bytes;
}

inline Floats decode(const std::vector<uint8_t> & bytes, size_t n, ggml_type type) {
    Floats x(n);
    if (type == GGML_TYPE_F32) {
        std::memcpy(x.data(), bytes.data(), bytes.size());
    } else {
        ggml_get_type_traits(type)->to_float(bytes.data(), x.data(), (int64_t) n);
    }
    return x;
}

constexpr float ATTENTION_SCALE = 0.17f;

inline Floats attention_run(const AttentionCase & c, int n_threads = 1, bool strided = false) {
    const AttentionShape & s = c.s;
    const std::vector<uint8_t> k = encode(c.k, s.D, s.k_type), v = encode(c.v, s.D, s.v_type);
    Run run(k.size() + v.size() + sizeof(float) * (4 * c.q.size() + c.table.size()));
    ggml_tensor * q;
    if (strided) { // heads of query and gate side by side, as the target projects them
        Floats wide = nans(2 * c.q.size());
        for (size_t i = 0; i < c.q.size() / s.D; i++) {
            std::copy_n(&c.q[i * s.D], s.D, &wide[2 * i * s.D]);
        }
        ggml_tensor * t = run.source({2 * s.D, s.Hq, s.T, s.L}, wide);
        q = ggml_view_4d(run.ctx(), t, s.D, s.Hq, s.T, s.L, t->nb[1], t->nb[2], t->nb[3], 0);
        ggml_backend_view_init(q);
    } else {
        q = run.source({s.D, s.Hq, s.T, s.L}, c.q);
    }
    ggml_tensor * k_pages = run.source({s.D, s.Hkv, 16 * s.P}, k.data(), s.k_type);
    ggml_tensor * v_pages = run.source({s.D, s.Hkv, 16 * s.P}, v.data(), s.v_type);
    ggml_tensor * table = run.source({s.max_pages, s.N}, c.table.data(), GGML_TYPE_I32);
    ggml_tensor * out =
        ggml_dflash_attention(run.ctx(), q, k_pages, v_pages, table, run.source(c.slots), run.source(c.base),
                              run.source(c.n_rows), ATTENTION_SCALE, s.window, s.causal);
    run.result(out);
    run.compute({out}, n_threads);
    return Run::floats(out);
}

inline Floats as_half(Floats x) {
    for (float & value : x) {
        value = ggml_fp16_to_fp32(ggml_fp32_to_fp16(value));
    }
    return x;
}

// The textbook: all scores, softmax, weighted sum, in double over the decoded pages. half_factors: of q, k and v
// rounded to f16.
inline std::vector<double> attention_reference(const AttentionCase & c, bool half_factors) {
    const AttentionShape & s = c.s;
    const auto factors = [&](const Floats & x) { return half_factors ? as_half(x) : x; };
    const Floats k = factors(decode(encode(c.k, s.D, s.k_type), c.k.size(), s.k_type));
    const Floats v = factors(decode(encode(c.v, s.D, s.v_type), c.v.size(), s.v_type));
    const Floats queries = factors(c.q);
    std::vector<double> out(c.q.size(), 0.0);
    for (int64_t lane = 0; lane < s.L; lane++) {
        for (int64_t t = 0; c.slots[lane] >= 0 && t < c.n_rows[lane]; t++) {
            const int64_t p = c.base[lane] + t;
            for (int64_t h = 0; h < s.Hq; h++) {
                const int64_t kv = h / (s.Hq / s.Hkv);
                const float * q = &queries[lane * c.lane_size() + t * c.row_size() + h * s.D];
                double * o = &out[lane * c.lane_size() + t * c.row_size() + h * s.D];
                std::vector<double> score;
                std::vector<int64_t> row;
                for (int64_t j = 0; j < c.base[lane] + c.n_rows[lane]; j++) {
                    if ((s.causal && j > p) || (s.window > 0 && p - j >= s.window)) {
                        continue;
                    }
                    row.push_back((c.physical(c.slots[lane], j) * s.Hkv + kv) * s.D);
                    double dot = 0;
                    for (int64_t d = 0; d < s.D; d++) {
                        dot += (double) q[d] * k[row.back() + d];
                    }
                    score.push_back(ATTENTION_SCALE * dot);
                }
                const double max = *std::max_element(score.begin(), score.end());
                double sum = 0;
                for (double & x : score) {
                    x = std::exp(x - max);
                    sum += x;
                }
                for (size_t i = 0; i < score.size(); i++) {
                    for (int64_t d = 0; d < s.D; d++) {
                        o[d] += score[i] / sum * v[row[i] + d];
                    }
                }
            }
        }
    }
    return out;
}

inline void attention_checks(const AttentionCase & c) {
    const AttentionShape & s = c.s;
    const Floats out = attention_run(c);
    const bool half_factors = has_half_factors(backend().kind, s.D, s.k_type, s.v_type);
    const double d = distance(out, attention_reference(c, half_factors));
    counter().expect(d < tolerance(half_factors ? Rule::ATTENTION_HALF : Rule::ATTENTION_F32), "off by %g", d);
    for (int64_t lane = 0; lane < s.L; lane++) {
        const int64_t live = c.slots[lane] < 0 ? 0 : c.n_rows[lane];
        counter().expect(all_zero(&out[lane * c.lane_size() + live * c.row_size()], (s.T - live) * c.row_size()),
                         "dead rows of lane %d are not zero", (int) lane);
    }

    for (int n_threads : thread_counts({2, 3, 5})) {
        counter().expect(same_bits(attention_run(c, n_threads, true), out), "%d threads differ", n_threads);
    }

    // other physical pages, same contents
    AttentionCase moved = c;
    for (size_t i = 0; i < c.table.size(); i++) {
        moved.table[i] = c.table[i] < 0 ? -1 : (int32_t) s.P - 1 - c.table[i];
    }
    const int64_t page = 16 * s.D * s.Hkv;
    for (int64_t p = 0; p < s.P; p++) {
        std::copy_n(&c.k[p * page], page, &moved.k[(s.P - 1 - p) * page]);
        std::copy_n(&c.v[p * page], page, &moved.v[(s.P - 1 - p) * page]);
    }
    counter().expect(same_bits(attention_run(moved), out), "the place of pages matters");

    // lanes alone, and rows alone where a row does not see later ones
    for (int64_t lane = 0; lane < s.L; lane++) {
        for (int64_t t = 0; t < (s.causal ? s.T : 1); t++) {
            AttentionCase one = c;
            one.s.L = 1;
            one.s.T = s.causal ? 1 : s.T;
            one.slots = {c.slots[lane]};
            one.base = {c.base[lane] + (int32_t) t};
            one.n_rows = {s.causal ? (t < c.n_rows[lane] ? 1 : 0) : c.n_rows[lane]};
            const auto from = c.q.begin() + lane * c.lane_size() + t * c.row_size();
            one.q.assign(from, from + one.s.T * c.row_size());
            const Floats x = attention_run(one, 2);
            counter().expect(same_bits(x.data(), &out[lane * c.lane_size() + t * c.row_size()], x.size()),
                             "lane %d row %d alone differs", (int) lane, (int) t);
        }
    }
}

inline void attention_bad_data(const AttentionCase & c) {
    const AttentionShape & s = c.s;
    const Floats out = attention_run(c);
    const auto expect_dead = [&](const char * what, const AttentionCase & bad) {
        const Floats x = attention_run(bad, 2);
        counter().expect(all_zero(&x[c.lane_size()], c.lane_size()), "%s does not give zeros", what);
        counter().expect(same_bits(x.data(), out.data(), c.lane_size()), "%s disturbs its neighbour", what);
    };
    const struct {
        const char * what;
        int32_t slot, base, n_rows;
    } table[] = {
        {"slot -1", -1, 0, 1},
        {"slot N", (int32_t) s.N, 0, 1},
        {"base -1", c.slots[1], -1, 2},
        {"base INT32_MAX", c.slots[1], INT32_MAX, 1},
        {"base past the table", c.slots[1], (int32_t) s.max_pages * 16, 1},
        {"n_rows -1", c.slots[1], 0, -1},
        {"n_rows T+1", c.slots[1], 0, (int32_t) s.T + 1},
        {"n_rows 0", c.slots[1], 3, 0},
    };
    for (const auto & row : table) {
        AttentionCase bad = c;
        bad.slots[1] = row.slot;
        bad.base[1] = row.base;
        bad.n_rows[1] = row.n_rows;
        for (int32_t & page : bad.table) { // whatever is looked up beside the right place exists
            page = page < 0 ? 0 : page;
        }
        expect_dead(row.what, bad);
    }
    const int64_t last = (c.base[1] + c.n_rows[1] - 1) / 16;
    for (int32_t entry : {-1, (int32_t) s.P, INT32_MAX, INT32_MIN}) {
        AttentionCase bad = c;
        bad.table[c.slots[1] * s.max_pages + last] = entry;
        if (!s.causal) { // every row sees the last page
            expect_dead("a table entry out of range", bad);
        }
        // a page that no row sees is never looked up
        AttentionCase far = c;
        if (s.window > 0 && c.base[1] - s.window >= 16) {
            far.table[c.slots[1] * s.max_pages] = entry;
            counter().expect(same_bits(attention_run(far), out), "a page outside the window matters");
        }
    }
}

inline void attention_cases() {
    const ggml_type F32 = GGML_TYPE_F32, F16 = GGML_TYPE_F16, Q8 = GGML_TYPE_Q8_0;
    const struct {
        AttentionShape s;
        Ints slots, base, n_rows;
    } table[] = {
        // D, Hq, Hkv, T, L, N, max_pages, P, k, v, window, causal
        {{16, 1, 1, 1, 1, 1, 1, 1, F32, F32, 0, true}, {0}, {0}, {1}},
        {{16, 2, 2, 5, 2, 3, 4, 9, F32, F16, 0, true}, {2, 0}, {14, 33}, {5, 3}},
        {{32, 3, 1, 8, 3, 4, 8, 20, F16, F16, 0, true}, {3, -1, 1}, {100, 0, 15}, {8, 8, 7}},
        {{32, 8, 2, 16, 2, 2, 6, 12, Q8, Q8, 20, true}, {1, 0}, {70, 5}, {16, 9}},
        {{64, 10, 2, 8, 2, 3, 6, 12, Q8, F16, 33, false}, {2, 1}, {64, 80}, {8, 5}},
        {{64, 6, 1, 33, 2, 2, 8, 14, F16, Q8, 0, false}, {0, 1}, {0, 47}, {33, 20}},
        {{128, 7, 1, 8, 1, 1, 20, 20, F16, F16, 0, true}, {0}, {300}, {8}},
        {{128, 16, 1, 3, 2, 4, 5, 9, F32, Q8, 1, true}, {3, 2}, {63, 31}, {3, 3}},
        {{128, 8, 2, 8, 5, 7, 4, 20, F16, F16, 16, false}, {6, 2, -1, 0, 3}, {50, 9, 0, 16, 0}, {8, 8, 8, 0, 1}},
        {{256, 12, 2, 8, 2, 3, 5, 9, Q8, Q8, 0, true}, {1, 2}, {61, 8}, {8, 8}},
        {{256, 8, 1, 70, 1, 1, 10, 10, F16, F16, 0, true}, {0}, {90}, {70}},
    };
    for (const auto & entry : table) {
        const AttentionShape & s = entry.s;
        char label[128];
        std::snprintf(label, sizeof(label), "attention D=%d Hq=%d Hkv=%d T=%d L=%d %s/%s window=%d %s", (int) s.D,
                      (int) s.Hq, (int) s.Hkv, (int) s.T, (int) s.L, ggml_type_name(s.k_type), ggml_type_name(s.v_type),
                      (int) s.window, s.causal ? "causal" : "block");
        counter().label = label;
        const AttentionCase c(s, entry.slots, entry.base, entry.n_rows);
        attention_checks(c);
        if (s.L >= 2 && c.slots[0] >= 0 && c.slots[1] >= 0) {
            attention_bad_data(c);
        }
    }
}
