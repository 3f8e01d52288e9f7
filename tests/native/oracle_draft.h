// The target's taps and the draft's side of a round, as upstream's own loop drives them (see oracle.cpp).
#pragma once

#include "oracle_common.h"

#include <utility>

namespace oracle {

// The residual stream entering some layers of the target. Upstream's extraction knows the inputs of layers 0..n-1.
// For id n, the stream after the last layer, its qwen35 graph registers no tensor (and asking aborts), and the nextn
// embedding is taken after output_norm: so that one is caught from the graph by its name while it is computed.
class Taps {
  public:
    Taps(const llama_model * model, std::vector<int32_t> ids)
        : ids(std::move(ids)), n_layer(llama_model_n_layer(model)), width((size_t) llama_model_n_embd(model)),
          last_name("l_out-" + std::to_string(n_layer - 1)) {
        for (const int32_t id : this->ids) {
            if (id < 0 || id > n_layer)
                fail("tap " + std::to_string(id) + " outside 0.." + std::to_string(n_layer));
            watching = watching || id == n_layer;
        }
    }

    static bool watch(ggml_tensor * t, bool ask, void * self_ptr) {
        Taps & self = *static_cast<Taps *>(self_ptr);
        if (self.last_name != ggml_get_name(t))
            return !ask;
        if (!ask) {
            const size_t at = self.last.size();
            self.last.resize(at + (size_t) ggml_nelements(t));
            ggml_backend_tensor_get(t, self.last.data() + at, 0, ggml_nbytes(t));
        }
        return true;
    }

    Context open_target(llama_model * model, const Options & opt, int32_t n_ctx) {
        Context ctx = open(model, opt, n_ctx, nullptr, watching ? watch : nullptr, this);
        for (const int32_t id : ids) {
            if (id < n_layer)
                llama_set_embeddings_layer_inp(ctx.get(), (uint32_t) id, true);
        }
        return ctx;
    }

    // [tokens, ids, width], concatenated in list order as the draft's fc wants it
    std::vector<float> collect(llama_context * ctx, const std::vector<llama_token> & tokens) {
        std::vector<float> all(tokens.size() * ids.size() * width);
        last.clear();
        prefill(ctx, tokens, (int32_t) tokens.size(), [&](int32_t at, int32_t rows) {
            for (size_t k = 0; k < ids.size(); ++k) {
                if (ids[k] == n_layer && last.size() != (size_t) rows * width)
                    fail("stream after the last layer not seen");
                const float * src =
                    ids[k] < n_layer ? llama_get_embeddings_layer_inp(ctx, (uint32_t) ids[k]) : last.data();
                for (size_t i = 0; i < (size_t) rows; ++i) {
                    std::copy_n(src + i * width, width, all.data() + (((size_t) at + i) * ids.size() + k) * width);
                }
            }
            last.clear();
        });
        return all;
    }

    size_t row_floats() const { return ids.size() * width; }

  private:
    std::vector<int32_t> ids;
    int32_t n_layer;
    size_t width;
    std::string last_name;
    bool watching = false;
    std::vector<float> last;
};

inline std::string meta(const llama_model * model, const char * key, const char * fallback) {
    char text[64];
    return llama_model_meta_val_str(model, key, text, sizeof text) >= 0 ? text : fallback;
}

// The draft's side of a speculative round. Its memory holds the K/V injected so far and nothing else.
class Draft {
  public:
    Draft(llama_model * model, const Options & opt, int32_t n_ctx, llama_context * target)
        : block(std::stoi(meta(model, "dflash.block_size", "16"))), top_k(llama_model_dflash_selector_top_k(model)),
          mask(llama_vocab_mask(llama_model_get_vocab(model))), width((size_t) llama_model_n_embd(model)),
          vocab(vocab_size(model)), ctx(open(model, opt, n_ctx + block, target)), batch(batch_for(ctx.get())) {
        if (mask == LLAMA_TOKEN_NULL)
            fail("the draft names no mask token");
        if (top_k > 0)
            llama_set_embeddings_nextn(ctx.get(), true, /*masked*/ false);
        llama_set_causal_attn(ctx.get(), meta(model, "dflash.attention.causal", "false") == "true");
    }

    void inject(const float * taps, size_t row_floats, int32_t from, int32_t to) {
        for (int32_t at = from; at < to; at += N_BATCH) {
            llama_batch_ext_clear(batch.get());
            for (int32_t p = at; p < std::min(to, at + N_BATCH); ++p) {
                const llama_pos pos[4] = {p, p, p, 0}; // axes of an M-RoPE draft; others read the first
                const int32_t i =
                    llama_batch_ext_add_embd(batch.get(), 0, {taps + (size_t) p * row_floats, 1, row_floats});
                if (i < 0)
                    fail("taps of position " + std::to_string(p) + " refused: the draft expects another width");
                llama_batch_ext_set_pos(batch.get(), i, pos);
                llama_batch_ext_set_output_logits(batch.get(), i, false);
            }
            decode(ctx.get(), batch.get());
        }
    }

    // Writes, for block positions 1.., the candidate ids (as floats) then the scores [predecessor, candidate].
    void run_block(llama_token anchor, int32_t n, Output & out) {
        llama_batch_ext_clear(batch.get());
        for (int32_t t = 0; t < block; ++t)
            add_token(batch.get(), t == 0 ? anchor : mask, n + t, top_k == 0);
        decode(ctx.get(), batch.get());
        if (top_k > 0) {
            const float * lattice = llama_get_embeddings_nextn(ctx.get());
            if (!lattice)
                fail("the draft gave no lattice");
            for (int32_t t = 1; t < block; ++t)
                out.words(lattice + (size_t) t * width, (size_t) (top_k + top_k * top_k));
        } else { // no selector: the row's best token and its logit
            for (int32_t t = 1; t < block; ++t) {
                const float * row = logits_row(ctx.get(), t);
                const auto best = std::max_element(row, row + vocab) - row;
                const float pair[2] = {(float) best, row[best]};
                out.words(pair, 2);
            }
        }
        if (!llama_memory_seq_rm(llama_get_memory(ctx.get()), 0, n, -1))
            fail("cannot remove the block's rows");
    }

    void clear() { llama_memory_clear(llama_get_memory(ctx.get()), true); }
    int32_t candidates() const { return std::max(1, top_k); }

    const int32_t block;
    const int32_t top_k;
    const llama_token mask;

  private:
    size_t width;
    int32_t vocab;
    Context ctx;
    Batch batch;
};

} // namespace oracle
