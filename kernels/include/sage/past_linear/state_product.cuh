// Multiplies the rows of a query block or a key block by a state H, which past_linear.cu defines.
#pragma once

#include <sage/layout/fragments.cuh>
#include <sage/params/plans.cuh>
#include <sage/params/sla2.cuh>
#include <sage/past_linear/block.cuh>
#include <sage/ptx/mma.cuh>

namespace sage::past_linear {

using attention::first_query_block;
using attention::Segment;
using attention::TILE;

// For a kernel that multiplies blocks of rows by a state: whether its plan has BLOCK rows, THREADS threads, and shared
// memory for OPERANDS bytes of rows plus the state.
template <int D, params::Plan PLAN, int OPERANDS>
constexpr bool PLAN_FITS = PLAN.rows == BLOCK && PLAN.threads == THREADS && PLAN.shared_bytes == OPERANDS + D * D * 2;

// The rows that a thread block works on: a query block, or a key block, of a head.
template <class T, int D>
struct Tile {
  static constexpr int ROWS_BYTES = BLOCK * D * 2;
  Segment segment;
  int segment_index, head, block, first;
  int64_t padded;  // the first query's index in Linear::rows

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
  __device__ __forceinline__ void load_state(uint32_t shared, const params::Linear& p, int64_t row) const {
    const T* state = static_cast<const T*>(p.states) + row * D * D;
#pragma unroll 1
    for (int i = threadIdx.x; i < D * D / 8; i += THREADS) ptx::cp_async_16(place(shared, i), state + i * 8, true);
    ptx::cp_async_commit();
  }
  // The stored H and z (past_linear.cu) of a block are sums over the earlier blocks of the block's chunk (in the
  // backward: over the later blocks). Adds the sums over all earlier (later) chunks to H, which load_state has copied
  // to shared memory, and to z. Writes z to `sums`. In the forward, the stored sums over earlier chunks are multiplied
  // by inverse_blocks(first block of this block's chunk). `factor` changes this multiplier to inverse_blocks(block).
  __device__ __forceinline__ void complete_state(uint32_t shared, float (&sums)[D], const params::Linear& p, int key_head) const {
    int chunk = block / p.chunk_blocks;
    bool none_before = p.backward ? chunk + 1 == p.chunks : chunk == 0;
    float factor = p.backward ? 1.0f : inverse_blocks(block) / inverse_blocks(chunk * p.chunk_blocks);
    int64_t line = (int64_t(key_head) * p.shape.segment_count + segment_index) * p.chunks + chunk;
    const float *z = p.sums + row(p, key_head) * D, *z_before = p.chunk_sums + (line * (D + 1) + D) * D;
    for (int c = threadIdx.x; c < D; c += THREADS) sums[c] = z[c] + (none_before ? 0.0f : factor * z_before[c]);
    if (none_before) return;
    const uint4* before = reinterpret_cast<const uint4*>(static_cast<const T*>(p.chunk_states) + line * D * D);
    uint32_t twice = ptx::twice<T>(factor);
#pragma unroll 2
    for (int i = threadIdx.x; i < D * D / 8; i += THREADS) {
      uint4 more = before[i], state = ptx::load_16(place(shared, i));
      ptx::store_16(place(shared, i), make_uint4(ptx::fma_2<T>(more.x, twice, state.x), ptx::fma_2<T>(more.y, twice, state.y),
                                                 ptx::fma_2<T>(more.z, twice, state.z), ptx::fma_2<T>(more.w, twice, state.w)));
    }
  }

 private:
  // The address in shared memory of a state's elements 8 i to 8 i + 7.
  static __device__ __forceinline__ uint32_t place(uint32_t shared, int i) {
    return shared + layout::swizzled<D * 2>(i / (D / 8), i % (D / 8));
  }
};

// acc = A S, or A S^T, with a warp's 16 rows A and the state S.
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

// The inverse of a query's normalizer. In f16, where the smallest features are rounded to zero, a normalizer can be
// zero. The result is then 0, which makes the query's output and gradients zero. A subnormal normalizer, whose inverse
// may overflow, also gives 0. A NaN stays a NaN.
__device__ __forceinline__ float inverse_norm(float norm) { return norm < 0x1p-126f ? 0.0f : 1.0f / norm; }

// Replaces a block of queries in shared memory by their features, and stores each query's normalizer phi . z in
// `norms`. `first` is the block's first row of `q`.
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

}  // namespace sage::past_linear
