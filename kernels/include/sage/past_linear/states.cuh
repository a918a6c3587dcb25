// Sums of states along the sequence. Where there are too few heads to fill the GPU, a sequence is cut into chunks of blocks: each
// is summed on its own, then the sums before each chunk are added up, then come the states inside of it.
#pragma once

#include <sage/layout/fragments.cuh>
#include <sage/params/plans.cuh>
#include <sage/params/sla2.cuh>
#include <sage/past_linear/block.cuh>
#include <sage/ptx/mma.cuh>

namespace sage::past_linear {

using attention::first_query_block;
using attention::Segment;
using attention::selection_blocks;
using attention::TILE;

// Threads of the kernels that sum states: one thread block fills a multiprocessor.
constexpr int STATE_THREADS = 512;

// Sums of a chunk of blocks of a key head, from the front or from the end. A thread block has VALUES columns of the state. The
// thread blocks of the other columns make the same features once more, and features are most of the work: hence as many columns
// as a multiprocessor's shared memory takes, and all of its threads. A warp keeps a part of the state in its accumulators: 16
// channels of the features by COLUMNS of the values, and, for the first columns, its part of z.
template <class T, int D>
struct StateKernel {
  static constexpr int VALUES = 64, SPLIT = D / VALUES, THREADS = STATE_THREADS;
  static constexpr int STRIPS = D / 16, PARTS = THREADS / 32 / STRIPS, COLUMNS = VALUES / PARTS;
  // Shared memory: stages of features and values; then the weights of each stage's rows.
  static constexpr int FEATURE_BYTES = BLOCK * D * 2, VALUE_BYTES = BLOCK * VALUES * 2;
  static constexpr int STAGE_BYTES = FEATURE_BYTES + VALUE_BYTES, WEIGHTS_BYTES = BLOCK * 4;
  static constexpr params::Plan PLAN = params::plan("linear_sum_chunks", D, params::LISTED);
  static_assert(PLAN == params::plan("linear_scan_blocks", D, params::LISTED));
  static constexpr int STAGES = PLAN.stages;
  static_assert(PLAN.rows == BLOCK && PLAN.threads == THREADS && PLAN.shared_bytes == STAGES * (STAGE_BYTES + WEIGHTS_BYTES));
  static_assert(PLAN.row_bytes == VALUES * 2 && STAGES >= 2);
  static constexpr int WIDTH = (D + 1) * D;  // values of a chunk's sums: H and z

  const params::Linear& p;
  unsigned char* memory;
  uint32_t shared;
  Segment segment;
  int segment_index, key_head, chunk, first_column, strip, part, group;
  float h[COLUMNS / 8][4] = {}, z[4] = {};

  __device__ __forceinline__ StateKernel(const params::Linear& p, unsigned char* memory)
      : p(p), memory(memory), shared(ptx::shared_address(memory)), segment(p.shape, blockIdx.y), segment_index(blockIdx.y),
        key_head(blockIdx.z), chunk(blockIdx.x / SPLIT), first_column(blockIdx.x % SPLIT * VALUES), strip(threadIdx.x / 32 % STRIPS), part(threadIdx.x / 32 / STRIPS),
        group(p.backward ? p.shape.query_heads / p.shape.key_heads : 1) {}

  __device__ __forceinline__ uint32_t features(int stage) const { return shared + stage % STAGES * STAGE_BYTES; }
  __device__ __forceinline__ float* weights(int stage) const {
    return reinterpret_cast<float*>(memory + STAGES * STAGE_BYTES) + stage % STAGES * BLOCK;
  }

  // Item `i` of the loop over blocks, which starts at the first block, or in the backward at the last: a block and, in the
  // backward, a query head of the group.
  struct Item {
    int block, head;
  };
  __device__ __forceinline__ Item item(int i, int first, int end) const {
    int number = i / group;
    return {p.backward ? end - 1 - number : first + number, p.backward ? key_head * group + i % group : key_head};
  }

  __device__ __forceinline__ Rows<T> rows(const params::View& view, int head) const {
    return {view, segment.batch, p.backward ? segment.query_start : segment.key_start, head, segment.query_len, p.shape.head_dim};
  }

  __device__ __forceinline__ void load(int stage, Item it) {
    copy_block<T, D, THREADS>(features(stage), rows(p.backward ? p.q : p.k, it.head), it.block * BLOCK);
    Rows<T> values = rows(p.backward ? p.dout : p.v, it.head);
    values.skip_channels(first_column);
    copy_block<T, VALUES, THREADS>(features(stage) + FEATURE_BYTES, values, it.block * BLOCK);
  }

  // Replaces what this thread copied: by features and, in the backward, by dO times the query's factor.
  __device__ __forceinline__ void prepare(int stage, Item it) {
    using S = Share<VALUES, THREADS>;
    int first = it.block * BLOCK, count = segment.query_len - first;
    // Factors are read before the features are made, which hides how long it takes.
    const float* factors = p.rows + 2 * ((int64_t(it.head) * p.shape.query_tiles + segment.query_tile) * TILE + first);
    float factor_of_values[BLOCK / S::STEP], weight = 0.0f;
    if (p.backward) {
#pragma unroll
      for (int i = 0; i < BLOCK / S::STEP; ++i) {
        int row = S().row + i * S::STEP;
        factor_of_values[i] = row < count ? factors[2 * row] : 0.0f;
      }
    }
    static_assert(THREADS >= BLOCK);
    int row = threadIdx.x;
    if (row < min(BLOCK, count)) weight = p.backward ? factors[2 * row + 1] : 1.0f;
    make_features<T, D, THREADS>(features(stage), count, p.shape.head_dim, [](int, int, const float(&)[8]) {});
    if (p.backward) scale_rows<T, VALUES, THREADS>(features(stage) + FEATURE_BYTES, factor_of_values);
    if (row < BLOCK) weights(stage)[row] = weight;
  }

  __device__ __forceinline__ void multiply(int stage) {
    int lane = threadIdx.x % 32;
    layout::TransposedReaderA<D * 2> phi(features(stage), lane);
    layout::TransposedReaderB<VALUES * 2> values(features(stage) + FEATURE_BYTES, lane);
#pragma unroll 2
    for (int step = 0; step < BLOCK / 16; ++step) {
      uint32_t a[4];
      phi.load(a, step * 16, strip);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; n += 2) {
        uint32_t b[4];
        values.load(b, step * 16, part * (COLUMNS / 16) + n / 2);
        ptx::mma_16<T>(h[n], a, b[0], b[1]);
        ptx::mma_16<T>(h[n + 1], a, b[2], b[3]);
      }
      if (!has_z()) continue;
      // B for z: its first column is the weights, the other columns are zero.
      uint32_t w[2] = {};
      if (lane / 4 == 0) {
        const float* at = weights(stage) + step * 16 + 2 * (lane & 3);
        w[0] = ptx::pack_16<T>(at[0], at[1]), w[1] = ptx::pack_16<T>(at[8], at[9]);
      }
      ptx::mma_16<T>(z, a, w[0], w[1]);
    }
  }

  // Adds blocks to the state one after the other; before(block) is called before the first head of each.
  template <class F>
  __device__ __forceinline__ void walk(int first, int end, int items, F before) {
    auto prefetch = [&](int i) {
      if (i < items) load(i, item(i, first, end));
      ptx::cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) prefetch(i);
    for (int i = 0; i < items; ++i) {
      Item it = item(i, first, end);
      if (i % group == 0) before(it.block);
      ptx::cp_async_wait<STAGES - 2>();
      prepare(i, it);
      // After the barrier all threads see the features, and have finished with the stage of the previous item, which may be
      // refilled.
      __syncthreads();
      prefetch(i + STAGES - 1);
      multiply(i);
    }
  }

  // The warp's first column of H, and whether it has a part of z.
  __device__ __forceinline__ int column() const { return first_column + part * COLUMNS; }
  __device__ __forceinline__ bool has_z() const { return column() == 0; }

  // Calls f(index, value) for the warp's part of a state, D + 1 rows of D: H, then z.
  template <class F>
  __device__ __forceinline__ void each(F f) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int row = strip * 16 + lane / 4 + 8 * (e >> 1);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) f(row * D + column() + n * 8 + 2 * (lane & 3) + (e & 1), h[n][e]);
      if (has_z() && lane % 4 == 0 && (e & 1) == 0) f(D * D + row, z[e]);
    }
  }

  // The same for pairs of neighbouring channels: f(index, two values) of H, and g(index, value) of z.
  template <class F, class G>
  __device__ __forceinline__ void each_2(F f, G g) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = strip * 16 + lane / 4 + 8 * half;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n)
        f(row * D + column() + n * 8 + 2 * (lane & 3), h[n][2 * half], h[n][2 * half + 1]);
      if (has_z() && lane % 4 == 0) g(row, z[2 * half]);
    }
  }

  __device__ __forceinline__ float* chunk_sums(int chunk) const {
    return p.chunk_sums + ((int64_t(key_head) * p.shape.segment_count + segment_index) * p.chunks + chunk) * WIDTH;
  }

  // Writes the sums of a chunk: of all but the one that no other comes after.
  __device__ __forceinline__ void sum() {
    int number = p.backward ? chunk + 1 : chunk;
    int first = number * p.chunk_blocks, end = min(first + p.chunk_blocks, selection_blocks(segment.query_len));
    walk(first, end, max(end - first, 0) * group, [](int) {});
    float* to = chunk_sums(number);
    each([&](int at, float x) { to[at] = x; });
  }

  // Writes the states inside a chunk, starting from the sums of all chunks before it, or in the backward after it.
  __device__ __forceinline__ void scan() {
    int first = chunk * p.chunk_blocks, end = min(first + p.chunk_blocks, selection_blocks(segment.query_len));
    if (first >= end) return;
    if (p.chunks > 1) {
      const float* from = chunk_sums(chunk);
      each([&](int at, float& x) { x = from[at]; });
    }
    auto leave = [&](int block) {
      int64_t row = int64_t(key_head) * p.blocks + first_query_block(p.shape, segment_index) + block;
      T* states = static_cast<T*>(p.states) + row * D * D;
      float *sums = p.sums + row * D, factor = p.backward ? 1.0f : 1.0f / float(max(block * BLOCK, 1));
      each_2([&](int at, float x, float y) { *reinterpret_cast<uint32_t*>(states + at) = ptx::pack_16<T>(x * factor, y * factor); },
             [&](int at, float x) { sums[at] = x * factor; });
    };
    walk(first, end, (end - first - 1) * group, leave);
    leave(p.backward ? first : end - 1);
  }
};

template <class T, int D>
__device__ __forceinline__ void sum_chunks(const params::Linear& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  StateKernel<T, D>(p, shared).sum();
}
template <class T, int D>
__device__ __forceinline__ void scan_blocks(const params::Linear& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  StateKernel<T, D>(p, shared).scan();
}

// Replaces the sums of each chunk by the sums of all chunks before it, or in the backward after it.
template <int D>
__device__ __forceinline__ void scan_chunks(const params::Linear& p) {
  constexpr int WIDTH = (D + 1) * D;
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= WIDTH) return;
  float *from = p.chunk_sums + int64_t(blockIdx.y) * p.chunks * WIDTH + at, sum = 0.0f;
  for (int i = 0; i < p.chunks; ++i) {
    float& x = from[int64_t(p.backward ? p.chunks - 1 - i : i) * WIDTH];
    // The last one's own sum was not made, since no chunk comes after it.
    float own = i + 1 < p.chunks ? x : 0.0f;
    x = sum, sum += own;
  }
}

}  // namespace sage::past_linear
