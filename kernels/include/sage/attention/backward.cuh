// The backward walk: a block keeps KEYS keys of one key head, a warp 16 of them with their dK and dV, and walks the
// tiles of 64 queries that see them, for all query heads of the group. What happens inside a tile is the numerics'
// affair: full_precision_backward.cuh, sagebwd_backward.cuh.
//
// Everything is on S^T = K Q^T: keys are the rows of accumulators, so P^T and dS^T are the left operands of dV and dK as
// they are. For dQ = dS K, dS^T goes through shared memory once, in 16 bit; each warp takes 16 queries out of it.
#pragma once

#include <math_constants.h>
#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/ptx/mma.cuh>

namespace sage::attention {

// How a kernel runs: chosen from the shared memory of a block, which the build gives for each architecture
// (candle-sage/src/cuda/plan.rs knows the same).
template <int KEYS_, int STAGES_>
struct BackwardPlan {
  static constexpr int KEYS = KEYS_;      // of a block
  static constexpr int STAGES = STAGES_;  // buffers for tiles of queries
  static constexpr int WARPS = KEYS / 16;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int PARTS = KEYS / TILE;  // warps that share 16 queries of dQ: each takes a part of the channels
};

struct BackwardBlock {
  int segment_index, key_head, first_key;
  Segment segment;

  __device__ __forceinline__ BackwardBlock(const params::Shape& shape, int index, int keys)
      : segment_index(index / shape.key_heads % shape.segment_count), key_head(index % shape.key_heads),
        first_key(index / shape.key_heads / shape.segment_count * keys), segment(shape, segment_index) {}
};

// A tile of 64 queries of one query head.
struct QueryTile {
  int head;
  int tile;       // inside the segment
  int64_t padded;  // in the padded buffers

  __device__ __forceinline__ QueryTile(const params::Shape& shape, const BackwardBlock& block, int iteration,
                                       int first_tile, int tiles) {
    int group = shape.query_heads / shape.key_heads;
    head = block.key_head * group + iteration / tiles;
    tile = first_tile + iteration % tiles;
    padded = int64_t(head) * shape.query_tiles + block.segment.query_tile + tile;
  }
};

// x[n][2h + e] of a warp: row 8h + g of its 16 keys, column 8n + 2t + e of the 64 queries.
using Scores = float[8][4];

// out += A B^T of 16-bit operands that both lie with the reduction along their rows: 16 rows of A, 64 of B.
template <class T, int D>
__device__ __forceinline__ void multiply_scores(Scores& out, uint32_t a_rows, uint32_t b_rows, int lane) {
  layout::ReaderA<2 * D> a_reader(a_rows, lane);
  layout::ReaderB<2 * D> b_reader(b_rows, lane);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    uint32_t a[4];
    a_reader.load(a, 0, step);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      b_reader.load(b, n * 8, step);
      ptx::mma_16<T>(out[n], a, b[0], b[1]);
      ptx::mma_16<T>(out[n + 1], a, b[2], b[3]);
    }
  }
}

// dP^T - D = V dO^T - D.
template <class T, int D>
__device__ __forceinline__ void multiply_dp(Scores& dp, uint32_t v_rows, uint32_t dout_rows, const float* delta,
                                            int lane) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float2 d = *reinterpret_cast<const float2*>(delta + n * 8 + 2 * (lane & 3));
    dp[n][0] = dp[n][2] = -d.x;
    dp[n][1] = dp[n][3] = -d.y;
  }
  multiply_scores<T, D>(dp, v_rows, dout_rows, lane);
}

// Zero probability where a query, `first_query` and on, does not see a key, `first_key` and on.
__device__ __forceinline__ void mask_scores(Scores& p, const Segment& segment, int first_query, int first_key, int lane) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int visible = segment.visible_keys(first_query + n * 8 + 2 * (lane & 3) + e) - first_key - lane / 4;
      if (visible <= 0) p[n][e] = 0.0f;
      if (visible <= 8) p[n][2 + e] = 0.0f;
    }
}

// Puts dS^T in shared memory: rows of 64 queries in 16 bit.
template <class T>
__device__ __forceinline__ void store_scores(uint32_t rows, const Scores& ds, int lane) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t at = rows + layout::swizzled<TILE * 2>(lane / 4 + 8 * h, n) + 4 * (lane & 3);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(ptx::pack_16<T>(ds[n][2 * h], ds[n][2 * h + 1])) : "memory");
    }
}

// Adds to dQ. Its sums lie in the order of the fragments, ((16 queries, 8 channels), lane, 4 values): a warp adds 512
// neighbouring bytes at once. Either in any order, or each key tile in its turn.
struct DqSums {
  float* sums;
  int* turns;  // null: any order
  int turn;

  template <int D>
  __device__ __forceinline__ void add(int64_t padded_tile, int strip, int n, int lane, const float (&x)[4]) const {
    float* at = sums + padded_tile * (TILE * D) + ((strip * (D / 8) + n) * 32 + lane) * 4;
    if (turns) {
      float4 sum = __ldcg(reinterpret_cast<float4*>(at));
      __stcg(reinterpret_cast<float4*>(at), make_float4(sum.x + x[0], sum.y + x[1], sum.z + x[2], sum.w + x[3]));
    } else {
      ptx::add_global(at, x[0], x[1], x[2], x[3]);
    }
  }
  __device__ __forceinline__ void wait(int64_t padded_tile) const {
    if (!turns) return;
    if (threadIdx.x == 0)
      while (ptx::load_acquire(turns + padded_tile) != turn) {}
    __syncthreads();
  }
  __device__ __forceinline__ void pass_on(int64_t padded_tile) const {
    if (!turns) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) ptx::add_release(turns + padded_tile, 1);
  }
};

// Numerics has: Type, D, Plan, SHARED_BYTES; a constructor; load_keys(); load(tile, stage), asynchronous;
// scores(tile, stage, hides, seen), from the logits to dS^T in shared memory, with dV and dK; add_dq(tile, stage, sums);
// dk(), dv(): accumulators, and dk_factor().
template <class Numerics>
__device__ __forceinline__ void backward(const params::Backward& p) {
  using T = typename Numerics::Type;
  using Plan = typename Numerics::Plan;
  constexpr int D = Numerics::D;
  extern __shared__ __align__(1024) unsigned char shared[];
  const params::Shape& shape = p.shape;

  int index = blockIdx.x;
  if (p.turns) {
    // Blocks take tickets, so that whoever a block waits for has started before it.
    __shared__ int ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(p.turns + int64_t(shape.query_heads) * shape.query_tiles, 1);
    __syncthreads();
    index = ticket;
  }
  BackwardBlock block(shape, index, Plan::KEYS);
  const Segment& segment = block.segment;
  if (block.first_key >= segment.key_len) return;
  int first_tile = segment.first_query(block.first_key) / TILE;
  int tiles = segment.query_len > segment.first_query(block.first_key) ? segment.query_tiles() - first_tile : 0;
  int iterations = tiles * (shape.query_heads / shape.key_heads);
  DqSums sums{p.dq_sums, p.turns, block.first_key / Plan::KEYS};

  Numerics numerics(p, block, shared);
  numerics.load_keys();
  if (iterations > 0) numerics.load(QueryTile(shape, block, 0, first_tile, tiles), 0);
  ptx::copy_commit();
  int warp_key = block.first_key + threadIdx.x / 32 * 16;
  for (int i = 0; i < iterations; ++i) {
    QueryTile tile(shape, block, i, first_tile, tiles);
    int stage = Plan::STAGES == 2 ? i & 1 : 0;
    ptx::copy_wait<0>();
    // Everyone sees the tile, and is done with the previous one.
    __syncthreads();
    if (i == 0) numerics.keys_arrived();
    if (Plan::STAGES == 2) {
      if (i + 1 < iterations) numerics.load(QueryTile(shape, block, i + 1, first_tile, tiles), stage ^ 1);
      ptx::copy_commit();
    }
    int first_query = tile.tile * TILE;
    bool hides = segment.visible_keys(first_query) < warp_key + 16;
    bool seen = segment.visible_keys(min(first_query + TILE, segment.query_len) - 1) > warp_key;
    numerics.scores(tile, stage, hides, seen);
    __syncthreads();
    sums.wait(tile.padded);
    numerics.add_dq(tile, stage, sums);
    sums.pass_on(tile.padded);
    if (Plan::STAGES == 1) {
      __syncthreads();
      if (i + 1 < iterations) numerics.load(QueryTile(shape, block, i + 1, first_tile, tiles), 0);
      ptx::copy_commit();
    }
  }

  int lane = threadIdx.x % 32;
  Rows<T> dk(p.dk, segment.batch, segment.key_start, block.key_head, segment.key_len, shape.head_dim);
  Rows<T> dv(p.dv, segment.batch, segment.key_start, block.key_head, segment.key_len, shape.head_dim);
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = warp_key + lane / 4 + 8 * h, column = n * 8 + 2 * (lane & 3);
      dk.store_2(row, column, numerics.dk[n][2 * h] * shape.softmax_scale, numerics.dk[n][2 * h + 1] * shape.softmax_scale);
      dv.store_2(row, column, numerics.dv[n][2 * h], numerics.dv[n][2 * h + 1]);
    }
}

}  // namespace sage::attention
