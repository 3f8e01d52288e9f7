#pragma once

// Products of a warpgroup, four warps of a block that begin at a multiple of four: D [64 rows][8 N8 columns] (+)= A B,
// 16 k at a time. Warp w has rows 16 w..16 w + 15, as fragments A and C of attention_ptx.cuh. B lies in shared memory:
// [N8][2 halves of k][8 columns][8 k] of f16, which every warp reads.
//
// They run beside the threads that start them: A's registers may be written again, D's read, once wait() has said so.

#include <cstdint>

namespace dflash {
namespace wgmma {

// Before the first product that reads registers which the thread has written.
__device__ __forceinline__ void fence() {
    asm volatile("wgmma.fence.sync.aligned;");
}

// Products that were started since the last commit are one group.
__device__ __forceinline__ void commit() {
    asm volatile("wgmma.commit_group.sync.aligned;");
}

// All groups but the last N are done.
template <int N> __device__ __forceinline__ void wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N));
}

// Keeps the compiler from moving uses of D across a wait.
template <int N8> __device__ __forceinline__ void pin(float (&d)[N8][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N8; i++) {
        asm volatile("" : "+f"(d[i / 4][i % 4]));
    }
}

constexpr int STEP_BYTES = 256; // of B, for 8 columns and 16 k

// Descriptor of B at an address of shared memory: not swizzled, halves of k 128 bytes apart, tiles of columns 256.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
    return (uint64_t) (address >> 4) | (uint64_t) (128 >> 4) << 16 | (uint64_t) (STEP_BYTES >> 4) << 32;
}

// D = A B, or D += A B where adds is not 0.
template <int N8>
__device__ __forceinline__ void multiply(float (&d)[N8][4], const uint32_t (&a)[4], uint64_t b, int adds);

#define DFLASH_QUAD(x) "+f"((x)[0]), "+f"((x)[1]), "+f"((x)[2]), "+f"((x)[3])

template <>
__device__ __forceinline__ void multiply<1>(float (&d)[1][4], const uint32_t (&a)[4], uint64_t b, int adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %9, 0; "
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {"
                 "%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, %8, p, 1, 1, 0; }"
                 : DFLASH_QUAD(d[0])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

template <>
__device__ __forceinline__ void multiply<2>(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, int adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0; "
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7}, "
                 "{%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
                 : DFLASH_QUAD(d[0]), DFLASH_QUAD(d[1])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

template <>
__device__ __forceinline__ void multiply<3>(float (&d)[3][4], const uint32_t (&a)[4], uint64_t b, int adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %17, 0; "
                 "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
                 "{%12, %13, %14, %15}, %16, p, 1, 1, 0; }"
                 : DFLASH_QUAD(d[0]), DFLASH_QUAD(d[1]), DFLASH_QUAD(d[2])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

template <>
__device__ __forceinline__ void multiply<4>(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b, int adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0; "
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
                 : DFLASH_QUAD(d[0]), DFLASH_QUAD(d[1]), DFLASH_QUAD(d[2]), DFLASH_QUAD(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

template <>
__device__ __forceinline__ void multiply<5>(float (&d)[5][4], const uint32_t (&a)[4], uint64_t b, int adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %25, 0; "
                 "wgmma.mma_async.sync.aligned.m64n40k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19}, "
                 "{%20, %21, %22, %23}, %24, p, 1, 1, 0; }"
                 : DFLASH_QUAD(d[0]), DFLASH_QUAD(d[1]), DFLASH_QUAD(d[2]), DFLASH_QUAD(d[3]), DFLASH_QUAD(d[4])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

template <>
__device__ __forceinline__ void multiply<8>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b, int adds) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0; "
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : DFLASH_QUAD(d[0]), DFLASH_QUAD(d[1]), DFLASH_QUAD(d[2]), DFLASH_QUAD(d[3]), DFLASH_QUAD(d[4]),
                   DFLASH_QUAD(d[5]), DFLASH_QUAD(d[6]), DFLASH_QUAD(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));
}

#undef DFLASH_QUAD

} // namespace wgmma
} // namespace dflash
