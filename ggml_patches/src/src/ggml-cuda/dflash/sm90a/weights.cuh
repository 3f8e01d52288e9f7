#pragma once

// mul_mat on Hopper: weights on their way. Each warp fetches the 16 rows that it decodes, a super-block at a time, some
// stages ahead, and waits for nobody else.
//
// Rows are copied in pieces of 16 bytes that are aligned in global memory, so a row begins up to 15 bytes behind its
// place. Threads whose piece no row needs copy its neighbour once more: that costs no traffic and no decision.

#include "../mul_mat_cut.cuh"
#include "../mul_mat_products.cuh"

namespace dflash {
namespace wgmma {

// Rows in shared memory are PITCH bytes apart: what 16 threads read of four rows, 8 bytes each, lies in different
// banks.
template <ggml_type TYPE> constexpr int PITCH = 160;
template <> constexpr int PITCH<GGML_TYPE_Q5_K> = 224;
template <> constexpr int PITCH<GGML_TYPE_Q6_K> = 240;
template <> constexpr int PITCH<GGML_TYPE_Q8_0> = 304;

template <ggml_type TYPE> struct Pieces {
    using F = mm::Format<TYPE>;
    static constexpr int MOST = (16 - F::ALIGN + F::BYTES + 15) / 16; // of a row
    static constexpr int LEAST = (F::BYTES + 15) / 16;                // where it begins at a multiple of 16
    static constexpr int OF_PITCH = PITCH<TYPE> / 16;
    static constexpr int COPIES = (mm::TILE * OF_PITCH + 31) / 32; // of a thread
    static constexpr int STAGE_BYTES = COPIES * 32 * 16;
};

// The super-blocks of a warp's rows in the order of its share, and where the next one to fetch begins.
class ShareWalk {
  protected:
    const mm::Node & node;
    const mm::Cut & cut;
    int warp;
    mm::Batch<1> next;
    const char * rows = nullptr; // the warp's first row
    int last = 0;                // its last row that exists, from the first one; rows behind it are fetched as that one

    __device__ ShareWalk(const mm::Node & of, const mm::Cut & cut_of, int warp_of, int share)
        : node(of), cut(cut_of), warp(warp_of), next(cut_of, share) {
        open_tile();
    }

    __device__ void open_tile() {
        const int first = min(next.tile * cut.height + warp * mm::TILE, node.n_rows - 1);
        rows = node.w + first * node.w_row;
        last = min(node.n_rows - 1 - first, mm::TILE - 1);
    }

    // To the next super-block; whether it is one of other rows.
    __device__ bool advance() {
        const int tile = next.tile;
        next.advance();
        const bool is_new = next.tile != tile && next.left > 0;
        if (is_new) {
            open_tile();
        }
        return is_new;
    }
};

// STAGES places, of a super-block of each row.
template <ggml_type TYPE, int STAGES> class Stages : ShareWalk {
    using P = Pieces<TYPE>;
    char * ring; // of the warp
    int written = 0, read = 0;
    uint32_t offsets[P::COPIES]; // of the pieces that this thread copies

    __device__ void open_rows() {
#pragma unroll
        for (int i = 0; i < P::COPIES; i++) {
            const int place = (int) threadIdx.x % 32 + 32 * i;
            const int row = min(place / P::OF_PITCH, last);
            offsets[i] = (uint32_t) row * (uint32_t) node.w_row + min(place % P::OF_PITCH, P::MOST - 1) * 16;
        }
    }

    static __device__ int behind(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }

  public:
    static constexpr int AHEAD = STAGES - 1; // super-blocks that are on their way while one is read
    static constexpr int BYTES = STAGES * P::STAGE_BYTES;

    __device__ Stages(const mm::Node & of, const mm::Cut & cut_of, int warp_of, char * ring_of, int share)
        : ShareWalk(of, cut_of, warp_of, share), ring(ring_of) {
        open_rows();
    }

    // Fetches the next super-block, if the share has one; nothing is a stage too.
    __device__ void fetch() {
        if (next.left > 0) {
            const char * from = rows + next.block * mm::Format<TYPE>::BYTES;
            char * to = ring + written * P::STAGE_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
            for (int i = 0; i < P::COPIES; i++) {
                const char * at = from + offsets[i];
                uintptr_t piece = (uintptr_t) at & ~(uintptr_t) 15;
                if (P::LEAST < P::MOST) { // the last one may lie behind the row
                    const bool is_last = (threadIdx.x % 32 + 32 * i) % P::OF_PITCH >= P::MOST - 1;
                    piece -= is_last && ((uintptr_t) at & 15) == 0 ? 16 : 0;
                }
                attn::copy_async<16>(to + i * 512, (const char *) piece, true);
            }
            if (advance()) {
                open_rows();
            }
        }
        written = behind(written);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    // Where the super-block that is read begins in a row of the warp.
    __device__ int place(const mm::Batch<1> & now, int row) const {
        const uint32_t of_row = (uint32_t) (now.tile * cut.height + warp * mm::TILE + row) * (uint32_t) node.w_row;
        const uint32_t low = (uint32_t) (uintptr_t) node.w + of_row + now.block * mm::Format<TYPE>::BYTES;
        return read * P::STAGE_BYTES + row * PITCH<TYPE> + (int) (low & 15);
    }

    __device__ void leave() { read = behind(read); }
};

// Four super-blocks of IQ4_XS, as they lie in a row: 544 bytes, 17 sectors of memory, each of which is fetched once.
// With super-blocks for themselves every fourth sector is fetched twice. For rows that are so many super-blocks,
// aligned to 16.
class RowRing : ShareWalk {
    static constexpr int SUPERS = 4, ROW_BYTES = SUPERS * mm::Format<GGML_TYPE_IQ4_XS>::BYTES;
    char * ring; // of the warp
    bool is_first = true;

    // Copies `n` pieces of each row from piece `begin` on, by so many threads each.
    template <int N> __device__ void pieces(const char * from, int begin) const {
        const int lane = (int) threadIdx.x % 32, at = (begin + lane % N) * 16;
#pragma unroll
        for (int i = 0; i < mm::TILE; i += 32 / N) {
            const int row = lane / N + i;
            attn::copy_async<16>(ring + row * ROW_BYTES + at, from + min(row, last) * node.w_row + at, true);
        }
    }

  public:
    static constexpr int AHEAD = 2; // the one behind would touch what is read
    static constexpr int BYTES = mm::TILE * ROW_BYTES;

    static bool takes(const mm::Node & node) {
        return node.n_blocks % SUPERS == 0 && (uintptr_t) node.w % 16 == 0 && node.w_row % 16 == 0;
    }

    __device__ RowRing(const mm::Node & of, const mm::Cut & cut_of, int warp_of, char * ring_of, int share)
        : ShareWalk(of, cut_of, warp_of, share), ring(ring_of) {}

    // Pieces 2 + 8 slot .. 9 + 8 slot, and the two before them if nobody else has brought these.
    __device__ void fetch() {
        if (next.left > 0) {
            const int slot = next.block % SUPERS, begin = 2 + 8 * slot;
            const char * from = rows + (next.block - slot) * mm::Format<GGML_TYPE_IQ4_XS>::BYTES;
            pieces<8>(from, begin);
            if (slot == 0 || is_first) {
                pieces<2>(from, begin - 2);
            }
            is_first = false;
            advance();
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    __device__ int place(const mm::Batch<1> & now, int row) const {
        return row * ROW_BYTES + now.block % SUPERS * mm::Format<GGML_TYPE_IQ4_XS>::BYTES;
    }

    __device__ void leave() const {}
};

// All stages but the last N have arrived, for the whole warp, which has left all that it read before.
template <int N> __device__ __forceinline__ void wait_for_stages() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
    __syncwarp();
}

} // namespace wgmma
} // namespace dflash
