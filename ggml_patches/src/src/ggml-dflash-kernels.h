#pragma once

// Which sub-ops have kernels, per backend: X(enum suffix, function). The dispatch of a backend is this list, so a name
// without a kernel does not link; ggml_dflash_supported is this list, so a kernel that is not dispatched is refused.

#define GGML_DFLASH_CPU_KERNELS(X)                                                                                     \
    X(GDN_VERIFY, gdn_verify)                                                                                          \
    X(GDN_ADVANCE, gdn_advance)                                                                                        \
    X(GDN_COMMIT, gdn_commit)                                                                                          \
    X(CONV_VERIFY, conv_verify)                                                                                        \
    X(CONV_ADVANCE, conv_advance)                                                                                      \
    X(CONV_COMMIT, conv_commit)                                                                                        \
    X(ATTENTION, attention)                                                                                            \
    X(MUL_MAT, mul_mat)                                                                                                \
    X(DYNAMIC_CONV, dynamic_conv)                                                                                      \
    X(SELECT, select)                                                                                                  \
    X(SAMPLE, sample)                                                                                                  \
    X(ACCEPT, accept)                                                                                                  \
    X(PLACE, place)                                                                                                    \
    X(PENALISE, penalise)

// CUDA and HIP compile the same files.
#define GGML_DFLASH_CUDA_KERNELS(X)                                                                                    \
    X(GDN_VERIFY, gdn_verify)                                                                                          \
    X(GDN_ADVANCE, gdn_advance)                                                                                        \
    X(GDN_COMMIT, gdn_commit)                                                                                          \
    X(CONV_VERIFY, conv_verify)                                                                                        \
    X(CONV_ADVANCE, conv_advance)                                                                                      \
    X(CONV_COMMIT, conv_commit)                                                                                        \
    X(ATTENTION, attention)                                                                                            \
    X(MUL_MAT, mul_mat)                                                                                                \
    X(DYNAMIC_CONV, dynamic_conv)                                                                                      \
    X(SELECT, select)                                                                                                  \
    X(SAMPLE, sample)                                                                                                  \
    X(ACCEPT, accept)                                                                                                  \
    X(PLACE, place)                                                                                                    \
    X(PENALISE, penalise)

#define GGML_DFLASH_SYCL_KERNELS(X)                                                                                    \
    X(GDN_VERIFY, gdn_verify)                                                                                          \
    X(GDN_ADVANCE, gdn_advance)                                                                                        \
    X(GDN_COMMIT, gdn_commit)                                                                                          \
    X(CONV_VERIFY, conv_verify)                                                                                        \
    X(CONV_ADVANCE, conv_advance)                                                                                      \
    X(CONV_COMMIT, conv_commit)                                                                                        \
    X(ATTENTION, attention)                                                                                            \
    X(DYNAMIC_CONV, dynamic_conv)                                                                                      \
    X(SELECT, select)                                                                                                  \
    X(SAMPLE, sample)                                                                                                  \
    X(ACCEPT, accept)                                                                                                  \
    X(PLACE, place)                                                                                                    \
    X(PENALISE, penalise)
