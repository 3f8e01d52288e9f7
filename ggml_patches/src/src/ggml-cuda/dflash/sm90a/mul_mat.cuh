#pragma once

// mul_mat on Hopper: what is done for a product, step by step, so that steps may serve several or be taken together
// with others. These files are compiled for compute capability 9.0 alone, whose warpgroups no other has.

#include "../mul_mat_cut.cuh"

namespace dflash {
namespace wgmma {

constexpr int MAX_HEIGHT = mm::MAX_HEIGHT, GROUP_ROWS = 64; // rows of a tile, of which four warps have GROUP_ROWS
constexpr int PASS = 64;                                    // columns that meet the weights together
constexpr int UNIT_COST = 64;                               // of a super-block, in rows (mm::make_cut)

// How many parts of the rows of a warp are there, for each pass.
struct Counters {
    int * arrived;
    int n;
};

// A product and its memory.
struct Product {
    ggml_type type;
    mm::Node node; // of all columns
    mm::Cut cut;
    ggml_cuda_pool_alloc<char> columns;
    ggml_cuda_pool_alloc<int> arrived;

    Product(ggml_backend_cuda_context & ctx, const ggml_tensor * dst);

    // Whether these kernels take it: rows of weights must be aligned as their blocks are, which they are in any buffer.
    static bool takes(const ggml_tensor * dst);

    int tiles() const; // of 8 columns, those of padding included
    int n_counters() const;
};

struct Plain;
struct Silu;
struct Sigmoid;
template <typename Activation> struct Gated;
using Swiglu = Gated<Silu>;
struct NormedHeads;

void prepare(ggml_backend_cuda_context & ctx, Product & product, const Plain & source);
void prepare(ggml_backend_cuda_context & ctx, Product & product, const Swiglu & source);
void prepare(ggml_backend_cuda_context & ctx, Product & product, const Gated<Sigmoid> & source);
void prepare(ggml_backend_cuda_context & ctx, Product & product, const NormedHeads & source);

// Of prepared columns.
void multiply(ggml_backend_cuda_context & ctx, Product & product);

void mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

} // namespace wgmma
} // namespace dflash
