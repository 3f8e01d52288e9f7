#pragma once

// CPU backend of GGML_OP_DFLASH, as ggml-cpu.c calls it.

#include "ggml.h"

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

void ggml_compute_forward_dflash(const struct ggml_compute_params * params, struct ggml_tensor * dst);

// bytes of work buffer that n_tasks threads need for the node
size_t ggml_dflash_work_size(const struct ggml_tensor * node, int n_tasks);

#ifdef __cplusplus
}
#endif
