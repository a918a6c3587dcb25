// Prefix sums over the blocks of a sequence (in the backward: suffix sums) of H and z (past_linear.cu). The blocks are
// divided into chunks, so that all multiprocessors have work. scan_blocks computes the sums within each chunk, and
// scan_chunks the sums of all earlier (in the backward: later) chunks. state_product.cuh adds the two.
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

// Threads per thread block of linear_scan_blocks.
constexpr int STATE_THREADS = 512;

// Computes the prefix sums (in the backward: suffix sums) of H and z (past_linear.cu) within one chunk, for one key
// head. A thread block has VALUES columns of H: all columns if shared memory suffices. Computing the features (phi) is
// most of the work; if the columns are split, each thread block repeats it. A warp keeps a part of H in its
// accumulators: 16 channels of the features by COLUMNS columns of the values. The warps of the first columns also keep
// a part of z.
template <class T, int D>
struct StateKernel {
  static constexpr params::Plan PLAN = params::plan("linear_scan_blocks", D, params::LISTED);
  static constexpr int VALUES = PLAN.row_bytes / 2, SPLIT = D / VALUES, THREADS = STATE_THREADS;
  static constexpr int STRIPS = D / 16, PARTS = THREADS / 32 / STRIPS, COLUMNS = VALUES / PARTS;
  // Shared memory: stages of features and values; then, for each stage, one weight per row. z is the weighted sum of
  // the rows of features.
  static constexpr int FEATURE_BYTES = BLOCK * D * 2, VALUE_BYTES = BLOCK * VALUES * 2;
  static constexpr int STAGE_BYTES = FEATURE_BYTES + VALUE_BYTES, WEIGHTS_BYTES = BLOCK * 4;
  static constexpr int STAGES = PLAN.stages;
  static_assert(PLAN.rows == BLOCK && PLAN.threads == THREADS && PLAN.shared_bytes == STAGES * (STAGE_BYTES + WEIGHTS_BYTES));
  static_assert(D % VALUES == 0 && STAGES >= 2);
  static constexpr int WIDTH = (D + 1) * D;  // elements of H and z of one chunk

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

  // Item `i` of the loop. In the forward an item is a block of tokens. In the backward it is a block and a query head
  // of the group, and the loop runs from the last block to the first.
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

  // Converts in place what this thread copied. Forward: K to features. Backward: Q to features; each row of dO is
  // multiplied by its factor in p.rows.
  __device__ __forceinline__ void prepare(int stage, Item it) {
    using S = Share<VALUES, THREADS>;
    int first = it.block * BLOCK, count = segment.query_len - first;
    // `factors` is read before the features are computed, which hides the latency of the loads.
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
      // z += phi^T w: the first column of operand B contains w, the rows' weights. Its other columns are zero.
      uint32_t w[2] = {};
      if (lane / 4 == 0) {
        const float* at = weights(stage) + step * 16 + 2 * (lane & 3);
        w[0] = ptx::pack_16<T>(at[0], at[1]), w[1] = ptx::pack_16<T>(at[8], at[9]);
      }
      ptx::mma_16<T>(z, a, w[0], w[1]);
    }
  }

  // Adds items 0 to `items` - 1 of the blocks `first` to `end` - 1 to H and z, in order. Calls before(block) before the
  // first item of each block.
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
      // After the barrier all threads see the features, and have read the stage of the previous item. The prefetch
      // refills that stage.
      __syncthreads();
      prefetch(i + STAGES - 1);
      multiply(i);
    }
  }

  // The warp's first column of H, and whether the warp has a part of z.
  __device__ __forceinline__ int column() const { return first_column + part * COLUMNS; }
  __device__ __forceinline__ bool has_z() const { return column() == 0; }

  // Calls f(index in H, two values) for pairs of neighbours in a row of the warp's part of H, and g(index in z, value)
  // for the warp's part of z.
  template <class F, class G>
  __device__ __forceinline__ void each(F f, G g) {
    // `opaque`: the addresses in f and g are recomputed in each call, and not kept in registers during matmuls.
    int lane = ptx::opaque(threadIdx.x) % 32;
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

  // For each block of the chunk, writes the state of the chunk's earlier blocks (in the backward: its later blocks).
  // Writes the sums over the whole chunk only if a later chunk (in the backward: an earlier chunk) exists.
  __device__ __forceinline__ void scan() {
    int first = chunk * p.chunk_blocks, end = min(first + p.chunk_blocks, selection_blocks(segment.query_len));
    int blocks = max(end - first, 0);
    bool summed = p.backward ? chunk > 0 : chunk + 1 < p.chunks;
    auto leave = [&](int block) {
      int64_t row = int64_t(key_head) * p.blocks + first_query_block(p.shape, segment_index) + block;
      T* states = static_cast<T*>(p.states) + row * D * D;
      float *sums = p.sums + row * D, factor = p.backward ? 1.0f : inverse_blocks(block) / BLOCK;
      each([&](int at, float x, float y) { *reinterpret_cast<uint32_t*>(states + at) = ptx::pack_16<T>(x * factor, y * factor); },
           [&](int at, float x) { sums[at] = x * factor; });
    };
    // The last block that walk() visits is part of no state of this chunk. It is added only for the chunk's sums.
    walk(first, end, max(blocks - (summed ? 0 : 1), 0) * group, leave);
    if (!summed && blocks > 0) leave(p.backward ? first : end - 1);
    if (!summed) return;
    float* to = chunk_sums(chunk);
    each([&](int at, float x, float y) { *reinterpret_cast<float2*>(to + at) = make_float2(x, y); },
         [&](int at, float x) { to[D * D + at] = x; });
  }
};

template <class T, int D>
__device__ __forceinline__ void scan_blocks(const params::Linear& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  StateKernel<T, D>(p, shared).scan();
}

// For each chunk, sums H and z (past_linear.cu) of all chunks before it (in the backward: after it). H's sum is stored
// in 16 bit; z's sum replaces the chunk's own z. In the forward both sums are stored times
// inverse_blocks(the chunk's first block) / BLOCK (past_linear/block.cuh).
template <class T, int D>
__device__ __forceinline__ void scan_chunks(const params::Linear& p) {
  constexpr int WIDTH = (D + 1) * D;
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= WIDTH) return;
  int64_t line = int64_t(blockIdx.y) * p.chunks;
  float sum = 0.0f;
  for (int i = 0; i < p.chunks; ++i) {
    int chunk = p.backward ? p.chunks - 1 - i : i;
    float& own = p.chunk_sums[(line + chunk) * WIDTH + at];
    // `own` of the chunk that is visited last was not computed, because no other chunk needs it.
    float added = i + 1 < p.chunks ? own : 0.0f, stored = sum * (p.backward ? 1.0f : inverse_blocks(chunk * p.chunk_blocks) / BLOCK);
    if (at < D * D) static_cast<T*>(p.chunk_states)[(line + chunk) * D * D + at] = ptx::from_float<T>(stored);
    else own = stored;
    sum += added;
  }
}

}  // namespace sage::past_linear
