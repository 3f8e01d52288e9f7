// Attention over paged keys and values.
//
// A row walks its visible positions page by page with a running maximum and sum. Pages are cut at absolute positions,
// and within a page everything happens in one fixed order, so a row's numbers depend on its query, its position and the
// keys and values it sees. Rows that share a kv head are run in tiles only to convert each page to F32 once per tile.

#include "dflash/kernels.h"

#include "ggml-cpu.h"

#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

namespace dflash {
namespace {

constexpr int PAGE = GGML_DFLASH_PAGE_ROWS;
constexpr int MAX_TILE = 32; // rows

struct Node {
    const ggml_tensor *q, *k, *v, *table;
    const int32_t *slots, *base, *n_rows;
    ggml_tensor * out;
    float scale;
    int64_t window;
    bool causal;

    int64_t n_kv_heads() const { return k->ne[1]; }
    int64_t gqa() const { return q->ne[1] / k->ne[1]; }
    int64_t rows_per_kv_head() const { return q->ne[2] * gqa(); }
};

Node read_node(ggml_tensor * dst) {
    Node node;
    node.q = dst->src[0], node.k = dst->src[1], node.v = dst->src[2], node.table = dst->src[3];
    node.slots = (const int32_t *) dst->src[4]->data;
    node.base = (const int32_t *) dst->src[5]->data;
    node.n_rows = (const int32_t *) dst->src[6]->data;
    node.out = dst;
    std::memcpy(&node.scale, &dst->op_params[1], sizeof(node.scale));
    node.window = dst->op_params[2];
    node.causal = dst->op_params[3] != 0;
    return node;
}

// Positions first..end-1.
struct Range {
    int64_t first = 0, end = 0;
    bool empty() const { return first >= end; }
};

// What row t of a lane sees; empty for a dead row.
Range visible(const Node & node, int64_t lane, int64_t t) {
    const int64_t slot = slot_of(node.slots, lane, node.table->ne[1]);
    const int64_t base = node.base[lane];
    const int64_t n_rows = node.n_rows[lane];
    if (slot < 0 || base < 0 || n_rows < 0 || n_rows > node.q->ne[2] || t >= n_rows) {
        return {};
    }
    const int64_t position = base + t;
    Range range;
    range.first = node.window > 0 && position >= node.window ? position - node.window + 1 : 0;
    range.end = node.causal ? position + 1 : base + n_rows;

    // every page must be there: a row that saw only part of its positions would be wrong without notice
    if (range.end > node.table->ne[0] * PAGE) {
        return {};
    }
    const int64_t n_pages = node.k->ne[2] / PAGE;
    const int32_t * pages = (const int32_t *) node.table->data + slot * node.table->ne[0];
    for (int64_t p = range.first / PAGE; p <= (range.end - 1) / PAGE; p++) {
        if (pages[p] < 0 || pages[p] >= n_pages) {
            return {};
        }
    }
    return range;
}

// Rows first..end-1 of a page for one kv head, as F32.
void convert(const ggml_tensor * pages, int64_t page, int64_t kv_head, int first, int end, float * to) {
    const int64_t D = pages->ne[0];
    for (int r = first; r < end; r++) {
        const void * from = at<void>(pages, kv_head, page * PAGE + r);
        float * row = to + r * D;
        switch (pages->type) {
        case GGML_TYPE_F32:
            std::memcpy(row, from, D * sizeof(float));
            break;
        case GGML_TYPE_F16:
            ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) from, row, D);
            break;
        default: { // Q8_0
            const block_q8_0 * block = (const block_q8_0 *) from;
            for (int64_t b = 0; b < D / QK8_0; b++) {
                const float d = GGML_FP16_TO_FP32(block[b].d);
                for (int i = 0; i < QK8_0; i++) {
                    row[b * QK8_0 + i] = d * block[b].qs[i];
                }
            }
        }
        }
    }
}

// score[r] = scale * q . k[r] for the groups of KEYS rows that meet first..end-1
template <int D> void scores(const float * q, const float (*k)[D], float scale, int first, int end, float * score) {
    constexpr int KEYS = 8;
    for (int g = first / KEYS * KEYS; g < end; g += KEYS) {
        Vec8 acc[KEYS];
        for (int r = 0; r < KEYS; r++) {
            acc[r] = Vec8::all(0.0f);
        }
        for (int i = 0; i < D; i += WIDTH) {
            const Vec8 q_i = Vec8::load(q + i);
            for (int r = 0; r < KEYS; r++) {
                acc[r] = fma(q_i, Vec8::load(&k[g + r][i]), acc[r]);
            }
        }
        sum4(acc, score + g);
        sum4(acc + 4, score + g + 4);
        for (int r = 0; r < KEYS; r++) {
            score[g + r] *= scale;
        }
    }
}

// acc = factor * acc + sum_r p[r] * v[r], in order of r
template <int D> void accumulate(float * acc, float factor, const float * p, const float (*v)[D], int first, int end) {
    constexpr int SPAN = (D < 64 ? D : 64) / WIDTH;
    for (int i = 0; i < D; i += SPAN * WIDTH) {
        Vec8 part[SPAN];
        for (int m = 0; m < SPAN; m++) {
            part[m] = Vec8::all(factor) * Vec8::load(acc + i + m * WIDTH);
        }
        for (int r = first; r < end; r++) {
            const Vec8 p_r = Vec8::all(p[r]);
            for (int m = 0; m < SPAN; m++) {
                part[m] = fma(p_r, Vec8::load(&v[r][i + m * WIDTH]), part[m]);
            }
        }
        for (int m = 0; m < SPAN; m++) {
            part[m].store(acc + i + m * WIDTH);
        }
    }
}

// Working memory of one thread.
template <int D> struct Scratch {
    alignas(64) float k[PAGE][D], v[PAGE][D];
    alignas(64) float acc[MAX_TILE][D];
    const float * q[MAX_TILE];
    float * out[MAX_TILE];
    Range range[MAX_TILE];
    float max[MAX_TILE], sum[MAX_TILE];
};

// One row meets one page: rows first..end-1 of it.
template <int D> void meet(Scratch<D> & s, int row, int first, int end, float scale) {
    alignas(64) float p[PAGE] = {};
    scores<D>(s.q[row], s.k, scale, first, end, p);

    float max = s.max[row];
    for (int r = first; r < end; r++) {
        max = p[r] > max ? p[r] : max;
    }
    float
        factor[WIDTH]; // of what has been summed so far; on the first page that is nothing, and any finite factor does
    exp(Vec8::all(s.max[row]) - Vec8::all(max)).store(factor);
    Vec8 total = Vec8::all(0.0f);
    for (int i = 0; i < PAGE; i += WIDTH) {
        exp(Vec8::load(p + i) - Vec8::all(max)).store(p + i);
        for (int r = i; r < i + WIDTH; r++) {
            p[r] = r < first || r >= end ? 0.0f : p[r];
        }
        total = total + Vec8::load(p + i);
    }
    s.max[row] = max;
    s.sum[row] = std::fma(factor[0], s.sum[row], sum(total));
    accumulate<D>(s.acc[row], factor[0], p, s.v, first, end);
}

// Rows begin..end-1 of the rows_per_kv_head rows (t, query head) that share a kv head.
template <int D>
void run_tile(const Node & node, Scratch<D> & s, int64_t lane, int64_t kv_head, int64_t begin, int64_t end) {
    const int n = (int) (end - begin);
    Range seen = {INT64_MAX, 0};
    for (int i = 0; i < n; i++) {
        const int64_t t = (begin + i) / node.gqa();
        const int64_t head = kv_head * node.gqa() + (begin + i) % node.gqa();
        s.q[i] = at<float>(node.q, head, t, lane);
        s.out[i] = at<float>(node.out, head, t, lane);
        s.range[i] = visible(node, lane, t);
        s.max[i] = -INFINITY;
        s.sum[i] = 0.0f;
        if (!s.range[i].empty()) {
            seen.first = s.range[i].first < seen.first ? s.range[i].first : seen.first;
            seen.end = s.range[i].end > seen.end ? s.range[i].end : seen.end;
        }
    }
    std::memset(s.acc, 0, n * sizeof(s.acc[0]));

    if (!seen.empty()) {
        const int64_t slot = slot_of(node.slots, lane, node.table->ne[1]);
        const int32_t * pages = (const int32_t *) node.table->data + slot * node.table->ne[0];
        const auto part = [](const Range & range, int64_t page) { // rows of the page within the range
            const int64_t first = range.first - page * PAGE, last = range.end - page * PAGE;
            return Range{first > 0 ? first : 0, last < PAGE ? last : PAGE};
        };
        for (int64_t page = seen.first / PAGE; page <= (seen.end - 1) / PAGE; page++) {
            const Range used = part(seen, page);
            convert(node.k, pages[page], kv_head, (int) used.first, (int) used.end, s.k[0]);
            convert(node.v, pages[page], kv_head, (int) used.first, (int) used.end, s.v[0]);
            for (int i = 0; i < n; i++) {
                const Range own = part(s.range[i], page);
                if (!own.empty()) {
                    meet(s, i, (int) own.first, (int) own.end, node.scale);
                }
            }
        }
    }

    for (int i = 0; i < n; i++) {
        const float norm = s.range[i].empty() ? 0.0f : 1.0f / s.sum[i];
        for (int d = 0; d < D; d++) {
            s.out[i][d] = norm * s.acc[i][d];
        }
    }
}

// Tiles small enough that every thread gets two, if there are that many rows.
int64_t tile_rows(const Node & node, int64_t n_lanes, int n_threads) {
    const int64_t n_tiles = (2 * n_threads + n_lanes * node.n_kv_heads() - 1) / (n_lanes * node.n_kv_heads());
    const int64_t rows = (node.rows_per_kv_head() + n_tiles - 1) / n_tiles;
    return rows < MAX_TILE ? rows : MAX_TILE;
}

template <int D> void run(const ggml_compute_params * params, const Node & node) {
    // a work buffer has no promised alignment
    const uintptr_t start = ((uintptr_t) params->wdata + 63) / 64 * 64;
    Scratch<D> & s = ((Scratch<D> *) start)[params->ith];
    std::memset(s.k, 0, sizeof(s.k)); // rows nobody sees are multiplied and dropped: keep them ordinary numbers

    const int64_t n_lanes = node.q->ne[3];
    const int64_t n_rows = node.rows_per_kv_head();
    const int64_t size = tile_rows(node, n_lanes, params->nth);
    const int64_t n_tiles = (n_rows + size - 1) / size;
    // interleaved, because later rows of a causal block see more
    for (int64_t i = params->ith; i < n_tiles * node.n_kv_heads() * n_lanes; i += params->nth) {
        const int64_t tile = i % n_tiles;
        const int64_t kv_head = i / n_tiles % node.n_kv_heads();
        const int64_t lane = i / n_tiles / node.n_kv_heads();
        const int64_t end = (tile + 1) * size < n_rows ? (tile + 1) * size : n_rows;
        run_tile<D>(node, s, lane, kv_head, tile * size, end);
    }
}

} // namespace

void attention(const ggml_compute_params * params, ggml_tensor * dst) {
    const Node node = read_node(dst);
    switch (node.q->ne[0]) {
#define RUN(D)                                                                                                         \
    case D:                                                                                                            \
        run<D>(params, node);                                                                                          \
        return;
        GGML_DFLASH_HEAD_DIMS(RUN)
#undef RUN
    }
    GGML_ABORT("head width %d is refused by ggml_dflash_check", (int) node.q->ne[0]);
}

size_t attention_work_size(const ggml_tensor * node, int n_tasks) {
    switch (node->src[0]->ne[0]) {
#define SIZE(D)                                                                                                        \
    case D:                                                                                                            \
        return 64 + n_tasks * sizeof(Scratch<D>);
        GGML_DFLASH_HEAD_DIMS(SIZE)
#undef SIZE
    }
    return 0;
}

} // namespace dflash
