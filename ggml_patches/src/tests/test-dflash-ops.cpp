// Native tests of GGML_OP_DFLASH.
//
//   test-dflash-ops [--bench] [path of the CPU backend module]
//
// Without a path, DFLASH_CPU_MODULE is loaded if it was defined at build time, else the backend that is linked in.

#include "dflash-harness.h"

#include "dflash-gdn-cases.h"

#include "dflash-conv-cases.h"

#include "dflash-attention-cases.h"

#include "dflash-mul-mat-cases.h"

#include "dflash-refused-cases.h"

#include "dflash-vec8-cases.h"

#include "dflash-bench.h"

#ifndef DFLASH_CPU_MODULE
#define DFLASH_CPU_MODULE ""
#endif

int main(int argc, char ** argv) {
    const char * module = DFLASH_CPU_MODULE;
    bool timing = false;
    for (int i = 1; i < argc; i++) {
        if (std::strcmp(argv[i], "--bench") == 0) {
            timing = true;
        } else {
            module = argv[i];
        }
    }
    backend().open(module);
    if (timing) {
        bench_all();
        backend().close();
        return 0;
    }
    const struct {
        const char * name;
        void (*run)();
    } groups[] = {
        {"vec8", vec8_cases}, {"refused", refused_cases},     {"gdn", gdn_cases},
        {"conv", conv_cases}, {"attention", attention_cases}, {"mul_mat", mul_mat_cases},
    };
    for (const auto & group : groups) {
        const Counter before = counter();
        group.run();
        std::printf("%-10s %7d checks, %d failed\n", group.name, counter().checks - before.checks,
                    counter().failures - before.failures);
    }
    backend().close();
    return counter().failures == 0 ? 0 : 1;
}
