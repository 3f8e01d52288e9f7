// The tests' oracle: runs GGUF files through the vendored libllama and writes what its graphs compute.
//
//   oracle logits --target T --tokens F --out O [--last N]      teacher-forced logits
//   oracle taps   --target T --tokens F --out O --layers F      residual stream entering the given layers
//   oracle rounds --target T --draft D --tokens F --anchors F --out O     DFlash draft blocks
//   oracle greedy --target T --tokens F --out O --n N           plain greedy continuation
//
// Common options: --cpu-module PATH (backend module to load; none when ggml has the CPU backend linked in),
// --kv f32|f16 (target and draft), --threads N, --no-tiled (default) | --tiled, --verbose.
//
// Files hold native-endian 32-bit words without a header. A tokens file is a sequence of prompts, each
// "length, ids..."; every prompt starts from empty memory. Anchors and layers files are plain int32 lists.
// One JSON line on stdout gives the shape of what was written. Any failure: one line on stderr, exit code 2.

#include "oracle_draft.h"

#include "ggml-backend.h"

#include <cmath>
#include <cstdlib>
#include <map>

using namespace oracle;

namespace {

void run_logits(const Options & opt) {
    const auto prompts = read_prompts(opt.tokens);
    const Model model = load(opt.target);
    const Context ctx = open(model.get(), opt, longest(prompts));
    const int32_t vocab = vocab_size(model.get());
    Output out(opt.out);
    int64_t written = 0;
    for (const auto & tokens : prompts) {
        const int32_t n = (int32_t) tokens.size();
        const int32_t first = opt.last > 0 ? std::max(0, n - opt.last) : 0;
        prefill(ctx.get(), tokens, first, [&](int32_t at, int32_t rows) {
            for (int32_t i = std::max(0, first - at); i < rows; ++i, ++written) {
                out.words(logits_row(ctx.get(), i), (size_t) vocab);
            }
        });
    }
    out.close();
    std::printf("{\"rows\": %lld, \"vocab\": %d}\n", (long long) written, vocab);
}

void run_taps(const Options & opt) {
    const auto prompts = read_prompts(opt.tokens);
    const auto layers = read_words<int32_t>(opt.layers);
    const Model model = load(opt.target);
    Taps taps(model.get(), layers);
    const Context ctx = taps.open_target(model.get(), opt, longest(prompts));
    Output out(opt.out);
    int64_t rows = 0;
    for (const auto & tokens : prompts) {
        const auto all = taps.collect(ctx.get(), tokens);
        out.words(all.data(), all.size());
        rows += (int64_t) tokens.size();
    }
    out.close();
    std::printf("{\"rows\": %lld, \"taps\": %zu, \"width\": %d}\n", (long long) rows, layers.size(),
                llama_model_n_embd(model.get()));
}

void run_rounds(const Options & opt) {
    const auto prompts = read_prompts(opt.tokens);
    const auto anchors = read_words<int32_t>(opt.anchors);
    if (prompts.size() != 1)
        fail("rounds wants one prompt");
    const auto & tokens = prompts[0];
    const Model target = load(opt.target), draft_model = load(opt.draft);
    const int32_t * ids = llama_model_target_layer_ids(draft_model.get());
    Taps taps(target.get(), {ids, ids + llama_model_target_layer_ids_n(draft_model.get())});
    const Context ctx = taps.open_target(target.get(), opt, (int32_t) tokens.size());
    const auto features = taps.collect(ctx.get(), tokens);
    Draft draft(draft_model.get(), opt, (int32_t) tokens.size(), ctx.get());
    Output out(opt.out);
    int32_t injected = 0;
    for (const int32_t n : anchors) {
        if (n < 0 || n >= (int32_t) tokens.size())
            fail("anchor " + std::to_string(n) + " outside the prompt");
        if (n < injected) { // going back: start over, so that only positions < n are ever in memory
            draft.clear();
            injected = 0;
        }
        draft.inject(features.data(), taps.row_floats(), injected, n);
        injected = n;
        draft.run_block(tokens[(size_t) n], n, out);
    }
    out.close();
    std::printf("{\"rounds\": %zu, \"block\": %d, \"k\": %d, \"mask\": %d}\n", anchors.size(), draft.block,
                draft.candidates(), draft.mask);
}

// Per prompt: n ids (int32), then n margins (f32): best logit minus the second best, to tell near ties.
void run_greedy(const Options & opt) {
    const auto prompts = read_prompts(opt.tokens);
    if (opt.n < 1)
        fail("greedy wants --n");
    const Model model = load(opt.target);
    const Context ctx = open(model.get(), opt, longest(prompts) + opt.n);
    const int32_t vocab = vocab_size(model.get());
    const Batch batch = batch_for(ctx.get());
    Output out(opt.out);
    for (const auto & tokens : prompts) {
        const int32_t n = (int32_t) tokens.size();
        std::vector<int32_t> ids;
        std::vector<float> margins;
        const auto take = [&](const float * row) {
            const auto best = std::max_element(row, row + vocab); // the first of equals
            float second = -INFINITY;
            for (const float * x = row; x < row + vocab; ++x) {
                if (x != best)
                    second = std::max(second, *x);
            }
            ids.push_back((int32_t) (best - row));
            margins.push_back(*best - second);
        };
        prefill(ctx.get(), tokens, n - 1, [&](int32_t at, int32_t rows) {
            if (at + rows == n)
                take(logits_row(ctx.get(), rows - 1));
        });
        for (int32_t p = n; (int32_t) ids.size() < opt.n; ++p) {
            llama_batch_ext_clear(batch.get());
            add_token(batch.get(), ids.back(), p, true);
            decode(ctx.get(), batch.get());
            take(logits_row(ctx.get(), 0));
        }
        out.words(ids.data(), ids.size());
        out.words(margins.data(), margins.size());
    }
    out.close();
    std::printf("{\"prompts\": %zu, \"n\": %d}\n", prompts.size(), opt.n);
}

Options parse(int argc, char ** argv) {
    if (argc < 2)
        fail("usage: oracle logits|taps|rounds|greedy --target FILE --tokens FILE --out FILE ...");
    Options opt;
    opt.mode = argv[1];
    const std::map<std::string, std::string *> texts = {
        {"--target", &opt.target},         {"--draft", &opt.draft},   {"--tokens", &opt.tokens},
        {"--anchors", &opt.anchors},       {"--layers", &opt.layers}, {"--out", &opt.out},
        {"--cpu-module", &opt.cpu_module},
    };
    const std::map<std::string, int *> numbers = {{"--threads", &opt.threads}, {"--last", &opt.last}, {"--n", &opt.n}};
    for (int i = 2; i < argc; ++i) {
        const std::string arg = argv[i];
        if (arg == "--verbose") {
            opt.verbose = true;
            continue;
        }
        if (arg == "--tiled" || arg == "--no-tiled") {
            opt.tiled = arg == "--tiled";
            continue;
        }
        if (i + 1 == argc)
            fail(arg + " wants a value");
        const std::string value = argv[++i];
        if (texts.count(arg)) {
            *texts.at(arg) = value;
        } else if (numbers.count(arg)) {
            *numbers.at(arg) = std::stoi(value);
        } else if (arg == "--kv" && (value == "f32" || value == "f16")) {
            opt.kv = value == "f32" ? GGML_TYPE_F32 : GGML_TYPE_F16;
        } else {
            fail("unknown option " + arg + " " + value);
        }
    }
    return opt;
}

void log_errors(ggml_log_level level, const char * text, void *) {
    if (level == GGML_LOG_LEVEL_ERROR)
        std::fputs(text, stderr);
}

} // namespace

int main(int argc, char ** argv) {
    try {
        const Options opt = parse(argc, argv);
        // The tiled matmul rounds differently from 8 rows on. Off: every row is the plain dot product, in any batch.
        if (!opt.tiled)
            setenv("GGML_CPU_TILED_MM", "0", 1);
        if (!opt.verbose)
            llama_log_set(log_errors, nullptr);
        if (!opt.cpu_module.empty() && !ggml_backend_load(opt.cpu_module.c_str()))
            fail("cannot load " + opt.cpu_module);
        llama_backend_init();
        if (opt.mode == "logits")
            run_logits(opt);
        else if (opt.mode == "taps")
            run_taps(opt);
        else if (opt.mode == "rounds")
            run_rounds(opt);
        else if (opt.mode == "greedy")
            run_greedy(opt);
        else
            fail("unknown mode " + opt.mode);
        llama_backend_free();
        return 0;
    } catch (const std::exception & e) {
        std::fprintf(stderr, "oracle: %s\n", e.what());
        return 2;
    }
}
