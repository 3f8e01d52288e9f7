// Nodes of a graph that are taken together with the products behind them. Which are depends on the graph's structure
// alone, never on how many columns there are or where memory lies: a column's numbers must not depend on that either.
// What no other node reads is not written, so nothing is written that an input could lie under.

#include "../fuse.cuh"
#include "norm.cuh"
#include "small.cuh"

#include <initializer_list>
#include <utility>

namespace dflash {
namespace wgmma {

namespace {

constexpr int NOTHING = -1; // is known that begins here

// A walk over the nodes that compute.
struct Walk {
    const ggml_cgraph * graph;
    int at;

    ggml_tensor * node() const { return at < graph->n_nodes ? graph->nodes[at] : nullptr; }

    void advance() {
        do {
            at++;
        } while (at < graph->n_nodes && is_view(graph->nodes[at]));
    }

    // The node, if it is of this op, and on to the next.
    ggml_tensor * take(ggml_op op) {
        ggml_tensor * taken = node();
        if (taken == nullptr || taken->op != op || (taken->flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            return nullptr;
        }
        advance();
        return taken;
    }

    static bool is_view(const ggml_tensor * t) {
        return t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE ||
               t->op == GGML_OP_TRANSPOSE || t->op == GGML_OP_NONE;
    }

    // How many nodes read it; -1 if it is an output.
    int uses(const ggml_tensor * t) const {
        const size_t at_hash = ggml_hash_find(&graph->visited_hash_set, t);
        const bool is_known = ggml_bitset_get(graph->visited_hash_set.used, at_hash);
        return t->flags & GGML_TENSOR_FLAG_OUTPUT || !is_known ? -1 : graph->use_counts[at_hash];
    }

    // Whether `of` is t or all of t in another shape, and nobody else reads either.
    bool passes_to(const ggml_tensor * t, const ggml_tensor * of) const {
        while (of != t && of->op == GGML_OP_RESHAPE && uses(of) == 1) {
            of = of->src[0];
        }
        return of == t && uses(t) == 1;
    }
};

bool is_f32(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32;
}

// Packed whatever its size is. A view of one column would be packed, and of two not.
bool is_packed(const ggml_tensor * t) {
    return is_f32(t) && ggml_is_contiguous(t) && t->op != GGML_OP_VIEW;
}

bool is_product(const ggml_tensor * t) {
    return t != nullptr && t->op == GGML_OP_DFLASH && ggml_dflash_get_op(t) == GGML_DFLASH_OP_MUL_MAT &&
           Product::takes(t);
}

// Rows of `width` elements, `stride` of them apart: a matrix, or the columns of one.
bool as_columns(const ggml_tensor * t, int64_t width, int64_t n, Plain & to) {
    to = {(const float *) t->data, (int64_t) (t->nb[1] / sizeof(float))};
    if (is_packed(t) && ggml_nelements(t) == width * n) {
        to.stride = width;
        return true;
    }
    return is_f32(t) && t->ne[0] == width && t->ne[1] == n && t->ne[2] * t->ne[3] == 1 && t->nb[0] == sizeof(float);
}

// x * w: an RMS norm and its weight [width], which nothing computes: kernels read it before they wait for others
bool is_weighted(const ggml_tensor * mul, const ggml_tensor * norm) {
    return mul != nullptr && mul->src[0] == norm && mul->src[1]->op == GGML_OP_NONE && is_f32(mul->src[1]) &&
           ggml_is_contiguous(mul->src[1]) && ggml_nelements(mul->src[1]) == norm->ne[0] &&
           mul->src[1]->ne[0] == norm->ne[0];
}

// [add,] RMS norm, weight, one or two products of nothing else
int try_norm(ggml_backend_cuda_context & ctx, Walk walk) {
    const int begin = walk.at;
    const ggml_tensor * add = walk.take(GGML_OP_ADD);
    const ggml_tensor * norm = walk.take(GGML_OP_RMS_NORM);
    const ggml_tensor * mul = norm ? walk.take(GGML_OP_MUL) : nullptr;
    if (!is_weighted(mul, norm) || walk.uses(norm) != 1 || !is_packed(norm->src[0]) ||
        (add != nullptr && norm->src[0] != add)) {
        return NOTHING;
    }
    if (add != nullptr &&
        !(ggml_are_same_shape(add->src[0], add->src[1]) && is_packed(add->src[0]) && is_packed(add->src[1]))) {
        return NOTHING;
    }
    ggml_tensor * products[MAX_PRODUCTS] = {};
    int n = 0, last = walk.at;
    while (n < MAX_PRODUCTS && is_product(walk.node()) && walk.node()->src[1] == mul) {
        last = walk.at;
        products[n++] = walk.take(GGML_OP_DFLASH);
    }
    if (n == 0 || walk.uses(mul) != n || norm->ne[0] > MAX_ROW) {
        return NOTHING;
    }
    Product first(ctx, products[0]), second(ctx, products[n - 1]);
    Product * all[MAX_PRODUCTS] = {&first, &second};
    Normed node = {};
    node.x = (const float *) (add ? add->src[0] : norm->src[0])->data;
    node.y = add ? (const float *) add->src[1]->data : nullptr;
    node.sum = add ? (float *) add->data : nullptr;
    node.weight = (const float *) mul->src[1]->data;
    memcpy(&node.eps, norm->op_params, sizeof(float));
    node.n_blocks = first.node.n_blocks, node.n_columns = first.node.n_columns, node.n_targets = n;
    for (int i = 0; i < n; i++) {
        by_type(all[i]->type, [&](auto type) { allocate_columns<decltype(type)::value>(*all[i]); });
        node.targets[i] = {all[i]->type, place_of(*all[i]), {all[i]->arrived.get(), all[i]->n_counters()}};
    }
    const ggml_cuda_kernel_launch_params params(dim3(8 * first.tiles()), dim3(32 * std::min(node.n_blocks, 32)),
                                                (size_t) node.n_blocks * mm::SUPER * sizeof(float), ctx.stream());
    ggml_cuda_kernel_launch(norm_columns, params, node);
    for (int i = 0; i < n; i++) {
        multiply(ctx, *all[i]);
    }
    return last - begin;
}

// The product that a walk has come to, of columns that are computed from others, which are set here.
template <typename Source>
int multiply_columns(ggml_backend_cuda_context & ctx, const Walk & walk, int begin, Source source,
                     std::initializer_list<std::pair<const ggml_tensor *, Plain Source::*>> from) {
    Product product(ctx, walk.node());
    const int64_t K = (int64_t) product.node.n_blocks * mm::SUPER;
    for (const auto & [tensor, columns] : from) {
        if (!as_columns(tensor, K, product.node.n_columns, source.*columns)) {
            return NOTHING;
        }
    }
    prepare(ctx, product, source);
    multiply(ctx, product);
    return walk.at - begin;
}

// silu(gate) x, and a product of nothing else
int try_swiglu(ggml_backend_cuda_context & ctx, Walk walk) {
    const int begin = walk.at;
    const ggml_tensor * glu = walk.take(GGML_OP_GLU);
    if (glu == nullptr || glu->src[1] == nullptr || ggml_get_glu_op(glu) != GGML_GLU_OP_SWIGLU ||
        !is_product(walk.node()) || !walk.passes_to(glu, walk.node()->src[1])) {
        return NOTHING;
    }
    return multiply_columns<Swiglu>(ctx, walk, begin, {}, {{glu->src[0], &Swiglu::gate}, {glu->src[1], &Swiglu::x}});
}

// sigmoid(gate) x, and a product of nothing else
int try_gated(ggml_backend_cuda_context & ctx, Walk walk) {
    const int begin = walk.at;
    const ggml_tensor * gate = walk.take(GGML_OP_UNARY);
    const ggml_tensor * mul = gate ? walk.take(GGML_OP_MUL) : nullptr;
    if (mul == nullptr || ggml_get_unary_op(gate) != GGML_UNARY_OP_SIGMOID || mul->src[1] != gate ||
        walk.uses(gate) != 1 || !ggml_are_same_shape(mul, gate) || !is_product(walk.node()) ||
        !walk.passes_to(mul, walk.node()->src[1])) {
        return NOTHING;
    }
    using Source = Gated<Sigmoid>;
    return multiply_columns<Source>(ctx, walk, begin, {}, {{mul->src[0], &Source::x}, {gate->src[0], &Source::gate}});
}

// RMS norm of heads, weight, times silu(gate), and a product of nothing else
int try_normed_heads(ggml_backend_cuda_context & ctx, Walk walk) {
    const int begin = walk.at;
    const ggml_tensor * norm = walk.take(GGML_OP_RMS_NORM);
    const ggml_tensor * mul = norm ? walk.take(GGML_OP_MUL) : nullptr;
    const ggml_tensor * glu = mul ? walk.take(GGML_OP_GLU) : nullptr;
    if (glu == nullptr || norm->ne[0] != NormedHeads::HEAD_WIDTH || !is_weighted(mul, norm) || walk.uses(norm) != 1 ||
        glu->src[1] == nullptr || ggml_get_glu_op(glu) != GGML_GLU_OP_SWIGLU || !walk.passes_to(mul, glu->src[1]) ||
        !is_product(walk.node()) || !walk.passes_to(glu, walk.node()->src[1])) {
        return NOTHING;
    }
    NormedHeads source = {};
    source.weight = (const float *) mul->src[1]->data;
    memcpy(&source.eps, norm->op_params, sizeof(float));
    return multiply_columns<NormedHeads>(ctx, walk, begin, source,
                                         {{norm->src[0], &NormedHeads::x}, {glu->src[0], &NormedHeads::gate}});
}

// softplus(alpha + bias) a, and sigmoids of the product that alpha is the first rows of
int try_gates(ggml_backend_cuda_context & ctx, Walk walk) {
    const int begin = walk.at;
    const ggml_tensor * add = walk.take(GGML_OP_ADD);
    const ggml_tensor * plus = add ? walk.take(GGML_OP_UNARY) : nullptr;
    const ggml_tensor * decay = plus ? walk.take(GGML_OP_MUL) : nullptr;
    const ggml_tensor * gates = walk.node();
    if (decay == nullptr || gates == nullptr || gates->op != GGML_OP_UNARY ||
        ggml_get_unary_op(plus) != GGML_UNARY_OP_SOFTPLUS || ggml_get_unary_op(gates) != GGML_UNARY_OP_SIGMOID ||
        plus->src[0] != add || decay->src[0] != plus || walk.uses(add) != 1 || walk.uses(plus) != 1) {
        return NOTHING;
    }
    const ggml_tensor *x = gates->src[0], *alpha = add->src[0], *bias = add->src[1], *a = decay->src[1];
    const int64_t h = alpha->ne[0];
    for (const ggml_tensor * vector : {bias, a}) {
        if (!is_f32(vector) || !ggml_is_contiguous(vector) || ggml_nelements(vector) != h || vector->ne[0] != h) {
            return NOTHING;
        }
    }
    if (alpha->op != GGML_OP_VIEW || alpha->view_src != x || alpha->view_offs != 0 || !is_f32(x) ||
        !ggml_is_contiguous(x) || x->ne[2] * x->ne[3] != 1 || alpha->ne[1] != x->ne[1] || alpha->nb[1] != x->nb[1] ||
        !ggml_is_contiguous(decay) || ggml_nelements(x) > INT32_MAX) {
        return NOTHING;
    }
    const Gates node = {(const float *) x->data, (const float *) bias->data,
                        (const float *) a->data, (float *) decay->data,
                        (float *) gates->data,   (int) h,
                        (int) x->ne[0],          (int) x->ne[1]};
    const ggml_cuda_kernel_launch_params params(dim3((unsigned) ((ggml_nelements(x) + 255) / 256)), dim3(256),
                                                (size_t) 0, ctx.stream());
    ggml_cuda_kernel_launch(gates_of, params, node);
    return walk.at - begin;
}

// RMS norm and weight of heads, where no rotation follows: upstream takes that together
int try_heads(ggml_backend_cuda_context & ctx, Walk walk) {
    const int begin = walk.at;
    const ggml_tensor * norm = walk.take(GGML_OP_RMS_NORM);
    const ggml_tensor * mul = walk.node();
    if (norm == nullptr || mul == nullptr || mul->op != GGML_OP_MUL || !is_weighted(mul, norm) ||
        walk.uses(norm) != 1 || norm->ne[0] != NormedHeads::HEAD_WIDTH || ggml_nrows(norm) > INT32_MAX) {
        return NOTHING;
    }
    const ggml_tensor * x = norm->src[0];
    const int at = walk.at;
    walk.advance();
    if (!is_f32(x) || x->nb[0] != sizeof(float) || (x->nb[1] | x->nb[2] | x->nb[3] | (uintptr_t) x->data) % 16 != 0 ||
        (walk.node() != nullptr && walk.node()->op == GGML_OP_ROPE)) {
        return NOTHING;
    }
    HeadNorms node = {(const float *) x->data, (const float *) mul->src[1]->data, (float *) mul->data, {}, 0, 0, 0, 0};
    for (int i = 0; i < 3; i++) {
        node.strides[i] = (int64_t) (x->nb[i + 1] / sizeof(float));
    }
    node.n1 = (int) x->ne[1], node.n2 = (int) x->ne[2], node.n_rows = (int) ggml_nrows(x);
    memcpy(&node.eps, norm->op_params, sizeof(float));
    const ggml_cuda_kernel_launch_params params(dim3((node.n_rows + 7) / 8), dim3(256), (size_t) 0, ctx.stream());
    ggml_cuda_kernel_launch(norm_heads, params, node);
    return at - begin;
}

// F32 rows into Q8_0 ones: upstream has a thread quantise a block by itself, which takes five times as long
int try_store(ggml_backend_cuda_context & ctx, Walk walk) {
    const ggml_tensor * node = walk.node();
    if (node->op != GGML_OP_SET_ROWS || node->type != GGML_TYPE_Q8_0) {
        return NOTHING;
    }
    const ggml_tensor *x = node->src[0], *rows = node->src[1];
    if (!is_f32(x) || rows->type != GGML_TYPE_I32 || x->nb[0] != sizeof(float) || rows->nb[0] != sizeof(int32_t) ||
        x->ne[2] * x->ne[3] != 1 || x->nb[1] % sizeof(float) != 0 || ggml_nelements(x) > INT32_MAX) {
        return NOTHING;
    }
    const StoredRows stored = {(const char *) x->data, (const int32_t *) rows->data, (char *) node->data,
                               (int64_t) x->nb[1],     (int64_t) node->nb[1],        (int) (x->ne[0] / QK8_0),
                               (int) x->ne[1]};
    const int n_warps = stored.n_blocks * stored.n_rows;
    const ggml_cuda_kernel_launch_params params(dim3((n_warps + 7) / 8), dim3(256), (size_t) 0, ctx.stream());
    ggml_cuda_kernel_launch(store_rows, params, stored);
    return 0;
}

} // namespace

int fuse(ggml_backend_cuda_context & ctx, const ggml_cgraph * graph, int i) {
    for (const auto & attempt : {try_norm, try_swiglu, try_gated, try_normed_heads, try_gates, try_heads, try_store}) {
        const int skipped = attempt(ctx, {graph, i});
        if (skipped != NOTHING) {
            return skipped;
        }
    }
    return NOTHING;
}

} // namespace wgmma
} // namespace dflash
