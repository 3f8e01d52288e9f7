#pragma once

// Timing of single ops on one device: n nodes of a kind in one graph, each with memory of its own, so that neither a
// cache nor a single launch decides; the median over replays, divided by n.

#include "dflash-backend.h"
#include "ggml-alloc.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <random>

typedef std::vector<int32_t> Ints;

// Sources of the nodes of one graph. Numbers are noise, counts and places are given.
class Sources {
  public:
    explicit Sources(int n_nodes) {
        const size_t n_tensors = (size_t) n_nodes * 48 + 64;
        ggml_init_params params = {n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false) +
                                       (1 << 16),
                                   nullptr, true};
        ctx_ = ggml_init(params);
        graph_ = ggml_new_graph_custom(ctx_, n_tensors, false);
    }

    ~Sources() {
        ggml_backend_buffer_free(buffer_);
        ggml_free(ctx_);
    }

    Sources(const Sources &) = delete;

    ggml_context * ctx() { return ctx_; }

    ggml_cgraph * graph() { return graph_; }

    ggml_tensor * noise(const std::vector<int64_t> & ne, ggml_type type = GGML_TYPE_F32) {
        ggml_tensor * t = ggml_new_tensor(ctx_, type, (int) ne.size(), ne.data());
        noise_.push_back(t);
        return t;
    }

    // The same tensor whenever the key is: weights that all nodes share.
    ggml_tensor * shared(int key, const std::vector<int64_t> & ne, ggml_type type) {
        ggml_tensor *& t = shared_[key];
        t = t ? t : noise(ne, type);
        return t;
    }

    ggml_tensor * ints(const Ints & values, std::vector<int64_t> ne = {}) {
        ne = ne.empty() ? std::vector<int64_t>{(int64_t) values.size()} : ne;
        ggml_tensor * t = ggml_new_tensor(ctx_, GGML_TYPE_I32, (int) ne.size(), ne.data());
        ints_.push_back({t, values});
        return t;
    }

    ggml_tensor * floats(const std::vector<float> & values, const std::vector<int64_t> & ne) {
        Ints bits(values.size());
        std::memcpy(bits.data(), values.data(), values.size() * sizeof(float));
        ggml_tensor * t = ints(bits, ne);
        t->type = GGML_TYPE_F32;
        return t;
    }

    // Memory for everything, and contents. -> false if the device has not enough
    bool place(const Backend & on) {
        buffer_ = ggml_backend_alloc_ctx_tensors(ctx_, on.handle);
        if (!buffer_) {
            return false;
        }
        for (const auto & entry : ints_) {
            ggml_backend_tensor_set(entry.first, entry.second.data(), 0, ggml_nbytes(entry.first));
        }
        for (ggml_tensor * t : noise_) {
            const std::vector<uint8_t> & block = noise_block(t->type);
            for (size_t at = 0; at < ggml_nbytes(t); at += block.size()) {
                ggml_backend_tensor_set(t, block.data(), at, std::min(block.size(), ggml_nbytes(t) - at));
            }
        }
        return true;
    }

  private:
    // 2^21 numbers of size 0.1 as a type stores them; whole blocks, so that it can be repeated
    static const std::vector<uint8_t> & noise_block(ggml_type type) {
        static std::vector<uint8_t> blocks[GGML_TYPE_COUNT];
        std::vector<uint8_t> & block = blocks[type];
        if (block.empty()) {
            std::mt19937 engine(7);
            std::normal_distribution<float> normal(0.0f, 0.1f);
            std::vector<float> values((size_t) 1 << 21);
            for (float & x : values) {
                x = normal(engine);
            }
            block.resize(ggml_row_size(type, (int64_t) values.size()));
            if (type == GGML_TYPE_F32) {
                std::memcpy(block.data(), values.data(), block.size());
            } else {
                ggml_quantize_chunk(type, values.data(), block.data(), 0, (int64_t) values.size() / 256, 256, nullptr);
            }
        }
        return block;
    }

    ggml_context * ctx_;
    ggml_cgraph * graph_;
    ggml_backend_buffer_t buffer_ = nullptr;
    std::vector<ggml_tensor *> noise_;
    std::vector<std::pair<ggml_tensor *, Ints>> ints_;
    std::map<int, ggml_tensor *> shared_;
};

typedef std::function<ggml_tensor *(Sources &)> Build;

constexpr double NOT_MEASURED = -1.0;

// Microseconds of one node, or NOT_MEASURED when the device refuses a node or has not enough memory.
inline double time_of(Backend & on, int n_nodes, const Build & build) {
    Sources sources(n_nodes);
    for (int i = 0; i < n_nodes; i++) {
        ggml_tensor * node = build(sources);
        if (!node) {
            std::fprintf(stderr, "refused: %s\n", ggml_dflash_last_error());
            return NOT_MEASURED;
        }
        ggml_build_forward_expand(sources.graph(), node);
    }
    for (int i = 0; i < ggml_graph_n_nodes(sources.graph()); i++) {
        const ggml_tensor * node = ggml_graph_node(sources.graph(), i);
        if (!ggml_backend_dev_supports_op(on.device, node)) {
            std::fprintf(stderr, "%s refuses a node of %s\n", on.name.c_str(), ggml_op_desc(node));
            return NOT_MEASURED;
        }
    }
    if (!sources.place(on)) {
        return NOT_MEASURED;
    }
    const auto run = [&](int times) {
        const int64_t start = ggml_time_us();
        for (int i = 0; i < times; i++) {
            ggml_backend_graph_compute_async(on.handle, sources.graph());
        }
        ggml_backend_synchronize(on.handle);
        return (double) (ggml_time_us() - start) / times;
    };
    for (int i = 0; i < 3; i++) { // a graph is captured on its second time, where there is such a thing
        run(1);
    }
    const int times = (int) std::max(1.0, std::min(20.0, 5000.0 / run(1))); // of some milliseconds each
    std::vector<double> samples;
    for (int i = 0; i < 9; i++) {
        samples.push_back(run(times));
    }
    std::nth_element(samples.begin(), samples.begin() + samples.size() / 2, samples.end());
    return samples[samples.size() / 2] / n_nodes;
}

// Nodes in a graph: enough that their memory is far larger than a cache.
inline int node_count(double bytes, bool small) {
    const double wanted = small ? 4e6 : 400e6;
    return (int) std::max(2.0, std::min(small ? 8.0 : 256.0, std::ceil(wanted / bytes)));
}

// Bytes read and written per second by copies of a large tensor, by the backend's own copy: ggml_cpy is a kernel that
// reaches two thirds of it on an H200.
inline double copy_bandwidth(Backend & on, bool small) {
    const int64_t n = small ? (int64_t) 4 << 20 : (int64_t) 512 << 20; // of 4 bytes
    Sources sources(1);
    ggml_tensor *from = sources.noise({n}), *to = sources.noise({n});
    if (!sources.place(on)) {
        return 0.0;
    }
    std::vector<double> samples;
    for (int i = 0; i < 10; i++) {
        const int64_t start = ggml_time_us();
        ggml_backend_tensor_copy_async(on.handle, on.handle, from, to);
        ggml_backend_synchronize(on.handle);
        samples.push_back((double) (ggml_time_us() - start));
    }
    std::nth_element(samples.begin() + 1, samples.begin() + 5, samples.end()); // the first one warms up
    return 2.0 * 4.0 * (double) n / samples[5] * 1e6;
}
