#pragma once

// What the CUDA kernels of GGML_OP_DFLASH share. One .cu file per sub-op family, named as on the CPU.
//
// Rules
//   * A launch goes to ctx.stream(), never elsewhere; nothing here waits for the host or allocates outside ctx.pool().
//   * Counts, slots and positions are data: the kernel checks them again, as ggml_patches/README.md says, and never
//     reads or writes outside its lane. They are never read back.
//   * A row's numbers depend on its lane only. So no split, tile or kernel is chosen by T, L or a length other than the
//     row's own, and every sum has one order. Where rounding counts, fma is written as fmaf and products that must not
//     be fused as __fmul_rn.
//   * Warps have 32 threads on NVIDIA and RDNA, 64 on GCN and CDNA: shuffles name a width of at most 32.

#include "../common.cuh"
#include "ggml-dflash-limits.h"
#include "ggml-dflash.h"

#include <cstdint>

namespace dflash {

void gdn_verify(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void gdn_advance(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void gdn_commit(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void conv_verify(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void conv_advance(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void conv_commit(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void attention(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void dynamic_conv(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void select(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void sample(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void accept(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void place(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
void penalise(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Slot of a lane, or -1 if the lane is padded.
__device__ __forceinline__ int slot_of(const int32_t * slots, int lane, int n_slots) {
    const int slot = slots[lane];
    return slot >= 0 && slot < n_slots ? slot : -1;
}

// The same for ops that write the slot: a slot belongs to the first lane that names it.
__device__ __forceinline__ int owned_slot_of(const int32_t * slots, int lane, int n_slots) {
    const int slot = slot_of(slots, lane, n_slots);
    bool taken = false;
#pragma unroll 8
    for (int earlier = 0; earlier < lane; earlier++) { // no early exit: the loads do not wait for each other
        taken |= slots[earlier] == slot;
    }
    return taken ? -1 : slot;
}

} // namespace dflash
