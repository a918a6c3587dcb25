// Checks token ids and sorts them.
#include <sage/params/ops.cuh>

using namespace sage;

namespace {

constexpr int THREADS = 256;

// Counts the valid ids, which are from 0 to `limit` - 1, and converts them to u32. Records the position of the first
// invalid id, which the host reports as an error.
template <class I>
__device__ void check(const params::CheckIds& p) {
  int n = blockIdx.x * THREADS + threadIdx.x;
  bool counts = false;
  if (n < p.len) {
    int64_t id = static_cast<const I*>(p.ids)[n];
    bool ignored = p.ignores && id == p.ignored;
    counts = !ignored && id >= 0 && id < p.limit;
    if (!ignored && !counts) atomicMax(&p.status[0], uint32_t(p.len - n));
    p.places[n] = counts ? uint32_t(id) : params::NO_PLACE;
  }
  int total = __syncthreads_count(counts);
  if (threadIdx.x == 0 && total > 0) atomicAdd(&p.status[1], uint32_t(total));
}

constexpr int DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS;
constexpr int WARPS = THREADS / 32;
constexpr int ROUNDS = 8;
constexpr int TILE = THREADS * ROUNDS;  // ids that a thread block sorts
static_assert(DIGITS == THREADS, "thread d processes digit d");

__device__ __forceinline__ int digit_of(uint32_t id, int shift) { return id >> shift & (DIGITS - 1); }

__device__ void count(const params::SortIds& p) {
  __shared__ uint32_t counts[DIGITS];
  counts[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    int64_t n = int64_t(blockIdx.x) * TILE + i * THREADS + threadIdx.x;
    if (n < p.len) atomicAdd(&counts[digit_of(p.ids[n], p.shift)], 1u);
  }
  __syncthreads();
  p.counts[int64_t(blockIdx.x) * DIGITS + threadIdx.x] = counts[threadIdx.x];
}

// Moves a tile's ids to their sorted positions. The sort is stable: ids with equal digits keep their relative order.
__device__ void place(const params::SortIds& p) {
  // For a warp and a digit: first the number of the warp's ids that have the digit, later the sorted position of the
  // first of these ids.
  __shared__ uint32_t starts[WARPS][DIGITS];
  __shared__ uint32_t totals[WARPS];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, digit = threadIdx.x;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) starts[w][digit] = 0;
  __syncthreads();
  uint32_t ids[ROUNDS], ranks[ROUNDS];
  int64_t first = int64_t(blockIdx.x) * TILE + warp * 32 * ROUNDS + lane;
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    // Positions past the end count as the last digit. They are sorted behind all ids, and are not written.
    bool valid = first + i * 32 < p.len;
    ids[i] = valid ? p.ids[first + i * 32] : 0;
    int own = valid ? digit_of(ids[i], p.shift) : DIGITS - 1;
    unsigned equals = __match_any_sync(~0u, own);
    uint32_t before = __popc(equals & ((1u << lane) - 1));
    ranks[i] = starts[warp][own] + before;
    __syncwarp();
    if (before == 0) starts[warp][own] += __popc(equals);
    __syncwarp();
  }
  // Each thread sums the counts of one digit: in all tiles, and in the tiles before this one.
  uint32_t all = 0, earlier = 0;
#pragma unroll 8
  for (int tile = 0; tile < int(gridDim.x); ++tile) {
    uint32_t count = p.counts[int64_t(tile) * DIGITS + digit];
    all += count;
    earlier += tile < int(blockIdx.x) ? count : 0;
  }
  uint32_t sum = all;
  for (int step = 1; step < 32; step *= 2) {
    uint32_t left = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  uint32_t start = sum - all + earlier;
  for (int w = 0; w < warp; ++w) start += totals[w];
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    uint32_t count = starts[w][digit];
    starts[w][digit] = start;
    start += count;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i) {
    int64_t n = first + i * 32;
    if (n >= p.len) break;
    uint32_t to = starts[warp][digit_of(ids[i], p.shift)] + ranks[i];
    p.sorted_ids[to] = ids[i];
    p.sorted_order[to] = p.order ? p.order[n] : uint32_t(n);
  }
}

}  // namespace

#define CHECK(name, I)                                    \
  extern "C" __global__ void __launch_bounds__(THREADS)   \
      check_ids_##name(const __grid_constant__ params::CheckIds p) { check<I>(p); }

CHECK(u8, uint8_t)
CHECK(u32, uint32_t)
CHECK(i64, int64_t)

extern "C" __global__ void __launch_bounds__(THREADS) count_digits(const __grid_constant__ params::SortIds p) {
  count(p);
}
extern "C" __global__ void __launch_bounds__(THREADS) place_digits(const __grid_constant__ params::SortIds p) {
  place(p);
}
