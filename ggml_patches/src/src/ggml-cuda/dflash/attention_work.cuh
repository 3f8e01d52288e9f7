#pragma once

// Attention, cut into pieces of work.
//
// Positions are cut at absolute places: into splits, four splits are a group, eight groups a super. A row's numbers are
// those of one fixed tree over what it sees: pages or tiles within a split, splits within a group, groups within a
// super, supers; every level from left to right, and what a row does not see is no part of it. Which node of the tree
// one block computes (a unit: a split, a group or a super) moves the place where the work is done, never a bit; so it
// is chosen from all lanes' lengths, on the device, for an even load.
//
// A tile is rows (t, query head of one kv head), t first. A job is a tile of a lane.

#include "kernels.cuh"

namespace dflash {
namespace attn {

constexpr int PAGE = GGML_DFLASH_PAGE_ROWS;
constexpr int MAX_JOBS = 128; // of one launch

enum Level { SPLIT_LEVEL, GROUP_LEVEL, SUPER_LEVEL, N_LEVELS };

// Every unit has a power of two of splits, and a split of positions, so that no kernel divides by them.
__host__ __device__ constexpr int bits_of(int level) {
    return level == SPLIT_LEVEL ? 0 : level == GROUP_LEVEL ? 2 : 5;
}
__host__ __device__ constexpr int splits_of(int level) {
    return 1 << bits_of(level);
}

struct Node {
    const char *q, *k, *v;
    float * out;
    const int32_t *table, *slots, *base, *n_rows;
    int64_t q_head, q_row, q_lane, k_head, k_row, v_head, v_row; // strides in bytes
    ggml_type k_type, v_type;
    int T, L, n_q_heads, n_kv_heads, gqa, n_slots, n_pages, max_pages;
    int window;
    bool causal;
    float scale;

    // what the rows of one kv head add up to
    __host__ __device__ int rows_per_kv_head() const { return T * gqa; }
    __host__ __device__ int n_positions() const { return max_pages * PAGE; }
};

// Positions first..end-1.
struct Range {
    int first = 0, end = 0;
    __device__ bool meets(int from, int to) const { return first < to && end > from; }
};

struct Lane {
    int slot, base, n_rows;
    int n_live; // leading rows that see something and whose positions the table has

    __device__ Lane(const Node & node, int lane)
        : slot(slot_of(node.slots, lane, node.n_slots)), base(node.base[lane]), n_rows(node.n_rows[lane]), n_live(0) {
        if (slot < 0 || base < 0 || n_rows < 0 || n_rows > node.T) {
            return;
        }
        const int room = node.n_positions() - base;
        n_live = n_rows <= room ? n_rows : node.causal && room > 0 ? room : 0;
    }

    // what live row t sees
    __device__ Range visible(const Node & node, int t) const {
        const int position = base + t;
        Range range;
        range.first = node.window > 0 && position >= node.window ? position - node.window + 1 : 0;
        range.end = node.causal ? position + 1 : base + n_rows;
        return range;
    }
};

// How a launch is cut; the jobs first_job .. first_job + n_jobs - 1 of all.
struct Cut {
    int tile_rows, n_tiles, first_job, n_jobs;
    int split_bits; // a split is 2^split_bits positions
    int capacity;   // units that the scratch memory has room for; enough for all at the top level
};

struct Job {
    int lane_index, tile;
    Lane lane;
    Range seen;   // by any row
    Range common; // seen by every live row

    __device__ Job(const Node & node, const Cut & cut, int job)
        : lane_index((cut.first_job + job) / cut.n_tiles), tile((cut.first_job + job) % cut.n_tiles),
          lane(node, lane_index) {
        const int t_first = tile * cut.tile_rows / node.gqa;
        const int t_last = min(((tile + 1) * cut.tile_rows - 1) / node.gqa, lane.n_live - 1);
        if (t_first <= t_last) {
            const Range early = lane.visible(node, t_first), late = lane.visible(node, t_last);
            seen.first = early.first, seen.end = late.end;
            common.first = late.first, common.end = early.end;
        }
    }

    __device__ int row_of(const Cut & cut, int tile_row) const { return tile * cut.tile_rows + tile_row; }

    // what a row of the tile sees; nothing if it is dead
    __device__ Range visible(const Node & node, const Cut & cut, int tile_row) const {
        const int t = row_of(cut, tile_row) / node.gqa;
        return t < lane.n_live ? lane.visible(node, t) : Range();
    }

    __device__ int n_units(int bits) const { // of 2^bits positions
        return seen.end > seen.first ? ((seen.end - 1) >> bits) - (seen.first >> bits) + 1 : 0;
    }
};

// Scratch memory: of every unit the pair (largest score, sum) and the weighted sum of values of each row of its tile.
// In which order a unit holds its values is known to the kernel and its Layout alone.
struct Scratch {
    int * plan; // the level, then where the units of each job begin; PLAN_WORDS in all
    float2 * sums;
    float2 * values;
};

constexpr int PLAN_WORDS = 1 + MAX_JOBS + 1;

// What one block computes. Its number among all units is also its place in the scratch memory.
struct Unit {
    int job, kv_head, first_split, end_split; // only splits that the job sees
};

// Every block finds all units; the first one tells the kernel that combines them.
struct Plan {
    int level;
    int start[N_LEVELS][MAX_JOBS + 1]; // of the units of a job, by kv head

    __device__ int n_units(const Cut & cut) const { return start[level][cut.n_jobs]; }

    __device__ Unit unit(const Node & node, const Cut & cut, int index) const {
        Unit unit = {};
        for (int step = MAX_JOBS / 2; step > 0; step /= 2) {
            unit.job += unit.job + step < cut.n_jobs && start[level][unit.job + step] <= index ? step : 0;
        }
        const Job job(node, cut, unit.job);
        const int bits = bits_of(level);
        const int n = job.n_units(cut.split_bits + bits);
        const int local = index - start[level][unit.job];
        unit.kv_head = local / n;
        const int number = (job.seen.first >> (cut.split_bits + bits)) + local - unit.kv_head * n;
        unit.first_split = max(number << bits, job.seen.first >> cut.split_bits);
        unit.end_split = min((number + 1) << bits, ((job.seen.end - 1) >> cut.split_bits) + 1);
        return unit;
    }
};

// Number of the level with the least expected time: a unit costs its splits and about three fifths of a split.
__device__ __forceinline__ int best_level(const int (&n_units)[N_LEVELS], int n_blocks, int capacity) {
    int best = SUPER_LEVEL;
    int64_t best_cost = INT64_MAX;
#pragma unroll
    for (int level = N_LEVELS - 1; level >= 0; level--) {
        const int64_t rounds = (n_units[level] + n_blocks - 1) / n_blocks;
        const int64_t cost = rounds * (5 * splits_of(level) + 3);
        if (cost < best_cost && (level == SUPER_LEVEL || n_units[level] <= capacity)) {
            best = level, best_cost = cost;
        }
    }
    return best;
}

// By all threads of a block; ends with a barrier.
__device__ __forceinline__ void make_plan(Plan & plan, const Node & node, const Cut & cut, const Scratch & scratch) {
    if (threadIdx.x < 32) {
        int n_units[N_LEVELS] = {};
        for (int from = 0; from < cut.n_jobs; from += 32) {
            const int index = from + threadIdx.x;
            const bool exists = index < cut.n_jobs;
            const Job job(node, cut, exists ? index : 0);
#pragma unroll
            for (int level = 0; level < N_LEVELS; level++) {
                int sum = exists ? job.n_units(cut.split_bits + bits_of(level)) * node.n_kv_heads : 0;
                for (int step = 1; step < 32; step *= 2) {
                    const int left = __shfl_up_sync(0xffffffff, sum, step, 32);
                    sum += (int) threadIdx.x >= step ? left : 0;
                }
                if (exists) {
                    plan.start[level][index + 1] = n_units[level] + sum;
                }
                n_units[level] += __shfl_sync(0xffffffff, sum, 31, 32);
            }
        }
        if (threadIdx.x == 0) {
            plan.start[0][0] = plan.start[1][0] = plan.start[2][0] = 0;
            plan.level = best_level(n_units, gridDim.x, cut.capacity);
        }
    }
    __syncthreads();
    if (blockIdx.x == 0) {
        for (int i = threadIdx.x; i <= cut.n_jobs; i += blockDim.x) {
            scratch.plan[1 + i] = plan.start[plan.level][i];
        }
        scratch.plan[0] = plan.level;
    }
}

} // namespace attn
} // namespace dflash
