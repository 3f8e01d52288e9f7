#pragma once

// mul_mat: weights on their way. Each warp fetches the rows that it meets itself, some stages ahead, and waits for
// nobody else.
//
// Rows are copied in pieces of 16 bytes that are aligned in global memory, whatever the rows are, so a row begins up to
// 15 bytes behind its place. Whole pieces are read; nothing outside of the 16 bytes around a byte of the row.

#include "mul_mat_cut.cuh"
#include "mul_mat_products.cuh"

namespace dflash {
namespace mm {

__device__ __forceinline__ void copy_piece(char * to, const char * from, bool exists) {
#if defined(DFLASH_MM_TENSOR)
    attn::copy_async<16>(to, from, exists);
#else
    *(uint4 *) to = exists ? *(const uint4 *) from : uint4{};
#endif
}

// What was fetched so far is one stage; a stage without copies counts.
__device__ __forceinline__ void close_stage() {
#if defined(DFLASH_MM_TENSOR)
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// All stages but the last N have arrived, for the whole warp.
template <int N> __device__ __forceinline__ void wait_for_stages() {
#if defined(DFLASH_MM_TENSOR)
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
    __syncwarp();
#else
    __syncthreads();
#endif
}

// The warp has read what it is about to fetch over.
__device__ __forceinline__ void end_reading() {
#if defined(DFLASH_MM_TENSOR)
    __syncwarp();
#else
    __syncthreads();
#endif
}

// Pieces FIRST .. FIRST + LANES - 1 of every row are copied by so many lanes each, 32 / LANES rows at a time.
template <int FIRST, int LANES> struct Deal {
    static constexpr int ROWS = 32 / LANES;

    static __device__ int piece(int lane) { return FIRST + lane % LANES; }
    static __device__ int row(int lane) { return lane / LANES; }
};

// ROWS rows of a batch, of which n_rows exist; `from` is the first one.
template <ggml_type TYPE, int ROWS> struct Fetch {
    using F = Format<TYPE>;
    using Most = Deal<0, 16>;
    using Rest = Deal<16, (GRANULES<TYPE> > 18 ? 4 : 2)>;
    static_assert(GRANULES<TYPE> <= 20, "four lanes a row copy the rest");
    const char * from;
    char * to;
    int64_t stride;
    int n_rows, bytes, lane;

    // How many rows have a piece. Where it may lie behind a row's bytes, only the last row is asked: behind any other
    // one there is the next.
    __device__ int rows_with(int piece) const {
        const uint32_t last = (uint32_t) (uintptr_t) from + (uint32_t) (n_rows - 1) * (uint32_t) stride; // low bits
        const int behind = (int) (last & 15), begin = piece * 16;
        return begin < bytes || begin < behind + bytes ? n_rows : begin < 16 - F::ALIGN + bytes ? n_rows - 1 : 0;
    }

    // offset: of this lane's first row and piece
    template <typename D> __device__ void pieces(int64_t offset) const {
        const int piece = D::piece(lane), left = rows_with(piece) - D::row(lane);
        const char * at = from + offset;
        char * place = to + D::row(lane) * F::PITCH + piece * 16;
#pragma unroll
        for (int i = 0; i < ROWS; i += D::ROWS) {
            if (piece < GRANULES<TYPE>) {
                copy_piece(place + i * F::PITCH, (const char *) ((uintptr_t) at & ~(uintptr_t) 15), i < left);
            }
            at += stride * D::ROWS;
        }
    }

    // Rows whose alignment is less than Format says; they begin at their places.
    __device__ void unaligned() const {
#pragma unroll 1
        for (int i = lane; i < ROWS * (bytes / 2); i += 32) {
            const int row = i / (bytes / 2), at = i % (bytes / 2) * 2;
            *(uint16_t *) (to + row * F::PITCH + at) =
                row < n_rows ? *(const uint16_t *) (from + row * stride + at) : (uint16_t) 0;
        }
    }

    __device__ void run(bool is_aligned, const int64_t (&offsets)[2]) const {
        if (!is_aligned) {
            unaligned();
            return;
        }
        pieces<Most>(offsets[0]);
        if constexpr (GRANULES<TYPE> > 16) {
            pieces<Rest>(offsets[1]);
        }
    }
};

// A warp's stages, its place in the share, and the next batch to fetch.
template <ggml_type TYPE, int TILES> struct Stream {
    using F = Format<TYPE>;
    static constexpr int ROWS = TILES * TILE, STAGE_BYTES = ROWS * F::PITCH;
    using Rows = Fetch<TYPE, ROWS>;

    const Node & node;
    const Cut & cut;
    char * shared;
    int warp, lane;
    int ring; // offset of the warp's stages in shared memory
    Batch<F::BATCH> next;
    int64_t offsets[2]; // of this lane's first pieces

    __device__ Stream(const Node & of, const Cut & cut_of, char * memory, int first_stage, int share)
        : node(of), cut(cut_of), shared(memory), warp((int) threadIdx.x / 32), lane((int) threadIdx.x % 32),
          ring(first_stage + warp * F::STAGES * STAGE_BYTES), next(cut_of, share) {
        offsets[0] = Rows::Most::row(lane) * node.w_row + Rows::Most::piece(lane) * 16;
        offsets[1] = Rows::Rest::row(lane) * node.w_row + Rows::Rest::piece(lane) * 16;
    }

    __device__ int first_row(int tile) const { return tile * cut.height + warp * ROWS; }

    // Fetches the next batch, if there is one, into a stage.
    __device__ void fetch(int stage) {
        const int n = next.count(), row = first_row(next.tile);
        if (n > 0) {
            const Rows rows = {node.w + row * node.w_row + (int64_t) next.block * F::BYTES,
                               shared + ring + stage * STAGE_BYTES,
                               node.w_row,
                               min(node.n_rows - row, ROWS),
                               n * F::BYTES,
                               lane};
            rows.run(node.is_aligned, offsets);
            next.advance();
        }
        close_stage();
    }

    // Where row `row` of the warp begins in a stage that holds `batch`.
    __device__ int place(const Batch<F::BATCH> & batch, int stage, int row) const {
        const uint32_t low = (uint32_t) (uintptr_t) node.w + (uint32_t) node.w_row * (first_row(batch.tile) + row) +
                             (uint32_t) batch.block * F::BYTES; // of the address
        return ring + stage * STAGE_BYTES + row * F::PITCH + (node.is_aligned ? (int) (low & 15) : 0);
    }
};

} // namespace mm
} // namespace dflash
