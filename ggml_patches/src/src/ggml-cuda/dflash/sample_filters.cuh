#pragma once

// The token of a row whose lane filters: what top-k, top-p and min-p leave, and the draw from it, by a block.

#include "draw.cuh"
#include "top_k.cuh"

namespace dflash {

// What top-k, top-p and min-p leave of a row. All look at the logits before the temperature.
struct Filter {
    float largest, least;
    uint64_t top_k_end, top_p_end;

    __device__ bool in_top_k(float x, int id) const { return place_of(rank_of(x), id) <= top_k_end; }

    // Top-p orders ids by their rounded distance from the largest.
    __device__ bool keeps(float x, int id) const {
        return x >= least && in_top_k(x, id) && place_of(rank_of(x - largest), id) <= top_p_end;
    }
    __device__ bool may_keep(float largest_of_group) const { return keeps(largest_of_group, 0); }
};

__device__ __forceinline__ uint64_t find_top_p_end(const Row & row, double top_p, const Filter & filter,
                                                   Search & search) {
    return find_end(
        search,
        [&](uint32_t last, auto add) {
            visit_many(
                row,
                [&](float x) {
                    const float distance = x - filter.largest;
                    return distance > -23.0f && rank_of(distance) <= last && filter.in_top_k(x, 0);
                },
                [&](float x, int id) {
                    const float distance = x - filter.largest;
                    if (distance > -23.0f && rank_of(distance) <= last && filter.in_top_k(x, id)) {
                        add(place_of(rank_of(distance), id), fixed_weight(distance));
                    }
                });
        },
        [&](uint64_t total) { return needed_of(total, top_p); },
        [](uint32_t rank) { return fixed_weight(number_of(rank)); });
}

// The token of a row whose filters may leave any number of ids.
__device__ __forceinline__ int draw_any(const Row & row, const Sampling & sampling, Filter filter,
                                        const Scores & scores, Search & search) {
    if (sampling.has_top_k(row.n)) {
        filter.top_k_end = find_top_k_end(row, sampling.top_k, search);
    }
    if (sampling.has_top_p()) {
        filter.top_p_end = find_top_p_end(row, sampling.top_p, filter, search);
    }
    uint64_t token = NOWHERE;
    float bound = -INFINITY;
    visit_few(
        row, [&](float x) { return filter.may_keep(x); },
        [&](float x, int id) {
            if (filter.keeps(x, id) && scores.may_reach(scores.at_most(x, scores.key_from(0), id), bound)) {
                const float score = scores(x, id);
                const uint64_t place = score == score ? place_of(rank_of(score), id) : NOWHERE;
                token = place < token ? place : token;
                bound = fmaxf(bound, score);
            }
        });
    return id_at(block_min(token));
}

// The same when top-k left the places `top.first`: the weight before an id decides whether top-p keeps it.
__device__ __forceinline__ int draw_listed(TopK & top, const Sampling & sampling, const Filter & filter,
                                           const Scores & scores) {
    const uint64_t * first = top.first;
    uint64_t *places = top.listed, *weights = top.listed + MAX_LISTED_K; // in top-p; the list has done its work
    const int i = threadIdx.x, k = sampling.top_k;
    if (i < k) {
        const float distance = number_at(first[i]) - filter.largest;
        places[i] = place_of(rank_of(distance), id_at(first[i]));
        weights[i] = fixed_weight(distance);
    }
    __syncthreads();
    uint64_t token = NOWHERE;
    if (i < k) {
        uint64_t before = 0, total = 0;
        for (int other = 0; other < k; other++) {
            total += weights[other];
            before += places[other] < places[i] ? weights[other] : 0;
        }
        const float x = number_at(first[i]);
        const int id = id_at(first[i]);
        const bool in_top_p = !sampling.has_top_p() || before < needed_of(total, sampling.top_p);
        if (in_top_p && x >= filter.least) {
            const float score = scores(x, id);
            token = score == score ? place_of(rank_of(score), id) : NOWHERE;
        }
    }
    return id_at(block_min(token));
}

// The token of a filtered row whose largest logit is at `best`, in every thread.
__device__ __forceinline__ int find_token(const Row & row, uint64_t best, const Sampling & sampling,
                                          const Scores & scores, TopK & top, Search & search) {
    const float largest = number_at(best);
    const Filter filter = {largest, sampling.has_min_p() ? largest + sampling.log_min_p : -INFINITY, NOWHERE, NOWHERE};
    if (filter.least > largest) { // one token is always kept
        return id_at(best);
    }
    const bool is_small = sampling.has_top_k(row.n) && sampling.top_k <= MAX_LISTED_K;
    if (is_small && find_top_k(row, sampling.top_k, top)) {
        return draw_listed(top, sampling, filter, scores);
    }
    return draw_any(row, sampling, filter, scores, search);
}

} // namespace dflash
