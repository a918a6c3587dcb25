// The backward walk: a block keeps KEYS keys of one key head, a warp 16 of them with their dK and dV, and walks the
// tiles of 64 queries that see them, for all query heads of the group. What happens inside a tile is the numerics'
// affair: full_precision_backward.cuh, sagebwd_backward.cuh.
//
// Everything is on S^T = K Q^T: keys are the rows of accumulators, so P^T and dS^T are the left operands of dV and dK as
// they are. For dQ = dS K, dS^T goes through shared memory once, in 16 bit; each warp takes 16 queries out of it.
#pragma once

#include <math_constants.h>
#include <sage/attention/numerics/probabilities.cuh>
#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/params/plans.cuh>
#include <sage/ptx/mma.cuh>

namespace sage::attention {

// A plan of the table as this mainloop divides it among warps.
template <params::Plan PLAN>
struct BackwardPlan {
  static constexpr int KEYS = PLAN.rows;      // of a block
  static constexpr int STAGES = PLAN.stages;  // buffers for tiles of queries
  static constexpr int SHARED_BYTES = PLAN.shared_bytes;
  static constexpr int WARPS = KEYS / 16;
  static constexpr int THREADS = WARPS * 32;
  static_assert(PLAN.threads == THREADS);
  static constexpr int PARTS = KEYS / TILE;  // warps that share 16 queries of dQ: each takes a part of the channels
};

// Where a block of the backward is.
struct BackwardBlock {
  int segment_index, key_head, first_key;
  Segment segment;

  BackwardBlock() = default;
  __device__ __forceinline__ BackwardBlock(const params::Shape& shape, int index, int keys) {
    Place place(shape, index, shape.key_heads, (shape.key_len + keys - 1) / keys);
    key_head = place.head, segment_index = place.segment, first_key = place.tile * keys;
    segment = Segment(shape, segment_index);
  }
};

// A tile of 64 queries of one query head.
struct QueryTile {
  int head;
  int tile;    // inside the segment
  int padded;  // in the padded buffers
};

// Which tiles of queries a block visits, of each head of the group: all from the first on that sees the block's keys.
struct EveryQuery {
  using Tile = QueryTile;
  using Added = int;  // what is kept of a tile until its dQ is added: its place in the padded buffers

  const params::Shape& shape;
  const BackwardBlock& block;
  int first, end;  // tiles of a head
  int count;       // of all heads

  __device__ __forceinline__ EveryQuery(const params::Backward& p, const BackwardBlock& block)
      : shape(p.shape), block(block), end(block.segment.query_tiles()) {
    int first_query = block.segment.first_query(block.first_key);
    first = first_query / TILE;
    int tiles = block.segment.query_len > first_query ? end - first : 0;
    count = tiles * (shape.query_heads / shape.key_heads);
  }

  __device__ __forceinline__ Tile start() const {
    int head = block.key_head * (shape.query_heads / shape.key_heads);
    return {head, first, head * shape.query_tiles + block.segment.query_tile + first};
  }
  // To the next one: of the same head, or the first of the next head.
  __device__ __forceinline__ void advance(Tile& tile) const {
    ++tile.tile, ++tile.padded;
    if (tile.tile == end) {
      ++tile.head;
      tile.padded += shape.query_tiles - (tile.tile - first);
      tile.tile = first;
    }
  }
  static __device__ __forceinline__ Added added(const Tile& tile) { return tile.padded; }
};

// The same with a selection: the blocks of queries that list the block of keys. With a causal mask the first is the block at
// the same place, and those after it see all the keys: counted from there without gaps, `first` to `end`, they are masked as
// they are by their own numbers.
struct ListedQueries {
  struct Tile : QueryTile {
    int position;  // in the list, in tiles
    int rank;      // of the block of keys among those that the tile's block of queries sees
  };
  struct Added {
    int padded, rank;
  };
  static constexpr int BLOCK_TILES = SELECTION_BLOCK / TILE;

  const params::Shape& shape;
  const BackwardBlock& block;
  const params::User* users;
  int first, end, count;

  __device__ __forceinline__ ListedQueries(const params::Backward& p, const BackwardBlock& block) : shape(p.shape), block(block) {
    int number = block.first_key / SELECTION_BLOCK;
    int64_t column = int64_t(block.key_head) * (p.lists.key_blocks + 1) + first_key_block(shape, block.segment_index) + number;
    uint32_t from = p.lists.first_users[column], to = p.lists.first_users[column + 1];
    users = p.lists.users + from;
    int tiles = BLOCK_TILES * int(to - from);
    // The last block of queries may have one tile.
    if (tiles > 0) tiles += min(block.segment.query_tiles() - BLOCK_TILES * int(users[to - from - 1].block + 1), 0);
    first = BLOCK_TILES * number, end = first + tiles;
    count = tiles * (shape.query_heads / shape.key_heads);
  }

  __device__ __forceinline__ void look_up(Tile& tile) const {
    params::User user = count > 0 ? users[tile.position / BLOCK_TILES] : params::User{0, 0};
    tile.tile = BLOCK_TILES * int(user.block) + tile.position % BLOCK_TILES;
    tile.padded = tile.head * shape.query_tiles + block.segment.query_tile + tile.tile;
    tile.rank = user.rank;
  }
  __device__ __forceinline__ Tile start() const {
    Tile tile;
    tile.head = block.key_head * (shape.query_heads / shape.key_heads), tile.position = 0;
    look_up(tile);
    return tile;
  }
  __device__ __forceinline__ void advance(Tile& tile) const {
    if (++tile.position == end - first) ++tile.head, tile.position = 0;
    look_up(tile);
  }
  static __device__ __forceinline__ Added added(const Tile& tile) { return {tile.padded, tile.rank}; }
};

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

// The same value for all keys of a query: what a lane has of a tile's, and the accumulator that starts from it.
struct ColumnValues {
  float2 values[8];
  __device__ __forceinline__ ColumnValues(const float* of_query, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) values[n] = *reinterpret_cast<const float2*>(of_query + n * 8 + 2 * (lane & 3));
  }
  __device__ __forceinline__ void set(Scores& x) const {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      x[n][0] = x[n][2] = values[n].x;
      x[n][1] = x[n][3] = values[n].y;
    }
  }
};

// dP^T - D = V dO^T - D.
template <class T, int D>
__device__ __forceinline__ void multiply_dp(Scores& dp, uint32_t v_rows, uint32_t dout_rows, const float* minus_delta,
                                            int lane) {
  ColumnValues(minus_delta, lane).set(dp);
  multiply_scores<T, D>(dp, v_rows, dout_rows, lane);
}

// Writes `hidden` where a query, `first_query` and on, does not see a key, `first_key` and on: 0 over probabilities, or minus
// infinity over their logarithms.
__device__ __forceinline__ void mask_scores(Scores& p, const Segment& segment, int first_query, int first_key, int lane,
                                            float hidden = 0.0f) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int visible = segment.visible_keys(first_query + n * 8 + 2 * (lane & 3) + e) - first_key - lane / 4;
      if (visible <= 0) p[n][e] = hidden;
      if (visible <= 8) p[n][2 + e] = hidden;
    }
}

// Puts dS^T in shared memory: rows of 64 queries in 16 bit.
__device__ __forceinline__ void store_packed(uint32_t rows, const uint32_t (&x)[4][4], int lane) {
  layout::ReaderA<TILE * 2> writer(rows, lane);
#pragma unroll
  for (int step = 0; step < 4; ++step) writer.store(x[step], 0, step, lane);
}
template <class T>
__device__ __forceinline__ void store_scores(uint32_t rows, const Scores& ds, int lane) {
  uint32_t x[4][4];
  pack_scores<T>(x, ds);
  store_packed(rows, x, lane);
}

// The same of a tile that sees none of the keys.
__device__ __forceinline__ void store_zeros(uint32_t rows, int lane) {
  Scores zeros = {};
  store_scores<__nv_bfloat16>(rows, zeros, lane);
}

// Adds to dQ. Its sums lie in the order of the fragments, ((16 queries, 8 channels), lane, 4 values): a warp adds 512
// neighbouring bytes at once. Either in any order, or each key tile in its order.
struct DqAccumulator {
  float* sums;
  int* semaphore;  // null: any order
  int order;
  // Who adds: threads from `first` on, and the barrier where they meet.
  int first, threads, barrier;

  // Where a strip's sums begin, from tile `first` of 8 channels on.
  template <int D>
  __device__ __forceinline__ float* at(int padded_tile, int strip, int first) const {
    return sums + int64_t(padded_tile) * (TILE * D) + (strip * (D / 8) + first) * 128;
  }
  // Adds N tiles of 8 channels, from number `first` on, of 16 queries.
  template <int D, int N>
  __device__ __forceinline__ void add(int padded_tile, int strip, int first, int lane, const float (&x)[N][4]) const {
    // Not `at`: ptxas would spill ten times as much for sm_86.
    float* to = sums + int64_t(padded_tile) * (TILE * D) + ((strip * (D / 8) + first) * 32 + lane) * 4;
    if (semaphore) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float4* own = reinterpret_cast<float4*>(to + n * 128);
        float4 sum = __ldcg(own);
        __stcg(own, make_float4(sum.x + x[n][0], sum.y + x[n][1], sum.z + x[n][2], sum.w + x[n][3]));
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) ptx::red_add_4(to + n * 128, x[n][0], x[n][1], x[n][2], x[n][3]);
    }
  }
  __device__ __forceinline__ void acquire(int padded_tile) const {
    if (!semaphore) return;
    if (threadIdx.x == first)
      while (ptx::load_acquire(semaphore + padded_tile) != order) {}
    ptx::named_barrier_sync(barrier, threads);
  }
  // Whose order it is that a block of keys adds: where each tile is visited in the order of keys, the block's number.
  __device__ __forceinline__ int set_order(int padded_tile, int) { return padded_tile; }
  template <class Added>
  __device__ __forceinline__ int set_order(const Added& added, int parts) {
    order = added.rank * parts + order % parts;
    return added.padded;
  }
  __device__ __forceinline__ void release(int padded_tile) const {
    if (!semaphore) return;
    __threadfence();
    ptx::named_barrier_sync(barrier, threads);
    if (threadIdx.x == first) ptx::add_release(semaphore + padded_tile, 1);
  }
};

// Which block this is. Where dQ is added in semaphore, blocks take scheduler_counter, so that whoever a block waits for has started
// before it.
__device__ __forceinline__ int backward_index(const params::Backward& p) {
  if (!p.dq_semaphore) return blockIdx.x;
  __shared__ int ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(p.dq_semaphore + int64_t(p.shape.query_heads) * p.shape.query_tiles, 1);
  __syncthreads();
  return ticket;
}

// Which of KEYS keys, from `first_key` on, a tile of queries sees.
struct TileVisibility {
  bool masked;  // not all of them
  bool seen;   // any of them

  __device__ __forceinline__ TileVisibility(const Segment& segment, const QueryTile& tile, int first_key, int keys) {
    int first_query = tile.tile * TILE;
    masked = segment.visible_keys(first_query) < first_key + keys;
    seen = segment.visible_keys(min(first_query + TILE, segment.query_len) - 1) > first_key;
  }
};

// Writes the gradient of a warp's 16 keys, `first_key` and on.
template <class T, int N>
__device__ __forceinline__ void store_gradient(const params::View& view, const params::Backward& p, const BackwardBlock& block,
                                               int first_key, const float (&x)[N][4], float scale) {
  const Segment& segment = block.segment;
  Rows<T> rows(view, segment.batch, segment.key_start, block.key_head, segment.key_len, p.shape.head_dim);
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = first_key + lane / 4 + 8 * h, column = 2 * (lane & 3);
    if (rows.vector) {
      // One address a row: there are few registers beside the accumulators.
      uint32_t* at = reinterpret_cast<uint32_t*>(rows.at(row, column));
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (row < rows.count && n * 8 < rows.head_dim) at[n * 4] = ptx::pack_16<T>(x[n][2 * h] * scale, x[n][2 * h + 1] * scale);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) rows.store_2(row, n * 8 + column, x[n][2 * h] * scale, x[n][2 * h + 1] * scale);
    }
  }
}

// Numerics has: Type, D, Plan, SHARED_BYTES; COOPERATES, whether warps meet inside a tile; a constructor; load_keys(), keys_arrived(); load(tile, stage),
// asynchronous; scores(tile, stage, slot, visibility), from the logits to dS^T in shared memory, with dV and dK;
// LAG, how many tiles later dQ is added; prepare_dq(slot), what happens in between with LAG = 2; add_dq(tile, slot,
// sums); flush_magic() at the end; dk and dv, the accumulators.
//
// One barrier a tile: what dQ needs lies in one of two slots and is picked up an iteration later. The first half of the
// warps does dQ before the scores, the other half after them, so that one half's products meet the other's arithmetic.
template <class Numerics, class Queries = EveryQuery>
__device__ __forceinline__ void backward_sm80(const params::Backward& p) {
  using T = typename Numerics::Type;
  using Plan = typename Numerics::Plan;
  constexpr int LAG = Numerics::LAG;
  extern __shared__ __align__(1024) unsigned char shared[];
  const params::Shape& shape = p.shape;

  BackwardBlock block(shape, backward_index(p), Plan::KEYS);
  const Segment& segment = block.segment;
  if (block.first_key >= segment.key_len) return;
  int warp_key = block.first_key + threadIdx.x / 32 * 16;
  Queries queries(p, block);
  int iterations = queries.count;
  DqAccumulator sums{p.dq_accum, p.dq_semaphore, block.first_key / Plan::KEYS, 0, Plan::THREADS, 0};

  Numerics numerics(p, block, shared);
  numerics.load_keys();
  typename Queries::Tile tile = queries.start();
  typename Queries::Added past[LAG];  // tiles whose dQ is to come, the last one first
  if (iterations > 0) numerics.load(tile, 0);
  ptx::cp_async_commit();
  bool late = !Numerics::COOPERATES && !p.dq_semaphore && threadIdx.x >= 128;
  for (int i = 0; i < iterations + LAG; ++i) {
    typename Queries::Tile next = tile;
    queries.advance(next);
    int stage = Plan::STAGES == 2 ? i & 1 : 0;
    ptx::cp_async_wait<0>();
    // Everyone sees the tile, and is done with the previous one.
    __syncthreads();
    if (i == 0) {
      numerics.keys_arrived();
        __syncthreads();
    }
    if (Plan::STAGES == 2) {
      if (i + 1 < iterations) numerics.load(next, stage ^ 1);
      ptx::cp_async_commit();
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      if ((half == 1) == late) {
        if (i >= LAG) {
          int padded = sums.set_order(past[LAG - 1], SELECTION_BLOCK / Plan::KEYS);
          sums.acquire(padded);
          numerics.add_dq(padded, i & 1, sums);
          sums.release(padded);
        }
        if (LAG == 2 && i >= 1 && i <= iterations) numerics.prepare_dq(i & 1 ^ 1);
      } else if (i < iterations) {
        numerics.scores(tile, stage, i & 1, TileVisibility(segment, tile, warp_key, 16));
      }
    }
    if (Plan::STAGES == 1) {
      __syncthreads();
      if (i + 1 < iterations) numerics.load(next, 0);
      ptx::cp_async_commit();
    }
    if (LAG == 2) past[1] = past[0];
    past[0] = Queries::added(tile);
    tile = next;
  }
  numerics.flush_magic();
  store_gradient<T>(p.dk, p, block, warp_key, numerics.dk, shape.softmax_scale);
  store_gradient<T>(p.dv, p, block, warp_key, numerics.dv, 1.0f);
}

}  // namespace sage::attention
