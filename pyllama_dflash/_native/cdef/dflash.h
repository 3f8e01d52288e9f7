/* ggml-dflash.h (our ops) and helpers.h (small functions of the extension itself). */

enum ggml_dflash_op {
    GGML_DFLASH_OP_GDN_VERIFY, GGML_DFLASH_OP_GDN_ADVANCE, GGML_DFLASH_OP_GDN_COMMIT, GGML_DFLASH_OP_CONV_VERIFY,
    GGML_DFLASH_OP_CONV_ADVANCE, GGML_DFLASH_OP_CONV_COMMIT, GGML_DFLASH_OP_ATTENTION,
    GGML_DFLASH_OP_MUL_MAT, GGML_DFLASH_OP_DYNAMIC_CONV, GGML_DFLASH_OP_SELECT, GGML_DFLASH_OP_SAMPLE,
    GGML_DFLASH_OP_ACCEPT, GGML_DFLASH_OP_PLACE, GGML_DFLASH_OP_PENALISE, ...
};

enum ggml_dflash_sampling {
    GGML_DFLASH_SAMPLING_SEED_LOW, GGML_DFLASH_SAMPLING_SEED_HIGH, GGML_DFLASH_SAMPLING_TEMPERATURE,
    GGML_DFLASH_SAMPLING_TOP_K, GGML_DFLASH_SAMPLING_TOP_P_LOW, GGML_DFLASH_SAMPLING_TOP_P_HIGH,
    GGML_DFLASH_SAMPLING_LOG_MIN_P, GGML_DFLASH_SAMPLING_RESERVED, GGML_DFLASH_SAMPLING_WORDS, ...
};

enum ggml_dflash_backend {
    GGML_DFLASH_BACKEND_CPU, GGML_DFLASH_BACKEND_CUDA, GGML_DFLASH_BACKEND_HIP, GGML_DFLASH_BACKEND_SYCL, ...
};

struct ggml_tensor * ggml_dflash_gdn_verify(
    struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k, struct ggml_tensor * v,
    struct ggml_tensor * g, struct ggml_tensor * beta, struct ggml_tensor * state, struct ggml_tensor * log,
    struct ggml_tensor * slots, struct ggml_tensor * n_pending);
struct ggml_tensor * ggml_dflash_gdn_advance(
    struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k, struct ggml_tensor * v,
    struct ggml_tensor * g, struct ggml_tensor * beta, struct ggml_tensor * state, struct ggml_tensor * log,
    struct ggml_tensor * slots, struct ggml_tensor * n_pending, struct ggml_tensor * n_rows);
struct ggml_tensor * ggml_dflash_gdn_commit(
    struct ggml_context * ctx, struct ggml_tensor * state, struct ggml_tensor * log, struct ggml_tensor * slots,
    struct ggml_tensor * n_pending);
struct ggml_tensor * ggml_dflash_conv_verify(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * w, struct ggml_tensor * rows,
    struct ggml_tensor * slots, struct ggml_tensor * n_pending);
struct ggml_tensor * ggml_dflash_conv_advance(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * w, struct ggml_tensor * rows,
    struct ggml_tensor * slots, struct ggml_tensor * n_pending, struct ggml_tensor * n_rows);
struct ggml_tensor * ggml_dflash_conv_commit(
    struct ggml_context * ctx, struct ggml_tensor * rows, struct ggml_tensor * slots, struct ggml_tensor * n_pending);
struct ggml_tensor * ggml_dflash_attention(
    struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k_pages, struct ggml_tensor * v_pages,
    struct ggml_tensor * table, struct ggml_tensor * slots, struct ggml_tensor * base, struct ggml_tensor * n_rows,
    float scale, int32_t window, bool causal);
struct ggml_tensor * ggml_dflash_mul_mat(
    struct ggml_context * ctx, struct ggml_tensor * w, struct ggml_tensor * x);
struct ggml_tensor * ggml_dflash_dynamic_conv(
    struct ggml_context * ctx, struct ggml_tensor * x, struct ggml_tensor * coef, struct ggml_tensor * base);
struct ggml_tensor * ggml_dflash_select(
    struct ggml_context * ctx, struct ggml_tensor * logits, struct ggml_tensor * anchors, struct ggml_tensor * base,
    struct ggml_tensor * sampling, struct ggml_tensor * gate, struct ggml_tensor * predecessor,
    struct ggml_tensor * successor, int32_t top_k);
struct ggml_tensor * ggml_dflash_sample(
    struct ggml_context * ctx, struct ggml_tensor * logits, struct ggml_tensor * base, struct ggml_tensor * n_rows,
    struct ggml_tensor * sampling);
struct ggml_tensor * ggml_dflash_accept(
    struct ggml_context * ctx, struct ggml_tensor * tokens, struct ggml_tensor * block, struct ggml_tensor * n_rows,
    struct ggml_tensor * slots, struct ggml_tensor * n_pending, struct ggml_tensor * base,
    struct ggml_tensor * history);
struct ggml_tensor * ggml_dflash_place(
    struct ggml_context * ctx, struct ggml_tensor * slots, struct ggml_tensor * n_rows, struct ggml_tensor * base,
    struct ggml_tensor * history, struct ggml_tensor * table, struct ggml_tensor * ring, int32_t rows, int32_t fill,
    int32_t spare, int32_t ring_spare);
struct ggml_tensor * ggml_dflash_penalise(
    struct ggml_context * ctx, struct ggml_tensor * logits, struct ggml_tensor * block, struct ggml_tensor * base,
    struct ggml_tensor * n_rows, struct ggml_tensor * slots, struct ggml_tensor * history,
    struct ggml_tensor * penalties, struct ggml_tensor * bias);
bool ggml_dflash_supported(enum ggml_dflash_backend backend, const struct ggml_tensor * op);
const char * ggml_dflash_check_gated_delta_net(const struct ggml_tensor * op);
const char * ggml_dflash_check(const struct ggml_tensor * op);
const char * ggml_dflash_last_error(void);
const char * ggml_dflash_op_name(enum ggml_dflash_op op);
enum ggml_dflash_op ggml_dflash_get_op(const struct ggml_tensor * op);

bool dflash_backend_set_n_threads(ggml_backend_t backend, int n_threads);
bool dflash_backend_cpu_set_use_ref(ggml_backend_t backend, bool use_ref);
bool dflash_to_float(enum ggml_type type, const void * src, float * dst, int64_t n);

extern "Python" void dflash_log_callback(enum ggml_log_level level, const char * text, void * user_data);
