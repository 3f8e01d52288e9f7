#pragma once

// What the SYCL kernels of GGML_OP_DFLASH share. One .cpp file per sub-op family, named as on the CPU.
//
// Rules
//   * A launch goes to ctx.stream(), an in-order queue, never elsewhere; nothing here waits for the host or allocates
//     outside ctx.pool().
//   * Counts, slots and positions are data: the kernel checks them again, as ggml_patches/README.md says, and never
//     reads or writes outside its lane. They are never read back.
//   * A row's numbers depend on its lane only. So no split, tile or kernel is chosen by T, L or a length other than the
//     row's own, and every sum has one order: eight partial sums and a fixed tree through local memory, as on the CPU.
//     Whole numbers may be summed in any order. Nothing depends on the size of a sub-group.
//   * Kernels are named functors of plain values: no host globals, no references, no double (many GPUs have none).
//
// Rounding: see numbers.hpp.

#include "../common.hpp"
#include "ggml-dflash-limits.h"
#include "ggml-dflash.h"

#include <cstdint>

// From here to the end of every file that includes this, an operator is one operation, whatever the compiler's default.
#if defined(__clang__)
#pragma clang fp contract(off) reassociate(off) reciprocal(off)
#endif

namespace dflash {

void gdn_verify(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void gdn_advance(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void gdn_commit(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void conv_verify(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void conv_advance(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void conv_commit(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void attention(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void dynamic_conv(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void select(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void sample(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void accept(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void place(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
void penalise(ggml_backend_sycl_context & ctx, ggml_tensor * dst);

using Item = sycl::nd_item<3>;
template <typename T> using Local = sycl::local_accessor<T, 1>;

constexpr int WIDTH = 8;        // partial sums
constexpr int GROUP_SIZE = 256; // work-items that every device takes

// Runs the functor make(handler) on groups of `size` work-items.
template <typename Make>
void launch(ggml_backend_sycl_context & ctx, int64_t groups0, int64_t groups1, int64_t groups2, int size,
            const Make & make) {
    const sycl::range<3> local(1, 1, size);
    const sycl::range<3> global((size_t) groups0, (size_t) groups1, (size_t) groups2 * size);
    ctx.stream()->submit(
        [&](sycl::handler & handler) { handler.parallel_for(sycl::nd_range<3>(global, local), make(handler)); });
}

// A tensor as a kernel sees it; of no tensor, nothing.
struct View {
    char * data = nullptr;
    int64_t nb1 = 0, nb2 = 0, nb3 = 0;

    View() = default;
    explicit View(const ggml_tensor * t) {
        if (t) {
            data = (char *) t->data;
            nb1 = (int64_t) t->nb[1], nb2 = (int64_t) t->nb[2], nb3 = (int64_t) t->nb[3];
        }
    }

    template <typename T> T * at(int64_t i1, int64_t i2 = 0, int64_t i3 = 0) const {
        return (T *) (data + i1 * nb1 + i2 * nb2 + i3 * nb3);
    }
};

inline int32_t * ints_of(const ggml_tensor * t) {
    return t ? (int32_t *) t->data : nullptr;
}

// Slot of a lane, or -1 if the lane is padded.
inline int slot_of(const int32_t * slots, int lane, int n_slots) {
    const int slot = slots[lane];
    return slot >= 0 && slot < n_slots ? slot : -1;
}

// The same for ops that write the slot: a slot belongs to the first lane that names it.
inline int owned_slot_of(const int32_t * slots, int lane, int n_slots) {
    for (int earlier = 0; earlier < lane; earlier++) {
        if (slots[earlier] == slots[lane]) {
            return -1;
        }
    }
    return slot_of(slots, lane, n_slots);
}

// The WIDTH partial sums from `parts` on, in the CPU's order.
inline float tree(const Local<float> & parts, int first) {
    const auto at = [&](int i) { return parts[first + i]; };
    return ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
}

} // namespace dflash
