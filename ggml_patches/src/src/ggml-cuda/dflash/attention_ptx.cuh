#pragma once

// The instructions that the tensor-core kernel needs; NVIDIA from compute capability 8.0 on.
//
// Fragments of mma m16n8k16, with g = lane / 4 and q = lane % 4; a register holds two f16, the lower column or k first:
//   A [16 rows][16 k]: 0: row g, k 2q..  1: row g + 8, k 2q..  2: row g, k 2q + 8..  3: row g + 8, k 2q + 8..
//   B [16 k][8 columns]: 0: k 2q.., column g  1: k 2q + 8.., column g
//   C [16 rows][8 columns], F32: 0, 1: row g, columns 2q, 2q + 1  2, 3: row g + 8
// ldmatrix reads four 8 x 8 matrices of f16, row r of matrix m from the address that lane 8 m + r gives; register m of
// a thread is matrix m at row g, columns 2q, 2q + 1 (with trans: at rows 2q, 2q + 1, column g).

//
// A barrier in shared memory ends a phase when as many threads have arrived as it was made for. Who waits names the
// parity of the phase: 0 for the first, 1 for the second, 0 again. Phase -1, of parity 1, is over from the start.

#include <cstdint>

namespace dflash {
namespace attn {

using Barrier = uint64_t;

__device__ __forceinline__ uint32_t shared_address(const void * p) {
    return (uint32_t) __cvta_generic_to_shared(p);
}

// BYTES (8 or 16) from global to shared memory, or as many zeros.
template <int BYTES> __device__ __forceinline__ void copy_async(void * to, const void * from, bool exists) {
    static_assert(BYTES == 8 || BYTES == 16, "what cp.async copies here");
    const int n = exists ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(n)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from), "r"(n)
                     : "memory");
    }
}

// All copies that this thread started have arrived.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void make_barrier(Barrier & barrier, int n_threads) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(n_threads) : "memory");
}

__device__ __forceinline__ void arrive(Barrier & barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(&barrier))
                 : "memory");
}

// Arrives when all asynchronous copies that this thread started have.
__device__ __forceinline__ void arrive_after_copies(Barrier & barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

__device__ __forceinline__ void wait(Barrier & barrier, uint32_t parity) {
    uint32_t is_over;
    do {
#if __CUDA_ARCH__ >= 900 // may sleep meanwhile
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_over)
                     : "r"(shared_address(&barrier)), "r"(parity)
                     : "memory");
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(is_over)
                     : "r"(shared_address(&barrier)), "r"(parity)
                     : "memory");
#endif
    } while (!is_over);
}

// Barrier 1 of the block, for the first N threads of it.
template <int N> __device__ __forceinline__ void sync_first() {
    asm volatile("bar.sync 1, %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void * from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from))
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&to)[4], const void * from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(from))
                 : "memory");
}

// c += a b
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 2^x within 2 ulp; exactly 1 at 0, exactly 0 at -infinity
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

} // namespace attn
} // namespace dflash
