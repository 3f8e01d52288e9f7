// Files, model, context and prefill of the oracle (see oracle.cpp).
#pragma once

#include "llama-ext.h"
#include "llama.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace oracle {

constexpr int32_t N_BATCH = 512; // rows per decode call, logical and physical: prompts are cut at multiples of it

struct Options {
    std::string mode, target, draft, tokens, anchors, layers, out, cpu_module;
    ggml_type kv = GGML_TYPE_F32;
    int threads = 2, last = 0, n = 0;
    bool tiled = false, verbose = false;
};

[[noreturn]] inline void fail(const std::string & what) {
    throw std::runtime_error(what);
}

template <typename T> std::vector<T> read_words(const std::string & path) {
    static_assert(sizeof(T) == 4, "the files hold 32-bit words");
    std::unique_ptr<FILE, int (*)(FILE *)> f(std::fopen(path.c_str(), "rb"), std::fclose);
    if (!f)
        fail("cannot read " + path);
    std::vector<T> all;
    T word;
    while (std::fread(&word, sizeof word, 1, f.get()) == 1)
        all.push_back(word);
    return all;
}

class Output {
  public:
    explicit Output(const std::string & path) : file(std::fopen(path.c_str(), "wb")) {
        if (!file)
            fail("cannot write " + path);
    }
    Output(const Output &) = delete;
    ~Output() {
        if (file)
            std::fclose(file);
    }
    void words(const void * data, size_t count) {
        if (std::fwrite(data, 4, count, file) != count)
            fail("short write");
    }
    void close() {
        FILE * f = file;
        file = nullptr;
        if (std::fclose(f) != 0)
            fail("short write");
    }

  private:
    FILE * file;
};

inline std::vector<std::vector<llama_token>> read_prompts(const std::string & path) {
    const auto words = read_words<int32_t>(path);
    std::vector<std::vector<llama_token>> prompts;
    for (size_t i = 0; i < words.size();) {
        const size_t n = (size_t) words[i++];
        if (words[i - 1] < 1 || n > words.size() - i)
            fail(path + ": broken prompt record");
        prompts.emplace_back(words.begin() + (std::ptrdiff_t) i, words.begin() + (std::ptrdiff_t) (i + n));
        i += n;
    }
    if (prompts.empty())
        fail(path + ": no prompt");
    return prompts;
}

inline int32_t longest(const std::vector<std::vector<llama_token>> & prompts) {
    size_t n = 0;
    for (const auto & p : prompts)
        n = std::max(n, p.size());
    return (int32_t) n;
}

using Model = std::unique_ptr<llama_model, decltype(&llama_model_free)>;
using Context = std::unique_ptr<llama_context, decltype(&llama_free)>;
using Batch = std::unique_ptr<llama_batch_ext, decltype(&llama_batch_ext_free)>;

inline Model load(const std::string & path) {
    auto params = llama_model_default_params();
    params.use_extra_bufts = false; // no repacked weights: the plain kernels of the file's own types
    params.load_mtp = false;
    Model model(llama_model_load_from_file(path.c_str(), params), llama_model_free);
    if (!model)
        fail("cannot load " + path);
    return model;
}

inline Context open(llama_model * model, const Options & opt, int32_t n_ctx, llama_context * other = nullptr,
                    ggml_backend_sched_eval_callback watch = nullptr, void * watch_data = nullptr) {
    auto params = llama_context_default_params();
    params.n_ctx = (uint32_t) n_ctx;
    params.n_batch = params.n_ubatch = N_BATCH;
    params.n_seq_max = 1;
    params.n_threads = params.n_threads_batch = opt.threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v = opt.kv;
    params.swa_full = true; // a windowed layer masks but keeps all its rows
    params.ctx_other = other;
    params.cb_eval = watch;
    params.cb_eval_user_data = watch_data;
    Context ctx(llama_init_from_model(model, params), llama_free);
    if (!ctx)
        fail("cannot create a context of " + std::to_string(n_ctx) + " tokens");
    return ctx;
}

inline Batch batch_for(llama_context * ctx) {
    return Batch(llama_batch_ext_init(ctx), llama_batch_ext_free);
}

inline void add_token(llama_batch_ext * batch, llama_token id, llama_pos pos, bool output) {
    const int32_t i = llama_batch_ext_add_token(batch, 0, id);
    if (i < 0)
        fail("token " + std::to_string(id) + " at position " + std::to_string(pos) + " refused");
    llama_batch_ext_set_pos(batch, i, &pos);
    llama_batch_ext_set_output_logits(batch, i, output);
}

inline void decode(llama_context * ctx, llama_batch_ext * batch) {
    const int32_t rc = llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch);
    if (rc != 0)
        fail("decode returned " + std::to_string(rc));
    llama_synchronize(ctx);
}

// Decodes tokens in pieces of N_BATCH with logits for positions >= first_output; each(first position, rows) after each.
template <typename F>
inline void prefill(llama_context * ctx, const std::vector<llama_token> & tokens, int32_t first_output, F each) {
    const Batch batch = batch_for(ctx);
    const int32_t n = (int32_t) tokens.size();
    llama_memory_clear(llama_get_memory(ctx), true);
    for (int32_t at = 0; at < n; at += N_BATCH) {
        const int32_t rows = std::min(N_BATCH, n - at);
        llama_batch_ext_clear(batch.get());
        for (int32_t i = 0; i < rows; ++i)
            add_token(batch.get(), tokens[(size_t) (at + i)], at + i, at + i >= first_output);
        decode(ctx, batch.get());
        each(at, rows);
    }
}

inline const float * logits_row(llama_context * ctx, int32_t i) {
    const float * row = llama_get_logits_ith(ctx, i);
    if (!row)
        fail("no logits for batch row " + std::to_string(i));
    return row;
}

inline int32_t vocab_size(const llama_model * model) {
    return llama_vocab_n_tokens(llama_model_get_vocab(model));
}

} // namespace oracle
