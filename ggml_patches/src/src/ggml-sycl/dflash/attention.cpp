// Attention over paged keys and values. See ggml-cpu/dflash/attention.cpp: the same walk over pages that are cut at
// absolute positions, with the same order within a page.
//
// A row of a query head is one work-group's. It takes PAGES pages at a time, only so that more loads are under way:
// first the scores of all of them, WIDTH work-items a key, then the weights, page by page as if alone, then the sums of
// weighted values, a work-item per dimension.

#include "elements.hpp"
#include "kernels.hpp"
#include "numbers.hpp"

#include <cstring>

namespace dflash {

constexpr int PAGE = GGML_DFLASH_PAGE_ROWS;

template <typename Do> inline void with_page_type(ggml_type type, const Do & do_it) {
    with_type<GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0>(type, do_it);
}

struct Attention {
    View q, k, v, out;
    ggml_type k_type, v_type;
    const int32_t *table, *slots, *base, *n_rows;
    int64_t max_pages, n_pages, window;
    int n_slots, n_lanes, n_heads, gqa, n_out;
    float scale;
    bool causal;

    explicit Attention(const ggml_tensor * dst) : q(dst->src[0]), k(dst->src[1]), v(dst->src[2]), out(dst) {
        const ggml_tensor *pages = dst->src[1], *table = dst->src[3];
        k_type = dst->src[1]->type, v_type = dst->src[2]->type;
        this->table = ints_of(table), slots = ints_of(dst->src[4]);
        base = ints_of(dst->src[5]), n_rows = ints_of(dst->src[6]);
        max_pages = table->ne[0], n_slots = (int) table->ne[1], n_pages = pages->ne[2] / PAGE;
        n_heads = (int) dst->ne[1], n_out = (int) dst->ne[2], n_lanes = (int) dst->ne[3];
        gqa = (int) (dst->ne[1] / pages->ne[1]);
        std::memcpy(&scale, &dst->op_params[1], sizeof(scale));
        window = dst->op_params[2], causal = dst->op_params[3] != 0;
    }
};

// Positions first..end-1 that row t of a lane sees, and their pages.
struct Visible {
    int64_t first = 0, end = 0;
    const int32_t * pages = nullptr;

    Visible(const Attention & node, int lane, int t) {
        const int slot = slot_of(node.slots, lane, node.n_slots);
        const int64_t base = node.base[lane], n_rows = node.n_rows[lane];
        if (slot < 0 || base < 0 || n_rows < 0 || n_rows > node.n_out || t >= n_rows) {
            return;
        }
        const int64_t position = base + t;
        pages = node.table + slot * node.max_pages;
        first = node.window > 0 && position >= node.window ? position - node.window + 1 : 0;
        end = node.causal ? position + 1 : base + n_rows;
        if (end > node.max_pages * PAGE) {
            end = first;
        }
    }

    int64_t first_page() const { return first / PAGE; }
    int64_t end_page() const { return first < end ? (end - 1) / PAGE + 1 : first_page(); }
    bool has(int64_t position) const { return position >= first && position < end; }
};

template <int D> struct AttentionRow {
    static constexpr int PAGES = 4;
    static constexpr int KEYS = PAGES * PAGE;

    Attention node;
    Local<float> parts;   // of the scores of KEYS keys
    Local<float> scores;  // of KEYS keys
    Local<float> weights; // of KEYS keys

    void operator()(Item item) const {
        const int lane = (int) item.get_group(0), head = (int) item.get_group(2);
        for (int t = (int) item.get_group(1); t < node.n_out; t += (int) item.get_group_range(1)) {
            run(item, lane, t, head);
        }
    }

  private:
    void run(Item item, int lane, int t, int head) const {
        const int local = (int) item.get_local_id(2);
        const Visible seen(node, lane, t);
        float * out = node.out.template at<float>(head, t, lane);
        if (seen.first >= seen.end || !has_pages(item, seen)) {
            if (local < D) {
                out[local] = 0.0f;
            }
            return;
        }

        float q[D / WIDTH]; // the work-item's share of the query
        for (int i = 0; i < D / WIDTH; i++) {
            q[i] = node.q.template at<float>(head, t, lane)[i * WIDTH + local % WIDTH];
        }
        const int kv_head = head / node.gqa;
        float max = -INFINITY, sum = 0.0f, acc = 0.0f; // acc: of dimension `local`
        for (int64_t page = seen.first_page(); page < seen.end_page(); page += PAGES) {
            score_keys(item, seen, page, kv_head, q);
            float factor[PAGES];
            weigh_keys(item, seen, page, max, factor);
            // Unrolled, so that factor stays in registers. A page behind the last weighs nothing and changes no bit.
            with_page_type(node.v_type, [&](auto stored) {
#pragma unroll
                for (int n = 0; n < PAGES; n++) {
                    sum = sycl::fma(factor[n], sum, sum_of_page(n));
                    if (local < D) {
                        acc = factor[n] * acc;
                        add_page<decltype(stored)::type>(seen, page + n, n * PAGE, kv_head, local, acc);
                    }
                }
            });
        }
        if (local < D) {
            out[local] = divide(1.0f, sum) * acc;
        }
    }

    // Every page must be there: a row that saw only part of its positions would be wrong without notice.
    bool has_pages(Item item, const Visible & seen) const {
        bool is_bad = false;
        for (int64_t p = seen.first_page() + (int64_t) item.get_local_id(2); p < seen.end_page(); p += GROUP_SIZE) {
            is_bad = is_bad || seen.pages[p] < 0 || seen.pages[p] >= node.n_pages;
        }
        return !sycl::any_of_group(item.get_group(), is_bad);
    }

    // scores[key] = scale * q . k, for the keys of the PAGES pages from `page` on that are seen
    void score_keys(Item item, const Visible & seen, int64_t page, int kv_head, const float * q) const {
        const int local = (int) item.get_local_id(2), part = local % WIDTH;
        with_page_type(node.k_type, [&](auto stored) {
            for (int unit = local; unit < KEYS * WIDTH; unit += GROUP_SIZE) {
                const int64_t position = page * PAGE + unit / WIDTH;
                if (!seen.has(position)) {
                    continue;
                }
                const char * key = row_at(node.k, seen, position, kv_head);
                float sum = 0.0f;
                for (int i = 0; i < D / WIDTH; i++) {
                    sum = sycl::fma(q[i], element<decltype(stored)::type>(key, i * WIDTH + part), sum);
                }
                parts[unit] = sum;
            }
        });
        sycl::group_barrier(item.get_group());
        if (local < KEYS && seen.has(page * PAGE + local)) {
            scores[local] = tree(parts, local * WIDTH) * node.scale;
        }
        sycl::group_barrier(item.get_group());
    }

    // weights[key] = exp(score - largest score up to the end of its page), 0 for keys that are not seen. factor: what
    // each page makes of the sums before it; on the first page these are nothing, and any finite factor does.
    void weigh_keys(Item item, const Visible & seen, int64_t page, float & max, float * factor) const {
        const int local = (int) item.get_local_id(2);
        for (int n = 0; n < PAGES; n++) {
            const float before = max;
            for (int r = 0; r < PAGE; r++) {
                if (seen.has((page + n) * PAGE + r)) {
                    max = scores[n * PAGE + r] > max ? scores[n * PAGE + r] : max;
                }
            }
            factor[n] = exp_same(before - max);
            if (local / PAGE == n) {
                weights[local] = seen.has(page * PAGE + local) ? exp_same(scores[local] - max) : 0.0f;
            }
        }
        sycl::group_barrier(item.get_group());
    }

    float sum_of_page(int n) const {
        const auto at = [&](int i) { return weights[n * PAGE + i] + weights[n * PAGE + WIDTH + i]; };
        static_assert(PAGE == 2 * WIDTH, "the CPU adds a page's weights in two halves");
        return ((at(0) + at(4)) + (at(2) + at(6))) + ((at(1) + at(5)) + (at(3) + at(7)));
    }

    // acc += weight * value, for the rows of a page that are seen, in their order
    template <ggml_type TYPE>
    void add_page(const Visible & seen, int64_t page, int first_weight, int kv_head, int d, float & acc) const {
        for (int r = 0; r < PAGE; r++) {
            const int64_t position = page * PAGE + r;
            if (seen.has(position)) {
                acc = sycl::fma(weights[first_weight + r], element<TYPE>(row_at(node.v, seen, position, kv_head), d),
                                acc);
            }
        }
    }

    const char * row_at(const View & pages, const Visible & seen, int64_t position, int kv_head) const {
        return pages.template at<char>(kv_head, (int64_t) seen.pages[position / PAGE] * PAGE + position % PAGE);
    }
};

namespace {

template <int D> void run(ggml_backend_sycl_context & ctx, const Attention & node) {
    // The runtime refuses more than 2^31 work-items: of longer lanes a group takes several rows.
    const int n_groups = node.n_out < 64 ? node.n_out : 64;
    launch(ctx, node.n_lanes, n_groups, node.n_heads, GROUP_SIZE, [&](sycl::handler & handler) {
        constexpr int KEYS = AttentionRow<D>::KEYS;
        return AttentionRow<D>{node, Local<float>(KEYS * WIDTH, handler), Local<float>(KEYS, handler),
                               Local<float>(KEYS, handler)};
    });
}

} // namespace

void attention(ggml_backend_sycl_context & ctx, ggml_tensor * dst) {
    const Attention node(dst);
    switch (dst->ne[0]) {
#define RUN(D)                                                                                                         \
    case D:                                                                                                            \
        return run<D>(ctx, node);
        GGML_DFLASH_HEAD_DIMS(RUN)
#undef RUN
    }
    GGML_ABORT("head width %d is refused by ggml_dflash_check", (int) dst->ne[0]);
}

} // namespace dflash
