// Native tests of GGML_OP_DFLASH: one table of cases on the CPU and on every device of the modules that are named.

#include "dflash-harness.h"

#include "dflash-accept-cases.h"
#include "dflash-attention-cases.h"
#include "dflash-conv-cases.h"
#include "dflash-dynamic-conv-cases.h"
#include "dflash-fused-cases.h"
#include "dflash-gdn-cases.h"
#include "dflash-mul-mat-cases.h"
#include "dflash-order-cases.h"
#include "dflash-penalise-cases.h"
#include "dflash-place-cases.h"
#include "dflash-refused-cases.h"
#include "dflash-sample-cases.h"
#include "dflash-select-cases.h"
#include "dflash-upstream-cases.h"
#include "dflash-vec8-cases.h"
#include "dflash-walk-cases.h"

#ifndef DFLASH_CPU_MODULE
#define DFLASH_CPU_MODULE ""
#endif

constexpr char USAGE[] =
    "usage: test-dflash-ops [--only GROUP]... [--without GROUP]... [MODULE]...\n"
    "\n"
    "Runs the cases on the CPU and on every device of the backend modules given by path (libdflash-cuda.so, ...), in "
    "any\n"
    "order. Without the CPU's module among them the one that was built with this program is loaded.\n"
    "  --only GROUP     only this group (again for more)\n"
    "  --without GROUP  not this group; the summary says so\n"
    "  --groups         print the groups and the tolerances, run nothing\n"
    "exit code: 0 all checks hold, 1 some do not, 2 cannot run, 3 a module that was named has no device here\n";

struct Group {
    const char * name;
    void (*run)();
    std::vector<ggml_dflash_op> ops; // all have to be there
    const char * cpu_only;           // why only there, or NULL
};

const Group GROUPS[] = {
    {"vec8", vec8_cases, {}, "the arithmetic of the CPU's kernels"},
    {"refused", refused_cases, {}, nullptr},
    {"gdn", gdn_cases, {GGML_DFLASH_OP_GDN_VERIFY, GGML_DFLASH_OP_GDN_ADVANCE, GGML_DFLASH_OP_GDN_COMMIT}, nullptr},
    {"conv",
     conv_cases,
     {GGML_DFLASH_OP_CONV_VERIFY, GGML_DFLASH_OP_CONV_ADVANCE, GGML_DFLASH_OP_CONV_COMMIT},
     nullptr},
    {"attention", attention_cases, {GGML_DFLASH_OP_ATTENTION}, nullptr},
    {"mul_mat", mul_mat_cases, {GGML_DFLASH_OP_MUL_MAT}, nullptr},
    {"fused", fused_cases, {GGML_DFLASH_OP_MUL_MAT}, nullptr}, // needs the ops that it joins
    {"dynamic_conv", dynamic_conv_cases, {GGML_DFLASH_OP_DYNAMIC_CONV}, nullptr},
    {"select", select_cases, {GGML_DFLASH_OP_SELECT}, nullptr},
    {"sample", sample_cases, {GGML_DFLASH_OP_SAMPLE}, nullptr},
    {"accept", accept_cases, {GGML_DFLASH_OP_ACCEPT}, nullptr},
    {"place", place_cases, {GGML_DFLASH_OP_PLACE}, nullptr},
    {"penalise", penalise_cases, {GGML_DFLASH_OP_PENALISE}, nullptr},
    {"walk", walk_cases, {}, nullptr},
    {"walk_shifted", walk_shifted_cases, {}, nullptr},
    {"walk_upstream", upstream_cases, {}, nullptr}, // needs upstream's own kernel
    {"order",
     order_cases,
     {GGML_DFLASH_OP_GDN_VERIFY, GGML_DFLASH_OP_ACCEPT, GGML_DFLASH_OP_PLACE, GGML_DFLASH_OP_PENALISE},
     nullptr},
    {"order_products", order_products_cases, {GGML_DFLASH_OP_GDN_VERIFY}, nullptr}, // needs ggml's mul_mat and cpy
};

typedef std::vector<std::string> Names;

static bool is_in(const Names & names, const char * name) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

// Why the current device does not run a group, "" if it does.
static std::string reason_to_skip(const Group & group, const Names & only, const Names & without) {
    if (is_in(without, group.name) || (!only.empty() && !is_in(only, group.name))) {
        return "not asked for";
    }
    if (group.cpu_only && !backend().is_cpu()) {
        return std::string("CPU only: ") + group.cpu_only;
    }
    std::string reason;
    for (ggml_dflash_op op : group.ops) {
        ggml_context * ctx = metadata_context();
        const Sizes z;
        const ggml_tensor * node = construct(ctx, op, make_sources(ctx, op, z), z);
        const bool supported = node && ggml_backend_dev_supports_op(backend().device, node);
        if (!supported) {
            const char * why = ggml_dflash_check(node);
            reason = std::string("supports_op refuses ") + ggml_dflash_op_name(op) + ": " +
                     (why ? why : "this backend has no kernel of it");
        }
        ggml_free(ctx);
    }
    return reason;
}

static void run_groups(const Names & only, const Names & without) {
    std::printf("== %s: %s\n", backend().name.c_str(), ggml_backend_dev_description(backend().device));
    int ran = 0;
    for (const Group & group : GROUPS) {
        const std::string reason = reason_to_skip(group, only, without);
        if (!reason.empty()) {
            if (reason != "not asked for" || is_in(without, group.name)) {
                std::printf("%-8s %-14s skipped: %s\n", backend().name.c_str(), group.name, reason.c_str());
            }
            continue;
        }
        random_engine().seed(20240607); // the same data on every device, whatever ran before
        const Counter before = counter();
        const int64_t start = ggml_time_us();
        group.run();
        ran++;
        std::printf("%-8s %-14s %7d checks, %d failed, %.1f s\n", backend().name.c_str(), group.name,
                    counter().checks - before.checks, counter().failures - before.failures,
                    (double) (ggml_time_us() - start) / 1e6);
        std::fflush(stdout);
    }
    if (ran == 0 && only.empty()) {
        counter().label = backend().name;
        counter().expect(false, "no group ran on this device");
    }
}

static void print_groups() {
    for (const Group & group : GROUPS) {
        std::printf("%s\n", group.name);
    }
    for (const Tolerance & t : TOLERANCES) {
        std::printf("tolerance %g: %s\n", t.absolute, t.reason);
    }
}

int main(int argc, char ** argv) {
    Names only, without, modules;
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        const bool names_group = argument == "--only" || argument == "--without";
        if (argument == "--groups") {
            print_groups();
            return 0;
        }
        if (names_group && i + 1 < argc && std::any_of(std::begin(GROUPS), std::end(GROUPS), [&](const Group & g) {
                return argv[i + 1] == std::string(g.name);
            })) {
            (argument == "--only" ? only : without).push_back(argv[++i]);
        } else if (argument[0] != '-') {
            modules.push_back(argument);
        } else {
            std::fprintf(stderr, "%s: %s\n%s", names_group ? "there is no such group" : "unknown option",
                         names_group && i + 1 < argc ? argv[i + 1] : argv[i], USAGE);
            return EXIT_CANNOT_RUN;
        }
    }
    open_backends(modules, DFLASH_CPU_MODULE);
    for (current_backend() = 0; current_backend() < backends().size(); current_backend()++) {
        run_groups(only, without);
    }
    current_backend() = 0;
    close_backends();
    std::printf("%d checks, %d failed\n", counter().checks, counter().failures);
    return counter().failures == 0 && counter().checks > 0 ? 0 : 1;
}
