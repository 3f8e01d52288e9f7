#pragma once

// What the DFLASH kernels share. Arithmetic is written with explicit fma and in a fixed order (vec8.h), so that a
// number does not depend on what the compiler makes of it, nor on which thread or tile computes it.

#include "dflash/vec8.h"
#include "ggml-cpu-impl.h"
#include "ggml-dflash-limits.h"
#include "ggml-dflash.h"
#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace dflash {

void gdn_verify(const ggml_compute_params * params, ggml_tensor * dst);
void gdn_advance(const ggml_compute_params * params, ggml_tensor * dst);
void gdn_commit(const ggml_compute_params * params, ggml_tensor * dst);
void conv_verify(const ggml_compute_params * params, ggml_tensor * dst);
void conv_advance(const ggml_compute_params * params, ggml_tensor * dst);
void conv_commit(const ggml_compute_params * params, ggml_tensor * dst);
void attention(const ggml_compute_params * params, ggml_tensor * dst);
void mul_mat(const ggml_compute_params * params, ggml_tensor * dst);
void dynamic_conv(const ggml_compute_params * params, ggml_tensor * dst);
void select(const ggml_compute_params * params, ggml_tensor * dst);
void sample(const ggml_compute_params * params, ggml_tensor * dst);
void accept(const ggml_compute_params * params, ggml_tensor * dst);
void place(const ggml_compute_params * params, ggml_tensor * dst);
void penalise(const ggml_compute_params * params, ggml_tensor * dst);

size_t attention_work_size(const ggml_tensor * node, int n_tasks);
size_t mul_mat_work_size(const ggml_tensor * node);
size_t select_work_size(const ggml_tensor * node);
size_t penalise_work_size(const ggml_tensor * node, int n_tasks);

// Slot of a lane, or -1 if the lane is padded.
inline int64_t slot_of(const int32_t * slots, int64_t lane, int64_t n_slots) {
    const int32_t slot = slots[lane];
    return slot >= 0 && slot < n_slots ? slot : -1;
}

// The same for ops that write the slot: a slot belongs to the first lane that names it.
inline int64_t owned_slot_of(const int32_t * slots, int64_t lane, int64_t n_slots) {
    for (int64_t earlier = 0; earlier < lane; earlier++) {
        if (slots[earlier] == slots[lane]) {
            return -1;
        }
    }
    return slot_of(slots, lane, n_slots);
}

// Part of 0..n-1 that thread ith of nth does: consecutive items, sizes differ by at most one.
struct Share {
    int64_t begin, end;
    Share(int64_t n, const ggml_compute_params * params)
        : begin(n * params->ith / params->nth), end(n * (params->ith + 1) / params->nth) {}
};

template <typename T> inline T * at(const ggml_tensor * t, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return (T *) ((char *) t->data + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3]);
}

} // namespace dflash
