// Linear attention of each block of queries over the blocks of keys before it (SLA2, arXiv 2602.12675): sums of states along
// the sequence, and products with the states. Causal, with as many keys as queries.
//
// A state is H = sum phi(k)^T v and z = sum phi(k), where phi is the softmax over channels. The same kernels make the states
// that queries read in the forward, summed from the front, and those that keys read in the backward, summed from the end: in
// the backward the "keys" are the queries, and the "values" are the gradients of their outputs.
//
// The forward's states are stored in 16 bit as means over the tokens before the block: no sum outgrows f16, and the
// normalization cancels the factor.
#include <math_constants.h>
#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/params/plans.cuh>
#include <sage/params/sla2.cuh>
#include <sage/ptx/mma.cuh>

using namespace sage;
using attention::first_query_block;
using attention::pack_8;
using attention::Rows;
using attention::Segment;
using attention::SELECTION_BLOCK;
using attention::selection_blocks;
using attention::TILE;
using attention::unpack_8;

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int BLOCK = SELECTION_BLOCK;

// Sum and maximum over the LANES lanes that share a row.
template <int LANES>
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
template <int LANES>
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// How threads share the rows of a block: D / 8 lanes a row, eight channels each, as copy_rows divides them. Each thread
// therefore changes in shared memory only what it has copied itself, and only products need a barrier before them.
template <int D>
struct Share {
  static constexpr int LANES = D / 8, STEP = THREADS / LANES;
  int row = threadIdx.x / LANES, chunk = threadIdx.x % LANES;
};

// Copies 128 rows into shared memory asynchronously, with zeros beyond the end.
template <class T, int D>
__device__ __forceinline__ void copy_block(uint32_t shared, const Rows<T>& rows, int first) {
  attention::copy_rows<BLOCK, D, THREADS>(shared, rows, first, threadIdx.x);
}

// Replaces rows in shared memory, of which the first `count` exist, by phi of them, and calls f(row, chunk, phi as rounded).
template <class T, int D, class F>
__device__ __forceinline__ void make_features(uint32_t shared, int count, int head_dim, F f) {
  using S = Share<D>;
  S at;
#pragma unroll 2
  for (int row = at.row; row < BLOCK; row += S::STEP) {
    uint32_t address = shared + layout::swizzled<D * 2>(row, at.chunk);
    float x[8], largest = -CUDART_INF_F, sum = 0.0f;
    unpack_8<T>(ptx::load_16(address), x);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      if (at.chunk * 8 + c >= head_dim) x[c] = -CUDART_INF_F;
      largest = fmaxf(largest, x[c]);
    }
    largest = row_max<S::LANES>(largest);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      x[c] = ptx::exp2((x[c] - largest) * ptx::LOG2_E);
      sum += x[c];
    }
    sum = row_sum<S::LANES>(sum);
    float inverse = row < count ? 1.0f / sum : 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] *= inverse;
    uint4 words = pack_8<T>(x);
    ptx::store_16(address, words);
    unpack_8<T>(words, x);
    f(row, at.chunk, x);
  }
}

// Multiplies each row in shared memory by its factor.
template <class T, int D, class F>
__device__ __forceinline__ void scale_rows(uint32_t shared, F factor) {
  using S = Share<D>;
  S at;
#pragma unroll
  for (int row = at.row; row < BLOCK; row += S::STEP) {
    uint32_t address = shared + layout::swizzled<D * 2>(row, at.chunk);
    float f = factor(row), x[8];
    unpack_8<T>(ptx::load_16(address), x);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] *= f;
    ptx::store_16(address, pack_8<T>(x));
  }
}

// Stores two neighbouring channels of a warp's 16 rows of results in shared memory, from where store_rows writes whole rows.
// The rows overwrite an operand that this warp alone has read.
template <class T, int D>
__device__ __forceinline__ void leave_2(unsigned char* rows, int row, int column, float a, float b) {
  *reinterpret_cast<uint32_t*>(rows + layout::swizzled<D * 2>(row, column / 8) + column % 8 * 2) = ptx::pack_16<T>(a, b);
}
// Writes a warp's 16 rows, from `row` on in shared memory, to the rows from `first` on of `to`, or adds them to those with
// `add`.
template <class T, int D>
__device__ __forceinline__ void store_rows(const Rows<T>& to, const unsigned char* rows, int row, int first, bool add) {
  constexpr int LANES = D / 8;
  __syncwarp();
#pragma unroll 2
  for (int r = row + threadIdx.x % 32 / LANES; r < row + 16; r += 32 / LANES) {
    int chunk = threadIdx.x % LANES;
    uint4 words = *reinterpret_cast<const uint4*>(rows + layout::swizzled<D * 2>(r, chunk));
    if (add) {
      float x[8], y[8];
      unpack_8<T>(words, x), unpack_8<T>(to.load_8(first + r, chunk * 8), y);
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] += y[c];
      words = pack_8<T>(x);
    }
    to.store_8(first + r, chunk * 8, words);
  }
}

// Whether the plan of a kernel that multiplies blocks of rows with a state is that of its shared memory: OPERANDS bytes of rows, and
// the state.
template <int D, params::Plan PLAN, int OPERANDS>
constexpr bool PLAN_FITS = PLAN.rows == BLOCK && PLAN.threads == THREADS && PLAN.shared_bytes == OPERANDS + D * D * 2;

// Sums of a chunk of blocks of a key head, from the front or from the end. A warp keeps a part of the state in its
// accumulators: 16 channels of the features by COLUMNS of the values, and its part of z.
template <class T, int D>
struct StateKernel {
  static constexpr int STRIPS = D / 16, PARTS = WARPS / STRIPS, COLUMNS = D / PARTS;
  static constexpr int ROWS_BYTES = BLOCK * D * 2;
  // Shared memory: stages of features and values, two where there is room; then the weights of each stage's rows.
  static constexpr int STAGE_BYTES = 2 * ROWS_BYTES, WEIGHTS_BYTES = BLOCK * 4;
  static constexpr params::Plan PLAN = params::plan("linear_sum_chunks", D, params::LISTED);
  static_assert(PLAN == params::plan("linear_scan_blocks", D, params::LISTED));
  static constexpr int STAGES = PLAN.stages;
  static_assert(PLAN.rows == BLOCK && PLAN.threads == THREADS && PLAN.shared_bytes == STAGES * (STAGE_BYTES + WEIGHTS_BYTES));
  static constexpr int WIDTH = (D + 1) * D;  // values of a chunk's sums: H and z

  const params::Linear& p;
  unsigned char* memory;
  uint32_t shared;
  Segment segment;
  int segment_index, key_head, strip, part, group;
  float h[COLUMNS / 8][4] = {}, z[4] = {};

  __device__ __forceinline__ StateKernel(const params::Linear& p, unsigned char* memory)
      : p(p), memory(memory), shared(ptx::shared_address(memory)), segment(p.shape, blockIdx.y), segment_index(blockIdx.y),
        key_head(blockIdx.z), strip(threadIdx.x / 32 % STRIPS), part(threadIdx.x / 32 / STRIPS),
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
    copy_block<T, D>(features(stage), rows(p.backward ? p.q : p.k, it.head), it.block * BLOCK);
    copy_block<T, D>(features(stage) + ROWS_BYTES, rows(p.backward ? p.dout : p.v, it.head), it.block * BLOCK);
  }

  // Replaces what this thread copied: by features and, in the backward, by dO times the query's factor.
  __device__ __forceinline__ void prepare(int stage, Item it) {
    int first = it.block * BLOCK, count = segment.query_len - first;
    make_features<T, D>(features(stage), count, p.shape.head_dim, [](int, int, const float(&)[8]) {});
    const float* factors = p.rows + 2 * ((int64_t(it.head) * p.shape.query_tiles + segment.query_tile) * TILE + first);
    if (p.backward) scale_rows<T, D>(features(stage) + ROWS_BYTES, [&](int row) { return row < count ? factors[2 * row] : 0.0f; });
    for (int row = threadIdx.x; row < BLOCK; row += THREADS)
      weights(stage)[row] = row >= count ? 0.0f : p.backward ? factors[2 * row + 1] : 1.0f;
  }

  __device__ __forceinline__ void multiply(int stage) {
    int lane = threadIdx.x % 32;
    layout::TransposedReaderA<D * 2> phi(features(stage), lane);
    layout::TransposedReaderB<D * 2> values(features(stage) + ROWS_BYTES, lane);
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
    if (items > 0) load(0, item(0, first, end));
    ptx::cp_async_commit();
    for (int i = 0; i < items; ++i) {
      Item it = item(i, first, end);
      if (i % group == 0) before(it.block);
      ptx::cp_async_wait<0>();
      prepare(i, it);
      // After the barrier all threads see the features, and have finished with the stage of the previous item, which may be
      // refilled.
      __syncthreads();
      if (STAGES == 2 && i + 1 < items) load(i + 1, item(i + 1, first, end));
      ptx::cp_async_commit();
      multiply(i);
      if (STAGES == 1) {
        __syncthreads();
        if (i + 1 < items) load(i + 1, item(i + 1, first, end));
        ptx::cp_async_commit();
      }
    }
  }

  // Calls f(index, value) for the warp's part of a state, D + 1 rows of D: H, then z.
  template <class F>
  __device__ __forceinline__ void each(F f) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      int row = strip * 16 + lane / 4 + 8 * (e >> 1);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) f(row * D + part * COLUMNS + n * 8 + 2 * (lane & 3) + (e & 1), h[n][e]);
      if (part == 0 && lane % 4 == 0 && (e & 1) == 0) f(D * D + row, z[e]);
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
        f(row * D + part * COLUMNS + n * 8 + 2 * (lane & 3), h[n][2 * half], h[n][2 * half + 1]);
      if (part == 0 && lane % 4 == 0) g(row, z[2 * half]);
    }
  }

  __device__ __forceinline__ float* chunk_sums(int chunk) const {
    return p.chunk_sums + ((int64_t(key_head) * p.shape.segment_count + segment_index) * p.chunks + chunk) * WIDTH;
  }

  // Writes the sums of a chunk.
  __device__ __forceinline__ void sum() {
    int first = blockIdx.x * p.chunk_blocks, end = min(first + p.chunk_blocks, selection_blocks(segment.query_len));
    walk(first, end, max(end - first, 0) * group, [](int) {});
    float* to = chunk_sums(blockIdx.x);
    each([&](int at, float x) { to[at] = x; });
  }

  // Writes the states inside a chunk, starting from the sums of all chunks before it, or in the backward after it.
  __device__ __forceinline__ void scan() {
    int first = blockIdx.x * p.chunk_blocks, end = min(first + p.chunk_blocks, selection_blocks(segment.query_len));
    if (first >= end) return;
    const float* from = chunk_sums(blockIdx.x);
    each([&](int at, float& x) { x = from[at]; });
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
    float own = x;
    x = sum, sum += own;
  }
}

// The rows that a thread block works on: a block of queries, or of keys, of a head.
template <class T, int D>
struct Tile {
  static constexpr int ROWS_BYTES = BLOCK * D * 2;
  Segment segment;
  int segment_index, head, block, first;
  int64_t padded;  // the first query's place in the padded buffers

  __device__ __forceinline__ Tile(const params::Linear& p)
      : segment(p.shape, blockIdx.y), segment_index(blockIdx.y), head(blockIdx.z), block(blockIdx.x), first(block * BLOCK),
        padded((int64_t(head) * p.shape.query_tiles + segment.query_tile) * TILE + first) {}

  __device__ __forceinline__ Rows<T> queries(const params::Linear& p, const params::View& view) const {
    return {view, segment.batch, segment.query_start, head, segment.query_len, p.shape.head_dim};
  }
  __device__ __forceinline__ Rows<T> keys(const params::Linear& p, const params::View& view) const {
    return {view, segment.batch, segment.key_start, head, segment.key_len, p.shape.head_dim};
  }
  __device__ __forceinline__ int64_t row(const params::Linear& p, int key_head) const {
    return int64_t(key_head) * p.blocks + first_query_block(p.shape, segment_index) + block;
  }
  // Copies a state into shared memory asynchronously.
  __device__ __forceinline__ void load_state(uint32_t shared, const params::Linear& p, int64_t row) const {
    const T* state = static_cast<const T*>(p.states) + row * D * D;
#pragma unroll 1
    for (int i = threadIdx.x; i < D * D / 8; i += THREADS)
      ptx::cp_async_16(shared + layout::swizzled<D * 2>(i / (D / 8), i % (D / 8)), state + i * 8, true);
    ptx::cp_async_commit();
  }
};

// acc = A S, or A S^T: a warp's 16 rows by the state.
template <class T, int D, bool TRANSPOSED>
__device__ __forceinline__ void multiply_state(float (&acc)[D / 8][4], uint32_t rows, uint32_t state, int lane) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[n][e] = 0.0f;
  layout::ReaderA<D * 2> a_reader(rows, lane);
  layout::ReaderB<D * 2> along(state, lane);
  layout::TransposedReaderB<D * 2> across(state, lane);
#pragma unroll 1
  for (int step = 0; step < D / 16; ++step) {
    uint32_t a[4];
    a_reader.load(a, 0, step);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      if constexpr (TRANSPOSED) along.load(b, n * 8, step);
      else across.load(b, step * 16, n / 2);
      ptx::mma_16<T>(acc[n], a, b[0], b[1]);
      ptx::mma_16<T>(acc[n + 1], a, b[2], b[3]);
    }
  }
}

// One element of a swizzled matrix in shared memory.
template <class T, int D>
__device__ __forceinline__ float element(const unsigned char* rows, int row, int column) {
  return ptx::to_float(*reinterpret_cast<const T*>(rows + layout::swizzled<D * 2>(row, column / 8) + column % 8 * 2));
}

// Replaces queries in shared memory, from `first` on, by phi of them, and stores each one's normalizer phi . z in `norms`.
template <class T, int D>
__device__ __forceinline__ void make_query_features(uint32_t shared, const Rows<T>& q, int first, const float (&z)[D],
                                                    float (&norms)[BLOCK]) {
  make_features<T, D>(shared, q.count - first, q.head_dim, [&](int row, int chunk, const float(&phi)[8]) {
    float dot = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) dot += phi[c] * z[chunk * 8 + c];
    dot = row_sum<D / 8>(dot);
    if (chunk == 0) norms[row] = dot;
  });
}

template <class T, int D>
__device__ __forceinline__ void forward(const params::Linear& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float sums[D], norms[BLOCK];
  using At = Tile<T, D>;
  static_assert(PLAN_FITS<D, params::plan("linear_forward", D, params::LISTED), 1 * At::ROWS_BYTES>);
  At at(p);
  if (at.first >= at.segment.query_len) return;
  Rows<T> q = at.queries(p, p.q), out = at.queries(p, p.out);
  uint32_t memory = ptx::shared_address(shared);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float acc[D / 8][4] = {};
  if (at.block > 0) {
    int64_t row = at.row(p, at.head / (p.shape.query_heads / p.shape.key_heads));
    copy_block<T, D>(memory, q, at.first);
    at.load_state(memory + At::ROWS_BYTES, p, row);
    for (int c = threadIdx.x; c < D; c += THREADS) sums[c] = p.sums[row * D + c];
    __syncthreads();
    ptx::cp_async_wait<0>();
    make_query_features<T, D>(memory, q, at.first, sums, norms);
    __syncthreads();
    multiply_state<T, D, false>(acc, memory + warp * 16 * D * 2, memory + At::ROWS_BYTES, lane);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = warp * 16 + lane / 4 + 8 * h;
    float inverse = at.block > 0 ? 1.0f / norms[row] : 0.0f;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      leave_2<T, D>(shared, row, n * 8 + 2 * (lane & 3), acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
  }
  store_rows<T, D>(out, shared, warp * 16, at.first, false);
}

// With u = H dO, n = phi . z and t = dO . out = phi . u / n: dphi = (u - t z) / n, whose product with phi is zero, so that
// dq = phi o (u - t z) / n. Also stores each query's factors of dO and of 1, 1 / n and -t / n, for the states that the keys read.
// Since H and z are means over the tokens before the block, these factors must still be divided by the number of tokens: here
// they are divided by the number of blocks, in backward_keys by the tokens of a block.
template <class T, int D>
__device__ __forceinline__ void backward_queries(const params::Linear& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float sums[D], norms[BLOCK];
  using At = Tile<T, D>;
  static_assert(PLAN_FITS<D, params::plan("linear_backward_queries", D, params::LISTED), 2 * At::ROWS_BYTES>);
  At at(p);
  if (at.first >= at.segment.query_len) return;
  Rows<T> q = at.queries(p, p.q), dout = at.queries(p, p.dout), dq = at.queries(p, p.dq);
  uint32_t memory = ptx::shared_address(shared), state = memory + 2 * At::ROWS_BYTES;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float u[D / 8][4] = {};
  if (at.block > 0) {
    int64_t row = at.row(p, at.head / (p.shape.query_heads / p.shape.key_heads));
    copy_block<T, D>(memory, q, at.first);
    copy_block<T, D>(memory + At::ROWS_BYTES, dout, at.first);
    at.load_state(state, p, row);
    for (int c = threadIdx.x; c < D; c += THREADS) sums[c] = p.sums[row * D + c];
    __syncthreads();
    ptx::cp_async_wait<0>();
    make_query_features<T, D>(memory, q, at.first, sums, norms);
    __syncthreads();
    multiply_state<T, D, true>(u, memory + At::ROWS_BYTES + warp * 16 * D * 2, state, lane);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = warp * 16 + lane / 4 + 8 * h;
    bool real = at.block > 0 && at.first + row < at.segment.query_len;
    float inverse = real ? 1.0f / norms[row] : 0.0f, t = 0.0f;
    if (at.block > 0) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) t += element<T, D>(shared, row, n * 8 + 2 * (lane & 3) + e) * u[n][2 * h + e];
    }
    t = row_sum<4>(t) * inverse;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int column = n * 8 + 2 * (lane & 3) + e;
        float phi = at.block > 0 ? element<T, D>(shared, row, column) : 0.0f;
        x[e] = real ? phi * inverse * (u[n][2 * h + e] - t * sums[column]) : 0.0f;
      }
      leave_2<T, D>(shared + At::ROWS_BYTES, row, n * 8 + 2 * (lane & 3), x[0], x[1]);
    }
    if (lane % 4 == 0 && at.first + row < at.segment.query_len) {
      float factor = real ? inverse / float(at.block) : 0.0f;
      float* to = p.rows + 2 * (at.padded + row);
      to[0] = factor, to[1] = -factor * t;
    }
  }
  store_rows<T, D>(dq, shared + At::ROWS_BYTES, warp * 16, at.first, p.add);
}

// With G and z the sums over all later blocks of queries: dphi = G v + z, dk = phi o (dphi - phi . dphi), dv = phi G. G and z
// still have to be divided by the tokens of a block (see backward_queries): BY_TOKEN is applied to both results.
template <class T, int D>
__device__ __forceinline__ void backward_keys(const params::Linear& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float sums[D];
  using At = Tile<T, D>;
  static_assert(PLAN_FITS<D, params::plan("linear_backward_keys", D, params::LISTED), 2 * At::ROWS_BYTES>);
  At at(p);
  if (at.first >= at.segment.key_len) return;
  Rows<T> k = at.keys(p, p.k), v = at.keys(p, p.v), dk = at.keys(p, p.dk), dv = at.keys(p, p.dv);
  uint32_t memory = ptx::shared_address(shared), state = memory + 2 * At::ROWS_BYTES;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t number = at.row(p, at.head);
  copy_block<T, D>(memory, k, at.first);
  copy_block<T, D>(memory + At::ROWS_BYTES, v, at.first);
  at.load_state(state, p, number);
  for (int c = threadIdx.x; c < D; c += THREADS) sums[c] = p.sums[number * D + c];
  ptx::cp_async_wait<0>();
  make_features<T, D>(memory, k.count - at.first, k.head_dim, [](int, int, const float(&)[8]) {});
  __syncthreads();
  constexpr float BY_TOKEN = 1.0f / BLOCK;
  float acc[D / 8][4];
  // dK comes first, because its operand V is not needed after it: its place in shared memory takes the results.
  multiply_state<T, D, true>(acc, memory + At::ROWS_BYTES + warp * 16 * D * 2, state, lane);
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = warp * 16 + lane / 4 + 8 * h;
    float mean = 0.0f;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int column = n * 8 + 2 * (lane & 3) + e;
        float& x = acc[n][2 * h + e];
        x = (x + sums[column]) * BY_TOKEN;
        mean += element<T, D>(shared, row, column) * x;
      }
    mean = row_sum<4>(mean);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      int column = n * 8 + 2 * (lane & 3);
      leave_2<T, D>(shared + At::ROWS_BYTES, row, column, element<T, D>(shared, row, column) * (acc[n][2 * h] - mean),
                    element<T, D>(shared, row, column + 1) * (acc[n][2 * h + 1] - mean));
    }
  }
  store_rows<T, D>(dk, shared + At::ROWS_BYTES, warp * 16, at.first, p.add);
  multiply_state<T, D, false>(acc, memory + warp * 16 * D * 2, state, lane);
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      leave_2<T, D>(shared, warp * 16 + lane / 4 + 8 * h, n * 8 + 2 * (lane & 3), acc[n][2 * h] * BY_TOKEN,
                    acc[n][2 * h + 1] * BY_TOKEN);
  store_rows<T, D>(dv, shared, warp * 16, at.first, p.add);
}

}  // namespace

#define KERNEL(BLOCKS, name, function, suffix, ...)                                                                      \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) name##_##suffix(const __grid_constant__ params::Linear p) { \
    function<__VA_ARGS__>(p);                                                                                    \
  }
#define HEAD_DIM(type, T, D)                                                  \
  KERNEL(1, linear_sum_chunks, sum_chunks, type##_##D, T, D)                     \
  KERNEL(1, linear_scan_blocks, scan_blocks, type##_##D, T, D)                   \
  KERNEL(2, linear_forward, forward, type##_##D, T, D)                           \
  KERNEL(2, linear_backward_queries, backward_queries, type##_##D, T, D)         \
  KERNEL(2, linear_backward_keys, backward_keys, type##_##D, T, D)
HEAD_DIM(bf16, __nv_bfloat16, 64)
HEAD_DIM(bf16, __nv_bfloat16, 128)
HEAD_DIM(f16, __half, 64)
HEAD_DIM(f16, __half, 128)
KERNEL(1, linear_scan_chunks, scan_chunks, 64, 64)
KERNEL(1, linear_scan_chunks, scan_chunks, 128, 128)
