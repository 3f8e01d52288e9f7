#pragma once

// Parts of the walk over what a backend is asked: changes to a node, one each, and running a node that is accepted with
// data made for it.

#include "dflash-refused-nodes.h"
#include "dflash-tokens.h"

struct Change {
    std::string what;
    bool in_sources; // a constructor that is given these sources can see it
    std::function<void(ggml_context *, ggml_tensor *)> apply;
};

inline void make_contiguous(ggml_tensor * t) {
    t->nb[0] = ggml_type_size(t->type);
    for (int d = 1; d < GGML_MAX_DIMS; d++) {
        t->nb[d] = t->nb[d - 1] * (size_t) (d == 1 ? t->ne[0] / ggml_blck_size(t->type) : t->ne[d - 1]);
    }
}

// Smallest step of a stride: what an element needs.
inline size_t stride_step(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_I32 ? 4 : 2;
}

// Every source one off in every dimension, in other types, apart, missing, and one more.
inline std::vector<Change> source_changes(const ggml_tensor * node) {
    std::vector<Change> changes;
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        const std::string source = "source " + std::to_string(i);
        const auto add = [&](const std::string & what, const std::function<void(ggml_tensor *)> & change) {
            changes.push_back(
                {source + what, true, [i, change](ggml_context *, ggml_tensor * n) { change(n->src[i]); }});
        };
        if (!node->src[i]) {
            changes.push_back(
                {source + " set", false, [i](ggml_context * ctx, ggml_tensor * n) { n->src[i] = f32(ctx, {4}); }});
            continue;
        }
        changes.push_back({source + " missing", true, [i](ggml_context *, ggml_tensor * n) { n->src[i] = nullptr; }});
        for (int d = 0; d < GGML_MAX_DIMS; d++) {
            for (int64_t by : {-1, 1}) {
                add(" size of dimension " + std::to_string(d) + (by < 0 ? " less" : " more"), [d, by](ggml_tensor * t) {
                    t->ne[d] += by;
                    make_contiguous(t);
                });
            }
        }
        for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_I32, GGML_TYPE_Q8_0,
                               GGML_TYPE_Q4_0, GGML_TYPE_I64}) {
            if (type != node->src[i]->type) {
                add(std::string(" as ") + ggml_type_name(type), [type](ggml_tensor * t) {
                    t->type = type;
                    make_contiguous(t);
                });
            }
        }
        for (int d = 0; d < GGML_MAX_DIMS; d++) {
            add(" stride of dimension " + std::to_string(d) + " larger", [d](ggml_tensor * t) {
                for (int i = d; i < GGML_MAX_DIMS; i++) { // as views of a wider tensor have them
                    t->nb[i] = d == i ? t->nb[i] + stride_step(t) : t->nb[i - 1] * (size_t) t->ne[i - 1];
                }
            });
            add(" stride of dimension " + std::to_string(d) + " odd", [d](ggml_tensor * t) { t->nb[d]++; });
        }
        add(" transposed", [](ggml_tensor * t) {
            std::swap(t->ne[0], t->ne[1]);
            std::swap(t->nb[0], t->nb[1]);
        });
    }
    return changes;
}

// Parameters and result, which a constructor does not take from anybody.
inline std::vector<Change> node_changes() {
    std::vector<Change> changes;
    for (int i = 0; i < (int) (GGML_MAX_OP_PARAMS / sizeof(int32_t)); i++) {
        for (int32_t by : {-1, 1}) {
            changes.push_back({"parameter " + std::to_string(i) + (by < 0 ? " less" : " more"), false,
                               [i, by](ggml_context *, ggml_tensor * n) { n->op_params[i] += by; }});
        }
    }
    for (int d = 0; d < GGML_MAX_DIMS; d++) {
        changes.push_back(
            {"result larger in dimension " + std::to_string(d), false, [d](ggml_context *, ggml_tensor * n) {
                 n->ne[d]++;
                 make_contiguous(n);
             }});
        changes.push_back({"result apart in dimension " + std::to_string(d), false,
                           [d](ggml_context *, ggml_tensor * n) { n->nb[d] += 4; }});
    }
    for (ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_I32}) {
        changes.push_back(
            {std::string("result as ") + ggml_type_name(type), false, [type](ggml_context *, ggml_tensor * n) {
                 n->type = type;
                 make_contiguous(n);
             }});
    }
    return changes;
}

//
// running an accepted node
//

inline int64_t rows_per_lane(const ggml_tensor * node) {
    switch (ggml_dflash_get_op(node)) {
    case GGML_DFLASH_OP_CONV_VERIFY:
    case GGML_DFLASH_OP_CONV_ADVANCE:
        return node->ne[1];
    case GGML_DFLASH_OP_SAMPLE:
    case GGML_DFLASH_OP_PENALISE:
        return node->src[0]->ne[1];
    case GGML_DFLASH_OP_ACCEPT:
        return node->src[0]->ne[0];
    case GGML_DFLASH_OP_PLACE:
        return node->op_params[1];
    default:
        return node->ne[2];
    }
}

// A word of pair i of n: 0.5 for every third id, and the last pair ends the list.
inline int64_t bias_word(int64_t word, int64_t i, int64_t n) {
    return word == 1 ? 0x3F000000 : i + 1 < n ? 3 * i : -1;
}

// Numbers for an I32 source: mostly live lanes, and of every kind some that are not.
inline Ints integers_for(const ggml_tensor * node, const std::string & name, const ggml_tensor * source) {
    const int64_t n = ggml_nelements(source), T = rows_per_lane(node);
    if (name == "sampling") {
        std::vector<Drawing> lanes(n / GGML_DFLASH_SAMPLING_WORDS);
        for (size_t lane = 1; lane < lanes.size(); lane += 2) {
            lanes[lane] = {lane, 0.8f, 5, 0.9, -2.0f};
        }
        return sampling_columns(lanes);
    }
    const bool is_attention = ggml_dflash_get_op(node) == GGML_DFLASH_OP_ATTENTION;
    const int64_t n_pages = is_attention ? node->src[1]->ne[2] / 16 : 90;
    Ints x(n);
    for (int64_t i = 0; i < n; i++) {
        const int64_t list = i / source->ne[0], at = i % source->ne[0];
        const int64_t value = name == "slots"                     ? n - 1 - i
                              : name == "n_pending"               ? i % 2
                              : name == "n_rows"                  ? T - i % 2
                              : name == "base"                    ? 5 * i
                              : name == "table" || name == "ring" ? 7 * i % n_pages
                              : name == "anchors"                 ? i % 8
                              : name == "bias"                    ? bias_word(at, list % source->ne[1], source->ne[1])
                              : name == "block"                   ? 3 * list + (at + 4) % 5 // of tokens, a row later
                                                                  : 3 * list + at % 5;      // tokens, history
        x[i] = (int32_t) value;
    }
    return x;
}

inline Floats numbers_for(const ggml_tensor * node, const std::string & name, const ggml_tensor * source) {
    const bool is_gdn = name == "q" || name == "k" ? node->op == GGML_OP_GATED_DELTA_NET ||
                                                         ggml_dflash_get_op(node) != GGML_DFLASH_OP_ATTENTION
                                                   : false;
    const float deviation = is_gdn            ? 1.0f / std::sqrt((float) source->ne[0])
                            : name == "log"   ? 0.1f
                            : name == "state" ? 0.5f
                                              : 1.0f;
    Floats x = normal(ggml_nelements(source), deviation);
    for (float & value : x) {
        value = name == "g"           ? -std::fabs(value)
                : name == "beta"      ? 1.0f / (1.0f + std::exp(-value))
                : name == "penalties" ? 1.0f + std::fabs(value)
                                      : value;
    }
    return x;
}

// Rows where the strides of the source say; what lies between is NaN.
inline std::vector<uint8_t> bytes_for(const ggml_tensor * node, const std::string & name, const ggml_tensor * source) {
    const int64_t width = source->ne[0];
    const size_t row_size = ggml_row_size(source->type, width);
    std::vector<uint8_t> rows(row_size * ggml_nrows(source)), bytes(ggml_nbytes(source), 0xFF);
    if (source->type == GGML_TYPE_I32) {
        const Ints x = integers_for(node, name, source);
        std::memcpy(rows.data(), x.data(), rows.size());
    } else {
        const Floats x = numbers_for(node, name, source);
        if (source->type == GGML_TYPE_F32) {
            std::memcpy(rows.data(), x.data(), rows.size());
        } else {
            ggml_quantize_chunk(source->type, x.data(), rows.data(), 0, ggml_nrows(source), width, nullptr);
        }
    }
    size_t from = 0;
    for (int64_t i = 0; i < ggml_nrows(source); i++, from += row_size) {
        const size_t to = i % source->ne[1] * source->nb[1] + i / source->ne[1] % source->ne[2] * source->nb[2] +
                          i / source->ne[1] / source->ne[2] * source->nb[3];
        std::copy_n(&rows[from], row_size, &bytes[to]);
    }
    return bytes;
}

// What is done with an accepted node. ASKED: nothing more; SHIFTED: run with every source one element behind an aligned
// address, as a view may have it.
enum class Walk { ASKED, PLAIN, WITH_THREADS, SHIFTED };

inline void walk_run(const ggml_tensor * node, const std::vector<const char *> & names, Walk how) {
    size_t bytes = ggml_nbytes(node) + 4096 * GGML_MAX_SRC;
    for (const ggml_tensor * source : node->src) {
        bytes += source ? ggml_nbytes(source) : 0;
    }
    Run run(bytes);
    ggml_tensor * copy = ggml_dup_tensor(run.ctx(), node);
    copy->op = node->op;
    copy->view_offs = node->view_offs;
    std::copy(std::begin(node->op_params), std::end(node->op_params), copy->op_params);
    for (size_t i = 0; i < names.size(); i++) {
        const ggml_tensor * source = node->src[i];
        if (source) {
            copy->src[i] = run.source_like(source, bytes_for(node, names[i], source),
                                           how == Walk::SHIFTED ? stride_step(source) : 0);
            copy->view_src = node->view_src == source ? copy->src[i] : copy->view_src;
        }
    }
    run.result(copy);
    const std::vector<uint8_t> before = run.image();
    run.compute({copy}, 1);
    if (how == Walk::WITH_THREADS && backend().is_cpu()) {
        const std::vector<uint8_t> once = run.image();
        run.image() = before;
        run.compute({copy}, 2);
        counter().expect(run.image() == once, "two threads give other bytes");
    }
}
