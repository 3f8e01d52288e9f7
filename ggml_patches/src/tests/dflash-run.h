#pragma once

// One run of a graph: sources and results between guard bytes in one piece of memory, results poisoned with NaN. The
// piece goes to the device in one copy and comes back in one. On a device other than the CPU the same graph then runs
// on the CPU from the same bytes, and every tensor is compared.

#include "dflash-backend.h"
#include "dflash-tolerances.h"

#include "dflash-counter.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

enum class Beside { CPU, NOTHING };

// Whether source i of a node may differ afterwards.
inline bool is_written(const ggml_tensor * node, int i) {
    if (node->op != GGML_OP_DFLASH) {
        return false;
    }
    switch (ggml_dflash_get_op(node)) {
    case GGML_DFLASH_OP_GDN_VERIFY:
        return i == 5 || i == 6;
    case GGML_DFLASH_OP_GDN_ADVANCE:
        return i == 5;
    case GGML_DFLASH_OP_CONV_VERIFY:
    case GGML_DFLASH_OP_CONV_ADVANCE:
        return i == 2;
    case GGML_DFLASH_OP_GDN_COMMIT:
    case GGML_DFLASH_OP_CONV_COMMIT:
    case GGML_DFLASH_OP_PENALISE:
        return i == 0;
    case GGML_DFLASH_OP_ACCEPT:
        return i == 4 || i == 5 || i == 6;
    default:
        return false;
    }
}

class Run {
  public:
    explicit Run(size_t bytes) {
        ggml_init_params params = {512 * ggml_tensor_overhead() + 4 * ggml_graph_overhead(), nullptr, true};
        ctx_ = ggml_init(params);
        if (!ctx_) {
            die("no memory");
        }
        buffer_ = backend().room(bytes + (1 << 20));
        align_ = ggml_backend_buffer_get_alignment(buffer_);
    }

    ~Run() { ggml_free(ctx_); }

    Run(const Run &) = delete;

    ggml_context * ctx() { return ctx_; }

    // A tensor full of NaN (as F32 and F16), or of -1.
    ggml_tensor * empty(ggml_type type, const std::vector<int64_t> & ne) {
        return place(ggml_new_tensor(ctx_, type, (int) ne.size(), ne.data()));
    }

    ggml_tensor * source(const std::vector<int64_t> & ne, const void * data, ggml_type type = GGML_TYPE_F32) {
        ggml_tensor * t = empty(type, ne);
        set(t, data);
        return t;
    }

    ggml_tensor * source(const std::vector<int64_t> & ne, const std::vector<float> & data) {
        ggml_tensor * t = empty(GGML_TYPE_F32, ne);
        if (ggml_nelements(t) != (int64_t) data.size()) {
            die("a test gives a tensor the wrong number of values");
        }
        set(t, data.data());
        return t;
    }

    ggml_tensor * source(const std::vector<int32_t> & data) {
        return source({(int64_t) data.size()}, data.data(), GGML_TYPE_I32);
    }

    // A tensor of the type, shape and strides of another, so many bytes behind an aligned address.
    ggml_tensor * source_like(const ggml_tensor * like, const std::vector<uint8_t> & bytes, size_t shift) {
        ggml_tensor * t = ggml_dup_tensor(ctx_, like);
        std::copy_n(like->nb, GGML_MAX_DIMS, t->nb);
        place(t, shift);
        set(t, bytes.data());
        return t;
    }

    // A result of a constructor: gets memory, or shows why there is none.
    ggml_tensor * result(ggml_tensor * t) {
        if (!t) {
            counter().expect(false, "refused: %s", ggml_dflash_last_error());
            die("a case of the table was refused");
        }
        if (t->view_src) {
            ggml_backend_view_init(t);
            return t;
        }
        return place(t);
    }

    // Runs the nodes in this order. Afterwards every tensor can be read.
    void compute(const std::vector<ggml_tensor *> & nodes, int n_threads, Beside beside = Beside::CPU) {
        for (ggml_tensor * node : nodes) {
            counter().expect(ggml_backend_dev_supports_op(backend().device, node), "supports_op refuses: %s",
                             node->op != GGML_OP_DFLASH ? ggml_op_name(node->op)
                             : ggml_dflash_check(node)  ? ggml_dflash_check(node)
                                                        : "no kernel");
        }
        const std::vector<uint8_t> before = image_;
        upload();
        execute(backend(), graph(nodes), n_threads);
        download();
        check_untouched(nodes, before);
        if (beside == Beside::CPU && !backend().is_cpu()) {
            compare_with_cpu(nodes, before);
        }
    }

    // The same, but the host waits behind every node.
    void compute_apart(const std::vector<ggml_tensor *> & nodes) {
        graph(nodes); // marks them as nodes to compute
        upload();
        for (ggml_tensor * node : nodes) {
            ggml_cgraph * single = ggml_new_graph_custom(ctx_, 8, false);
            ggml_graph_add_node(single, node);
            execute(backend(), single, 1);
        }
        download();
    }

    static std::vector<float> floats(const ggml_tensor * t) {
        std::vector<float> data(ggml_nelements(t));
        ggml_backend_tensor_get(t, data.data(), 0, data.size() * sizeof(float));
        return data;
    }

    static std::vector<int32_t> ints(const ggml_tensor * t) {
        std::vector<int32_t> data(ggml_nelements(t));
        ggml_backend_tensor_get(t, data.data(), 0, data.size() * sizeof(int32_t));
        return data;
    }

    // All bytes of the run: what is to be uploaded, or what the last run left.
    std::vector<uint8_t> & image() { return image_; }

  private:
    static constexpr size_t GUARD = 64;
    static constexpr uint8_t PATTERN = 0xA5;

    struct Place {
        ggml_tensor * tensor;
        size_t offset;
    };

    // A tensor starts aligned; what follows its last byte, the device's own padding included, is guarded.
    ggml_tensor * place(ggml_tensor * t, size_t shift = 0) {
        const size_t at = (image_.size() + GUARD + align_ - 1) / align_ * align_ + shift;
        const size_t reserved = std::max(ggml_nbytes(t), ggml_backend_buffer_get_alloc_size(buffer_, t));
        if (at + reserved + GUARD > ggml_backend_buffer_get_size(buffer_)) {
            die("the memory of a run is too small");
        }
        char * base = (char *) ggml_backend_buffer_get_base(buffer_);
        if (ggml_backend_tensor_alloc(buffer_, t, base + at) != GGML_STATUS_SUCCESS) {
            die("a tensor does not fit");
        }
        image_.resize(at + reserved + GUARD, PATTERN);
        // NaN; but -1, which all ones are as an integer, is what the ops write for no token
        std::fill_n(image_.begin() + at, ggml_nbytes(t), t->type == GGML_TYPE_I32 ? 0x5A : 0xFF);
        places_.push_back({t, at});
        return t;
    }

    void set(const ggml_tensor * t, const void * data) { std::memcpy(&image_[offset_of(t)], data, ggml_nbytes(t)); }

    size_t offset_of(const ggml_tensor * t) const {
        return (size_t) ((char *) t->data - (char *) ggml_backend_buffer_get_base(buffer_));
    }

    // a tensor over all bytes of the run
    ggml_tensor * whole() {
        ggml_tensor * t = ggml_new_tensor_1d(ctx_, GGML_TYPE_I8, (int64_t) image_.size());
        ggml_backend_tensor_alloc(buffer_, t, ggml_backend_buffer_get_base(buffer_));
        return t;
    }

    void upload() { ggml_backend_tensor_set(whole(), image_.data(), 0, image_.size()); }

    void download() { ggml_backend_tensor_get(whole(), image_.data(), 0, image_.size()); }

    ggml_cgraph * graph(const std::vector<ggml_tensor *> & nodes) {
        ggml_cgraph * g = ggml_new_graph_custom(ctx_, 256, false);
        for (ggml_tensor * node : nodes) {
            ggml_build_forward_expand(g, node);
        }
        return g;
    }

    static void execute(Backend & on, ggml_cgraph * g, int n_threads) {
        if (on.set_n_threads) {
            on.set_n_threads(on.handle, n_threads);
        }
        if (ggml_backend_graph_compute(on.handle, g) != GGML_STATUS_SUCCESS) {
            die("graph compute failed");
        }
    }

    // Nothing but results and written sources differs from what it was.
    void check_untouched(const std::vector<ggml_tensor *> & nodes, std::vector<uint8_t> before) {
        const auto allow = [&](const ggml_tensor * t) {
            std::copy_n(image_.begin() + (ptrdiff_t) offset_of(t), ggml_nbytes(t),
                        before.begin() + (ptrdiff_t) offset_of(t));
        };
        for (const ggml_tensor * node : nodes) {
            allow(node);
            for (int i = 0; i < GGML_MAX_SRC; i++) {
                if (node->src[i] && (is_written(node, i) || node->src[i]->op != GGML_OP_NONE)) {
                    allow(node->src[i]);
                }
            }
        }
        const size_t at = std::mismatch(before.begin(), before.end(), image_.begin()).first - before.begin();
        counter().expect(at == before.size(), "byte %zu was written: a guard, or a source that is only read", at);
    }

    // The graph once more on the CPU, from the bytes that the device had, in tensors of its own.
    void compare_with_cpu(const std::vector<ggml_tensor *> & nodes, const std::vector<uint8_t> & before) {
        ggml_backend_buffer_t memory = cpu_backend().room(before.size());
        char * base = (char *) ggml_backend_buffer_get_base(memory);
        std::memcpy(base, before.data(), before.size());

        std::map<const ggml_tensor *, std::unique_ptr<ggml_tensor>> twins;
        const auto twin = [&](const auto & self, const ggml_tensor * t) -> ggml_tensor * {
            std::unique_ptr<ggml_tensor> & copy = twins[t];
            if (!copy) {
                copy = std::make_unique<ggml_tensor>(*t);
                copy->buffer = memory;
                copy->data = base + offset_of(t);
                copy->view_src = t->view_src ? self(self, t->view_src) : nullptr;
                for (ggml_tensor *& source : copy->src) {
                    source = source ? self(self, source) : nullptr;
                }
            }
            return copy.get();
        };
        std::vector<ggml_tensor *> copies;
        double allowed = 0.0;
        for (const ggml_tensor * node : nodes) {
            copies.push_back(twin(twin, node));
            allowed = std::max(allowed, tolerance(rule_of(backend().kind, node)));
        }
        execute(cpu_backend(), graph(copies), 1);
        for (const Place & p : places_) {
            compare(p, base, allowed);
        }
    }

    // F32 within the tolerance (NaN where the CPU has NaN, and nowhere else), everything else to the bit.
    void compare(const Place & p, const char * cpu, double allowed) {
        const size_t n = ggml_nbytes(p.tensor);
        const uint8_t * a = &image_[p.offset];
        const char * b = cpu + p.offset;
        if (std::memcmp(a, b, n) == 0) {
            counter().expect(true, "the same bits");
            return;
        }
        double worst = INFINITY;
        if (p.tensor->type == GGML_TYPE_F32) {
            worst = 0.0;
            for (size_t i = 0; i < n; i += sizeof(float)) {
                float x, y;
                std::memcpy(&x, a + i, sizeof(x));
                std::memcpy(&y, b + i, sizeof(y));
                const bool same = std::memcmp(&x, &y, sizeof(x)) == 0 || (std::isnan(x) && std::isnan(y));
                const double d = same ? 0.0 : std::fabs((double) x - y);
                worst = d <= worst ? worst : std::isnan(d) ? INFINITY : d;
            }
        }
        counter().expect(worst <= allowed, "off by %g from the CPU, allowed %g: a tensor of %s [%d,%d,%d,%d]", worst,
                         allowed, ggml_op_name(p.tensor->op), (int) p.tensor->ne[0], (int) p.tensor->ne[1],
                         (int) p.tensor->ne[2], (int) p.tensor->ne[3]);
    }

    ggml_context * ctx_;
    ggml_backend_buffer_t buffer_;
    size_t align_ = 1;
    std::vector<uint8_t> image_;
    std::vector<Place> places_;
};
