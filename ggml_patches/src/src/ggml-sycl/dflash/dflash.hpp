#pragma once

// What upstream's dispatch sees of our SYCL kernels. Everything else is in kernels.hpp.

#include "../common.hpp"
#include "ggml-dflash.h"

void ggml_sycl_op_dflash(ggml_backend_sycl_context & ctx, ggml_tensor * dst);
bool ggml_sycl_dflash_supported(const ggml_tensor * op);
