// mul_mat on Hopper: a product by itself.

#include "by_type.cuh"

namespace dflash {
namespace wgmma {

Product::Product(ggml_backend_cuda_context & ctx, const ggml_tensor * dst)
    : type(dst->src[0]->type), node(mm::node_of(dst)),
      cut(mm::make_cut(node, MAX_HEIGHT, GROUP_ROWS, UNIT_COST, ggml_cuda_info().devices[ctx.device].nsm)),
      columns(ctx.pool()), arrived(ctx.pool()) {}

bool Product::takes(const ggml_tensor * dst) {
    const ggml_tensor * w = dst->src[0];
    bool is_aligned = false;
    by_type(w->type, [&](auto type) {
        is_aligned = ((uintptr_t) w->data | w->nb[1]) % mm::Format<decltype(type)::value>::ALIGN == 0;
    });
    return is_aligned;
}

int Product::tiles() const {
    const int tiles = (node.n_columns + 7) / 8, whole = tiles / MAX_N8 * MAX_N8;
    return whole + (tiles > whole ? tiles_of_kernel(tiles - whole) : 0);
}

int Product::n_counters() const {
    const int n_passes = (node.n_columns + PASS - 1) / PASS;
    return n_passes * (cut.n_units() / cut.n_blocks * (MAX_HEIGHT / mm::TILE));
}

#define DFLASH_PREPARE(SOURCE)                                                                                         \
    void prepare(ggml_backend_cuda_context & ctx, Product & product, const SOURCE & source) {                          \
        by_type(product.type, [&](auto type) { prepare_as<decltype(type)::value>(ctx, product, source); });            \
    }
DFLASH_PREPARE(Plain)
DFLASH_PREPARE(Swiglu)
DFLASH_PREPARE(Gated<Sigmoid>)
DFLASH_PREPARE(NormedHeads)

void multiply(ggml_backend_cuda_context & ctx, Product & product) {
    by_type(product.type, [&](auto type) { multiply_as<decltype(type)::value>(ctx, product); });
}

void mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    Product product(ctx, dst);
    prepare(ctx, product, Plain{product.node.x, (int64_t) product.node.n_blocks * mm::SUPER});
    multiply(ctx, product);
}

} // namespace wgmma
} // namespace dflash
