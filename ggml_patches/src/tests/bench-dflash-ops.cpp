// Times of the ops of GGML_OP_DFLASH on one device, beside stock ggml's way in the same run. Not a test.

#include "dflash-bench-draft.h"

#ifndef DFLASH_CPU_MODULE
#define DFLASH_CPU_MODULE ""
#endif

constexpr char USAGE[] =
    "usage: bench-dflash-ops [--small] [--only OP]... [--json FILE] [--threads N] [MODULE]\n"
    "\n"
    "Measures on the first device of the backend module given by path (libdflash-cuda.so), else on the CPU. Prints a\n"
    "Markdown table: median microseconds of a node, the bytes it has to move, and which share of the bandwidth of a\n"
    "large copy on this device that is.\n"
    "  --small      small shapes, for a look at whether everything runs\n"
    "  --only OP    only ops whose name begins like this: gdn, conv, attention, dynamic, select, sample, accept, "
    "place,\n"
    "               penalise, mul_mat\n"
    "  --json FILE  the same numbers as JSON\n"
    "  --threads N  threads on the CPU (1)\n"
    "exit code: 0 measured, 2 cannot run, 3 the module has no device here\n";

struct Row {
    Bench bench;
    int n_nodes;
    double ours, stock; // microseconds
};

static std::string number(double x, const char * format) {
    char text[32];
    std::snprintf(text, sizeof(text), format, x);
    return x < 0 ? "" : text;
}

static void print_row(const Row & r, double bandwidth) {
    const double rate = r.ours > 0 ? r.bench.bytes / r.ours * 1e6 : -1;
    std::printf("| %s | %s | %d | %s | %s | %s | %.2f | %s | %s |\n", r.bench.op.c_str(), r.bench.shape.c_str(),
                (int) r.bench.lanes, number(r.ours, "%.1f").c_str(), number(r.stock, "%.1f").c_str(),
                r.ours > 0 && r.stock > 0 ? number(r.stock / r.ours, "%.2f").c_str() : "", r.bench.bytes * 1e-6,
                number(rate * 1e-9, "%.0f").c_str(), number(100 * rate / bandwidth, "%.0f %%").c_str());
    std::fflush(stdout);
}

static std::string json_number(double x) {
    return x < 0 ? "null" : number(x, "%.3f");
}

static bool write_json(const std::string & path, const Backend & on, double bandwidth, const std::vector<Row> & rows) {
    FILE * file = std::fopen(path.c_str(), "w");
    if (!file) {
        return false;
    }
    std::fprintf(file, "{\"device\": \"%s\", \"ggml\": \"%s\", \"copy_bytes_per_s\": %.0f, \"rows\": [",
                 ggml_backend_dev_description(on.device), ggml_version(), bandwidth);
    for (size_t i = 0; i < rows.size(); i++) {
        const Row & r = rows[i];
        std::fprintf(file,
                     "%s\n  {\"op\": \"%s\", \"shape\": \"%s\", \"lanes\": %d, \"nodes\": %d, \"bytes\": %.0f, "
                     "\"us\": %s, \"stock_us\": %s, \"stock\": \"%s\"}",
                     i ? "," : "", r.bench.op.c_str(), r.bench.shape.c_str(), (int) r.bench.lanes, r.n_nodes,
                     r.bench.bytes, json_number(r.ours).c_str(), json_number(r.stock).c_str(),
                     r.bench.stock_way.c_str());
    }
    std::fprintf(file, "\n]}\n");
    return std::fclose(file) == 0;
}

// Stock on the CPU, by its plain dot products or as it chooses.
static void set_dots(const Backend & on, bool dots) {
    typedef void (*set_use_ref_t)(ggml_backend_t, bool);
    const set_use_ref_t set_use_ref = (set_use_ref_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(on.device), "ggml_backend_cpu_set_use_ref");
    if (on.is_cpu() && set_use_ref) {
        set_use_ref(on.handle, dots);
    }
}

static Row measure(Backend & on, const Bench & b, bool small) {
    Row r = {b, node_count(b.bytes, small), NOT_MEASURED, NOT_MEASURED};
    r.ours = time_of(on, r.n_nodes, b.ours);
    if (b.stock) {
        set_dots(on, b.dots);
        r.stock = time_of(on, r.n_nodes, b.stock);
        set_dots(on, false);
    }
    return r;
}

static void print_ways(const std::vector<Row> & rows) {
    std::vector<std::string> said;
    for (const Row & r : rows) {
        const std::string line = r.bench.op + ": " + r.bench.stock_way;
        if (!r.bench.stock_way.empty() && std::find(said.begin(), said.end(), line) == said.end()) {
            said.push_back(line);
            std::printf("* stock %s\n", line.c_str());
        }
    }
}

int main(int argc, char ** argv) {
    bool small = false;
    int n_threads = 1;
    std::string json;
    std::vector<std::string> only, modules;
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        if (argument == "--small") {
            small = true;
        } else if (argument == "--only" && i + 1 < argc) {
            only.push_back(argv[++i]);
        } else if (argument == "--json" && i + 1 < argc) {
            json = argv[++i];
        } else if (argument == "--threads" && i + 1 < argc) {
            n_threads = std::max(1, std::atoi(argv[++i]));
        } else if (argument[0] != '-') {
            modules.push_back(argument);
        } else {
            std::fputs(USAGE, stderr);
            return EXIT_CANNOT_RUN;
        }
    }
    open_backends(modules, DFLASH_CPU_MODULE);
    Backend & on = backends()[backends().size() > 1 ? 1 : 0];
    if (on.set_n_threads) {
        on.set_n_threads(on.handle, n_threads);
    }
    const BenchSizes sizes = small ? BenchSizes::tiny() : BenchSizes::full();
    std::vector<Bench> benches = target_benches(sizes);
    for (const Bench & b : draft_benches(sizes)) {
        benches.push_back(b);
    }
    for (const Bench & b : on.is_cpu() ? product_benches(sizes) : device_product_benches(sizes)) {
        benches.push_back(b);
    }
    if (!only.empty()) {
        benches.erase(std::remove_if(benches.begin(), benches.end(),
                                     [&](const Bench & b) {
                                         return std::none_of(only.begin(), only.end(), [&](const std::string & name) {
                                             return b.op.compare(0, name.size(), name) == 0;
                                         });
                                     }),
                      benches.end());
    }
    if (benches.empty()) {
        std::fprintf(stderr, "no op begins like this\n%s", USAGE);
        return EXIT_CANNOT_RUN;
    }
    const double bandwidth = copy_bandwidth(on, small);
    std::printf("%s, %s; a large copy moves %.0f GB/s (read and written)\n\n", on.name.c_str(),
                ggml_backend_dev_description(on.device), bandwidth * 1e-9);
    std::printf("| op | shape | lanes | ours, us | stock, us | stock / ours | MB | GB/s | of copy |\n"
                "|---|---|---|---|---|---|---|---|---|\n");
    std::vector<Row> rows;
    for (const Bench & b : benches) {
        rows.push_back(measure(on, b, small));
        print_row(rows.back(), bandwidth);
    }
    std::printf("\n");
    print_ways(rows);
    if (!json.empty() && !write_json(json, on, bandwidth, rows)) {
        std::fprintf(stderr, "cannot write %s\n", json.c_str());
        return EXIT_CANNOT_RUN;
    }
    close_backends();
    return 0;
}
