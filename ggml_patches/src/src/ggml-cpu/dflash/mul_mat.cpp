// Quantised weights times columns: y[i,c] = sum_k w[k,i] x[k,c].
//
// The columns are quantised once per run, by all threads. Then every thread takes weight rows, 8 at a time, decodes a
// super-block of them once and lets it meet all columns. A number of the result is a sum over super-blocks in order
// (mul_mat_blocks.h) in which no other row or column has a part, and there is one way to compute it, for any shape.

#include "dflash/mul_mat_blocks.h"

namespace dflash {
namespace {

constexpr int CHUNK = 256; // columns run together: bounds the work buffer and the sums on the stack

struct Node {
    const ggml_tensor * w;
    const float * x;
    float * y;
    int64_t n_blocks, n_rows, n_columns;

    explicit Node(const ggml_tensor * dst) {
        w = dst->src[0];
        x = (const float *) dst->src[1]->data;
        y = (float *) dst->data;
        n_blocks = w->ne[0] / BLOCK;
        n_rows = w->ne[1];
        n_columns = ggml_nrows(dst->src[1]);
    }
};

// Columns first..first+size-1 of a node, quantised: those of the first super-block, then those of the second one, ...
struct Chunk {
    Column * columns;
    int64_t first, size;
};

template <Scheme SCHEME>
void quantise_share(const ggml_compute_params * params, const Node & node, const Chunk & chunk) {
    const Share share(node.n_blocks * chunk.size, params);
    for (int64_t i = share.begin; i < share.end; i++) {
        const int64_t block = i / chunk.size, column = chunk.first + i % chunk.size;
        quantise<SCHEME>(node.x + (column * node.n_blocks + block) * BLOCK, chunk.columns[i]);
    }
}

// Weights are read in 8 places at once, too many for the hardware to look ahead. So while a tile of rows is worked on,
// the next one is asked for, in the order of memory.
template <typename Block> void prefetch(const Block * block) {
#if defined(__GNUC__)
    for (size_t i = 0; i < sizeof(Block); i += 64) {
        __builtin_prefetch((const char *) block + i, 0, 2); // to the second level
    }
#else
    (void) block;
#endif
}

// Rows first..first+n-1, all columns of the chunk.
template <ggml_type TYPE> void run_rows(const Node & node, const Chunk & chunk, int64_t first, int n) {
    typedef typename Format<TYPE>::Block Block;

    Tile tile;
    alignas(64) float sums[CHUNK][ROWS];
    if (n < ROWS) {
        std::memset(&tile, 0, sizeof(tile)); // rows that are not there are summed and dropped
    }
    std::memset(sums, 0, chunk.size * sizeof(sums[0]));

    int64_t ahead_row = first + ROWS, ahead_block = 0;
    for (int64_t block = 0; block < node.n_blocks; block++) {
        for (int r = 0; r < n; r++) {
            prefetch(at<const Block>(node.w, ahead_row) + ahead_block);
            if (++ahead_block == node.n_blocks) {
                ahead_block = 0;
                ahead_row++;
            }
            decode(at<const Block>(node.w, first + r)[block], tile, r);
        }
        finish<Format<TYPE>::SCHEME>(tile);
        for (int64_t i = 0; i < chunk.size; i++) {
            accumulate<Format<TYPE>::SCHEME>(tile, chunk.columns[block * chunk.size + i], sums[i]);
        }
    }
    for (int64_t i = 0; i < chunk.size; i++) {
        std::memcpy(node.y + (chunk.first + i) * node.n_rows + first, sums[i], n * sizeof(float));
    }
}

template <ggml_type TYPE> void run(const ggml_compute_params * params, const Node & node) {
    // a work buffer has no promised alignment
    Chunk chunk;
    chunk.columns = (Column *) (((uintptr_t) params->wdata + 63) / 64 * 64);

    for (chunk.first = 0; chunk.first < node.n_columns; chunk.first += CHUNK) {
        if (chunk.first > 0) {
            ggml_barrier(params->threadpool); // the last chunk may still be read
        }
        chunk.size = node.n_columns - chunk.first < CHUNK ? node.n_columns - chunk.first : CHUNK;
        quantise_share<Format<TYPE>::SCHEME>(params, node, chunk);
        ggml_barrier(params->threadpool);

        const Share share((node.n_rows + ROWS - 1) / ROWS, params);
        for (int64_t i = share.begin; i < share.end; i++) {
            const int64_t left = node.n_rows - i * ROWS;
            run_rows<TYPE>(node, chunk, i * ROWS, (int) (left < ROWS ? left : ROWS));
        }
    }
}

} // namespace

void mul_mat(const ggml_compute_params * params, ggml_tensor * dst) {
    const Node node(dst);
    switch (node.w->type) {
#define RUN(TYPE)                                                                                                      \
    case TYPE:                                                                                                         \
        run<TYPE>(params, node);                                                                                       \
        return;
        GGML_DFLASH_WEIGHT_TYPES(RUN)
#undef RUN
    default:
        GGML_ABORT("weight type %s is refused by ggml_dflash_check", ggml_type_name(node.w->type));
    }
}

size_t mul_mat_work_size(const ggml_tensor * node) {
    const int64_t n_columns = ggml_nrows(node->src[1]);
    return 64 + (n_columns < CHUNK ? n_columns : CHUNK) * (node->src[0]->ne[0] / BLOCK) * sizeof(Column);
}

} // namespace dflash
