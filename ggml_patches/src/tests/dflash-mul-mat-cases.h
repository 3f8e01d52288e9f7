#pragma once

// mul_mat: against float64, on the CPU bit for bit against its definition in plain code, and against itself in other
// shapes. A column has the same bits alone and in any company, on every device.

#include "dflash-mul-mat-definition.h"

inline void mul_mat_against_definition(const MulMatCase & c, const Floats & y) {
    for (int64_t column = 0; column < std::min<int64_t>(c.n, 12); column++) {
        bool same = true;
        for (int64_t row = 0; row < c.M; row += c.M < 20 ? 1 : 13) {
            const float wanted = mul_mat_definition(c, row, column);
            same = same && same_bits(&wanted, &y[column * c.M + row], 1);
        }
        counter().expect(same, "column %d is not what the definition gives", (int) column);
    }
}

// Every number within what rounding the activations can do; ordinary columns far closer on average.
inline void mul_mat_against_float64(const MulMatCase & c, const Floats & y) {
    Floats w(c.K * c.M);
    ggml_get_type_traits(c.layout.type)->to_float(c.w.data(), w.data(), c.K * c.M);
    double error = 0, square = 0;
    for (int64_t column = 0; column < std::min<int64_t>(c.n, 12); column++) {
        const float * x = &c.x[column * c.K];
        const double largest = std::fabs(*std::max_element(
            x, x + c.K, [](float a, float b) { return std::fabs(a) < std::fabs(b); })); // scales the column on devices
        double worst = 0;
        for (int64_t row = 0; row < c.M; row++) {
            double exact = 0, allowed = 0;
            for (int64_t b = 0; b < c.K; b += SUPER) {
                double max = 0, sum = 0, magnitudes = 0;
                for (int64_t i = b; i < b + SUPER; i++) {
                    const double product = (double) w[row * c.K + i] * c.x[column * c.K + i];
                    exact += product;
                    allowed += 1e-6 * std::fabs(product);
                    magnitudes += std::fabs(product);
                    max = std::max(max, (double) std::fabs(c.x[column * c.K + i]));
                    sum += std::fabs(w[row * c.K + i]);
                }
                if (backend().is_cpu()) {
                    const double step = max / (c.layout.blocks == 8 ? 32767 : 2047); // or 2^-100 is zero
                    allowed += sum * std::max(0x1p-100, 1.001 * step / 2);
                } else {
                    allowed += magnitudes * tolerance(Rule::MUL_MAT_HALF) + sum * std::max(0x1p-130, largest * 0x1p-33);
                }
            }
            const double e = std::fabs(y[column * c.M + row] - exact);
            worst = e <= worst * allowed ? worst : std::isnan(e) ? INFINITY : e / allowed;
            if (column % 12 == 0) {
                error += e * e;
                square += exact * exact;
            }
        }
        counter().expect(worst <= 1.0, "column %d is %g times what rounding allows", (int) column, worst);
    }
    counter().expect(c.M < 50 || error < 4e-6 * square, "normalised mean square error %g", error / square);
}

// The same columns alone, in other numbers, at other places, as lanes, by other threads, from weights that lie apart.
inline void mul_mat_against_itself(const MulMatCase & c, const Floats & y) {
    for (int n_threads : thread_counts({1, 2, 3})) {
        for (int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 13, 16}) {
            for (int64_t first : {0, 1, 6}) {
                // few with threads: on a busy machine they wait for each other
                if (first + n <= c.n && (n_threads == 1 || (first == 1 && n % 8 <= 1))) {
                    const Floats part = mul_mat_run(c, first, n, 1, n_threads);
                    counter().expect(same_bits(part.data(), &y[first * c.M], part.size()),
                                     "columns %d..%d alone, %d threads", (int) first, (int) (first + n - 1), n_threads);
                }
            }
        }
        const Floats lanes = mul_mat_run(c, 1, 3, 4, n_threads);
        counter().expect(same_bits(lanes.data(), &y[c.M], lanes.size()), "columns as lanes");
        counter().expect(same_bits(mul_mat_run(c, 0, c.n, 1, n_threads, true), y), "weights apart, %d threads",
                         n_threads);
    }
}

// Columns of one product in every number of them that is run together, and in some that are not, at places that differ.
inline void mul_mat_in_company(const MulMatCase & c, const std::vector<int64_t> & numbers) {
    const Floats y = mul_mat_run(c, 0, c.n, 1, 1);
    mul_mat_against_float64(c, y);
    for (int64_t n : numbers) {
        const int64_t first = 7 * n % (c.n - n + 1);
        const Floats part = mul_mat_run(c, first, n, 1, 1);
        counter().expect(same_bits(part.data(), &y[first * c.M], part.size()), "columns %d..%d of %d", (int) first,
                         (int) (first + n - 1), (int) c.n);
    }
}

inline void mul_mat_company_cases(const BlockLayout & layout) {
    std::vector<int64_t> numbers = {128, 300};
    for (int64_t n = 1; n <= 65; n++) {
        numbers.push_back(n);
    }
    const std::string type = ggml_type_name(layout.type);
    counter().label = "mul_mat " + type + " in company";
    mul_mat_in_company(MulMatCase(layout, 768, 37, 300, quantised(layout.type, 768, 37)), numbers);
    counter().label = "mul_mat " + type + " in company, long rows";
    mul_mat_in_company(MulMatCase(layout, 17408, 67, 65, quantised(layout.type, 17408, 67)), {1, 2, 8, 9, 17, 33, 64});
    counter().label = "mul_mat " + type + " in company, many rows";
    mul_mat_in_company(MulMatCase(layout, 256, 33001, 33, quantised(layout.type, 256, 33001)), {1, 5, 9, 16, 17, 32});
}

// What is not finite stays in its column.
inline void mul_mat_not_finite(const BlockLayout & layout) {
    MulMatCase c(layout, 512, 9, 5, quantised(layout.type, 512, 9));
    const Floats before = mul_mat_run(c, 0, c.n, 1, 1);
    c.x[1 * c.K + 300] = INFINITY;
    c.x[3 * c.K + 7] = NAN;
    const Floats after = mul_mat_run(c, 0, c.n, 1, 2);
    for (int64_t column = 0; column < c.n; column++) {
        const float * y = &after[column * c.M];
        const bool ok = column % 2 ? std::all_of(y, y + c.M, [](float v) { return std::isnan(v); })
                                   : same_bits(y, &before[column * c.M], c.M);
        counter().expect(ok, "column %d beside infinity and NaN", (int) column);
    }
}

inline void mul_mat_cases() {
    const auto all = [](const MulMatCase & c) {
        const Floats y = mul_mat_run(c, 0, c.n, 1, 1);
        if (backend().is_cpu()) {
            mul_mat_against_definition(c, y);
        }
        mul_mat_against_float64(c, y);
        mul_mat_against_itself(c, y);
    };
    for (const BlockLayout & layout : BLOCK_LAYOUTS) {
        const std::string type = ggml_type_name(layout.type);
        for (int64_t K : {256, 512, 1536}) {
            for (int64_t M : {1, 5, 8, 257}) {
                counter().label = "mul_mat " + type + " " + std::to_string(K) + " x " + std::to_string(M);
                all(MulMatCase(layout, K, M, 19, quantised(layout.type, K, M)));
            }
        }
        counter().label = "mul_mat " + type + " random blocks"; // every code and scale
        all(MulMatCase(layout, 768, 61, 19, blocks_of(layout, 768, 61, [](size_t) { return random_engine()() >> 8; })));
        counter().label = "mul_mat " + type + " largest sums";
        const bool high = layout.min >= 0; // all bits set is the largest, or the first code and the lowest scale
        all(MulMatCase(layout, 512, 6, 19, blocks_of(layout, 512, 6, [&](size_t i) {
                           return high                                        ? 0xFF
                                  : layout.type == GGML_TYPE_Q8_0             ? 0x80
                                  : layout.type == GGML_TYPE_Q6_K && i >= 192 ? 0x80
                                                                              : 0;
                       })));
        counter().label = "mul_mat " + type + " more columns than run together";
        const MulMatCase many(layout, 256, 11, 600, quantised(layout.type, 256, 11));
        const Floats y = mul_mat_run(many, 0, many.n, 1, 1);
        mul_mat_against_itself(many, y);
        for (int64_t n : {255, 256, 257, 512, 513}) {
            const Floats part = mul_mat_run(many, 9, n, 1, 2);
            counter().expect(same_bits(part.data(), &y[9 * many.M], part.size()), "%d columns", (int) n);
        }
        mul_mat_company_cases(layout);
        counter().label = "mul_mat " + type + " not finite";
        mul_mat_not_finite(layout);
    }
}
