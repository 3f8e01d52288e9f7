#pragma once

// Weights, columns and runs of mul_mat, and its definition in plain code.

#include "dflash-harness.h"

#include <functional>

constexpr int64_t SUPER = 256; // weights of a super-block

// Where the half floats of a block lie, and how many blocks are a super-block.
struct BlockLayout {
    ggml_type type;
    size_t unit;
    int min; // offset, -1 if there is none
    int blocks;
};

constexpr BlockLayout BLOCK_LAYOUTS[] = {
    {GGML_TYPE_IQ4_XS, 0, -1, 1}, {GGML_TYPE_Q6_K, 208, -1, 1}, {GGML_TYPE_Q8_0, 0, -1, 8},
    {GGML_TYPE_Q4_K, 0, 2, 1},    {GGML_TYPE_Q5_K, 0, 2, 1},
};

inline std::vector<uint8_t> quantised(ggml_type type, int64_t K, int64_t M) {
    const Floats w = normal(K * M, 0.05f);
    std::vector<uint8_t> data(ggml_row_size(type, K) * M);
    ggml_quantize_chunk(type, w.data(), data.data(), 0, M, K, nullptr);
    return data;
}

inline void set_half(uint8_t * at, float value) {
    const ggml_fp16_t half = ggml_fp32_to_fp16(value);
    std::memcpy(at, &half, sizeof(half));
}

inline float get_half(const uint8_t * at) {
    ggml_fp16_t half;
    std::memcpy(&half, at, sizeof(half));
    return ggml_fp16_to_fp32(half);
}

// Blocks of the given bytes with ordinary half floats.
inline std::vector<uint8_t> blocks_of(const BlockLayout & layout, int64_t K, int64_t M,
                                      const std::function<uint8_t(size_t)> & byte) {
    const size_t size = ggml_type_size(layout.type);
    std::vector<uint8_t> data(ggml_row_size(layout.type, K) * M);
    std::uniform_real_distribution<float> unit(-0.01f, 0.01f);
    for (size_t i = 0; i < data.size(); i++) {
        data[i] = byte(i % size);
    }
    for (size_t i = 0; i < data.size(); i += size) {
        set_half(&data[i + layout.unit], unit(random_engine()));
        if (layout.min >= 0) {
            set_half(&data[i + layout.min], unit(random_engine()));
        }
    }
    return data;
}

struct MulMatCase {
    BlockLayout layout;
    int64_t K, M, n;
    std::vector<uint8_t> w;
    Floats x;

    size_t row_size() const { return ggml_row_size(layout.type, K); }

    // n columns, some of them not ordinary
    MulMatCase(const BlockLayout & block_layout, int64_t k, int64_t m, int64_t n_columns, std::vector<uint8_t> weights)
        : layout(block_layout), K(k), M(m), n(n_columns), w(std::move(weights)), x(normal(k * n_columns)) {
        for (int64_t c = 0; c < n; c++) {
            float * column = &x[c * K];
            switch (c % 12) {
            case 1: // an outlier
                column[K / 3] = 80.0f;
                break;
            case 3: // a super-block of zeros, and one that counts as zeros
                std::fill_n(column, SUPER, c % 2 ? 0.0f : -0.0f);
                std::fill_n(column + K - SUPER, SUPER, 1e-33f);
                break;
            case 5: // the largest sum
                std::fill_n(column, K, 1.0f);
                break;
            case 7: // halves between integers
                for (int64_t i = 0; i < K; i++) {
                    column[i] = i % SUPER == 0 ? 2047.0f : (float) (i % 99) - 49.5f;
                }
                break;
            case 8:
                std::transform(column, column + K, column, [](float v) { return v * 1e20f; });
                break;
            default:
                break;
            }
        }
    }
};

// Columns first..first+T*L-1 as [K,T,L]. apart: every second row of a wider tensor is the weight.
inline Floats mul_mat_run(const MulMatCase & c, int64_t first, int64_t T, int64_t L, int n_threads,
                          bool apart = false) {
    Run run(3 * c.w.size() + 3 * (c.K + c.M) * T * L * sizeof(float));
    ggml_tensor * w;
    if (apart) {
        std::vector<uint8_t> wide(2 * c.w.size(), 0xFF);
        for (int64_t r = 0; r < c.M; r++) {
            std::copy_n(&c.w[r * c.row_size()], c.row_size(), &wide[(2 * r + 1) * c.row_size()]);
        }
        w = ggml_view_2d(run.ctx(), run.source({c.K, 2 * c.M}, wide.data(), c.layout.type), c.K, c.M, 2 * c.row_size(),
                         c.row_size());
        ggml_backend_view_init(w);
    } else {
        w = run.source({c.K, c.M}, c.w.data(), c.layout.type);
    }
    ggml_tensor * x = run.source({c.K, T, L}, &c.x[first * c.K]);
    ggml_tensor * y = run.result(ggml_dflash_mul_mat(run.ctx(), w, x));
    run.compute({y}, n_threads, Beside::NOTHING); // columns of 1e20: what is allowed depends on the column
    return Run::floats(y);
}

// A super-block of weights as the definition sees it: w[i] = unit * q[i] - min * mins[i/32]. The integers come from
// ggml's own dequantisation of a block whose half floats have been replaced by one and zero.
struct PlainWeights {
    int64_t q[SUPER], mins[SUPER / 32];
    float units[SUPER / 32], min = 0.0f;

    PlainWeights(const BlockLayout & layout, const uint8_t * data) {
        const size_t size = ggml_type_size(layout.type);
        std::vector<uint8_t> block(data, data + size * layout.blocks);
        Floats values(SUPER);
        const auto decode = [&](float unit, float min_unit) {
            for (int b = 0; b < layout.blocks; b++) {
                set_half(&block[b * size + layout.unit], unit);
                if (layout.min >= 0) {
                    set_half(&block[b * size + layout.min], min_unit);
                }
            }
            ggml_get_type_traits(layout.type)->to_float(block.data(), values.data(), SUPER);
        };
        for (int sub = 0; sub < SUPER / 32; sub++) {
            units[sub] = get_half(data + sub * layout.blocks / 8 * size + layout.unit);
        }
        decode(1.0f, 0.0f);
        std::copy(values.begin(), values.end(), q);
        std::fill_n(mins, SUPER / 32, 0);
        if (layout.min >= 0) {
            min = get_half(data + layout.min);
            decode(0.0f, -1.0f);
            for (int sub = 0; sub < SUPER / 32; sub++) {
                mins[sub] = (int64_t) values[32 * sub];
            }
        }
    }
};

struct PlainColumn {
    int64_t q[SUPER];
    float d;

    PlainColumn(const float * x, int64_t limit) {
        float max = 0.0f;
        for (int64_t i = 0; i < SUPER; i++) {
            max = std::max(max, std::fabs(x[i]));
        }
        const bool zero = max < 0x1p-100f;
        d = zero ? 0.0f : max / (float) limit;
        const float inverse = zero ? 0.0f : (float) limit / max;
        for (int64_t i = 0; i < SUPER; i++) {
            q[i] = (int64_t) std::nearbyint(x[i] * inverse);
        }
    }
};

// One number of the result, as ggml_patches/README.md says.
inline float mul_mat_definition(const MulMatCase & c, int64_t row, int64_t column) {
    const bool per_32 = c.layout.blocks == 8;
    const size_t super_size = ggml_type_size(c.layout.type) * c.layout.blocks;
    float y = 0.0f;
    for (int64_t b = 0; b < c.K / SUPER; b++) {
        const PlainWeights w(c.layout, &c.w[row * c.row_size() + b * super_size]);
        const PlainColumn x(&c.x[column * c.K + b * SUPER], per_32 ? 32767 : 2047);
        int64_t s = 0, m = 0, parts[8] = {};
        for (int i = 0; i < SUPER; i++) {
            s += w.q[i] * x.q[i];
            parts[i / 32] += w.q[i] * x.q[i];
            m += w.mins[i / 32] * x.q[i];
        }
        if (s != (int32_t) s) {
            die("the definition of mul_mat overflows");
        }
        if (per_32) {
            volatile float p[8]; // no fusing of these products with the sums
            for (int sub = 0; sub < 8; sub++) {
                p[sub] = w.units[sub] * (float) parts[sub];
            }
            y = std::fma(x.d, ((p[0] + p[2]) + (p[1] + p[3])) + ((p[4] + p[6]) + (p[5] + p[7])), y);
        } else {
            y = std::fma(w.units[0] * x.d, (float) s, y);
        }
        if (c.layout.min >= 0) {
            y = std::fma(-(w.min * x.d), (float) m, y);
        }
    }
    return y;
}
