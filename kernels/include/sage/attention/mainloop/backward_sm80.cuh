// The backward mainloop for sm_80 and later (mma.sync, cp.async), and what the mainloops for Hopper share with it: the
// division into thread blocks and tiles, the accumulation of dQ, and the epilogue.
//
// A thread block computes dK and dV of KEYS keys of one key head; each warp has 16 of the keys, and keeps their dK and
// dV in registers. For each query head of the group, the mainloop visits the tiles of 64 queries that see the keys, and
// adds the keys' contribution to dQ in global memory. With two stages, all warps copy the next tile asynchronously
// while they compute on the current tile; one __syncthreads per tile orders the copies, the reads, and the exchange of
// dS^T. With one stage a second barrier precedes the next copies. In deterministic mode a semaphore for each tile of
// queries orders the thread blocks that add to its dQ. The numerics define how a tile is computed:
// numerics/*_backward_sm80.cuh.
//
// Scores are computed transposed, S^T = K Q^T: keys are the rows of accumulators, so that P^T and dS^T are already the
// A operands of dV and dK. For dQ = dS K, dS^T is written to shared memory once, in 16 bit; each warp reads dS^T of 16
// queries.
#pragma once

#include <math_constants.h>
#include <sage/attention/dq_layout.cuh>
#include <sage/attention/key_gradients.cuh>
#include <sage/attention/numerics/probabilities.cuh>
#include <sage/attention/query_tiles.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/params/plans.cuh>
#include <sage/ptx/mma.cuh>

namespace sage::attention {

// The constants of a plan (plans.def), and how this mainloop divides the plan's keys among warps.
template <params::Plan PLAN>
struct BackwardPlan {
  static constexpr int KEYS = PLAN.rows;      // of a thread block
  static constexpr int STAGES = PLAN.stages;  // buffers for tiles of queries
  static constexpr int SHARED_BYTES = PLAN.shared_bytes;
  static constexpr int WARPS = KEYS / 16;
  static constexpr int THREADS = WARPS * 32;
  static_assert(PLAN.mainloop == params::BACKWARD_SM80);
  static_assert(PLAN.threads == THREADS);
  static constexpr int PARTS = KEYS / TILE;  // warps that share a strip of 16 queries of dQ, each with 1 / PARTS of the channels
};

// out += A B^T for 16 rows of A and 64 rows of B. Both are 16-bit operands in shared memory, with the reduction along
// their rows.
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

// A lane's values of a vector with one value per query of a tile. Queries are the columns of the lane's accumulators;
// `set` initializes an accumulator with the values.
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

// dP^T - delta = V dO^T - delta.
template <class T, int D>
__device__ __forceinline__ void multiply_dp(Scores& dp, uint32_t v_rows, uint32_t dout_rows, const float* minus_delta,
                                            int lane) {
  ColumnValues(minus_delta, lane).set(dp);
  multiply_scores<T, D>(dp, v_rows, dout_rows, lane);
}

// Masks transposed scores: writes `hidden` where a query does not see a key. The first column is query `first_query`,
// and the first row is key `first_key`. `hidden` is 0 for probabilities, and minus infinity for their logarithms.
template <Hidden HIDDEN>
__device__ __forceinline__ void mask_scores(Scores& p, const Sight<HIDDEN>& sight, int first_query, int first_key, int lane,
                                            float hidden = 0.0f) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      int query = first_query + n * 8 + 2 * (lane & 3) + e, key = first_key + lane / 4, first = key;
      int visible = sight.visible_keys(query) - key;
      if constexpr (HIDDEN == OUTER_KEYS) first = sight.first_key(query);
      if (visible <= 0 || key < first) p[n][e] = hidden;
      if (visible <= 8 || key + 8 < first) p[n][2 + e] = hidden;
    }
}

// Stores a warp's dS^T in shared memory, as rows of 64 queries in 16 bit.
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

// Stores the dS^T of a tile of queries that sees none of the warp's keys.
__device__ __forceinline__ void store_zeros(uint32_t rows, int lane) {
  Scores zeros = {};
  store_scores<__nv_bfloat16>(rows, zeros, lane);
}

// Adds to the sums of dQ in global memory (DqLayout). Thread blocks add to a tile in any order, by atomic additions. In
// deterministic mode they add one after the other, in the order of their keys: the tile's semaphore counts the thread
// blocks that have added.
struct DqAccumulator {
  float* sums;
  int* semaphore;  // for each query tile: number of thread blocks that have added to its dQ; null: added in any order
  int order;       // number of thread blocks that add to the current tile before this thread block
  // The threads that add to dQ: the index of the first, their number, and their named barrier.
  int first, threads, barrier;

  // The address of fragment `first` (16 queries x 8 channels) of a strip.
  template <int D>
  __device__ __forceinline__ float* at(int padded_tile, int strip, int first) const {
    using Layout = DqLayout<D>;
    return sums + int64_t(padded_tile) * Layout::TILE_FLOATS + (strip * (D / 8) + first) * Layout::FRAGMENT_FLOATS;
  }
  // Adds `x` to the dQ sums of a strip (16 queries). `x` has N fragments of 16 queries x 8 channels, from the strip's
  // fragment `first` on.
  template <int D, int N>
  __device__ __forceinline__ void add(int padded_tile, int strip, int first, int lane, const float (&x)[N][4]) const {
    // Calling `at` here would make ptxas spill ten times as much for sm_86.
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
  // Returns the tile's number in the padded buffers. For a RankedTile, sets `order` from its rank. For other tiles
  // `order` stays as it is, because the thread blocks of all earlier keys add to each of them.
  __device__ __forceinline__ int set_order(int padded_tile, int) { return padded_tile; }
  __device__ __forceinline__ int set_order(const RankedTile& added, int parts) {
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
// DqAccumulator assumes that the channels of a tile of dq_accum are not divided into parts.
static_assert(params::facts(params::BACKWARD_SM80).dq_parts == 1 && params::facts(params::BACKWARD_SM90_DQ_WARPGROUP).dq_parts == 1 &&
              params::facts(params::BACKWARD_SM90_CHANNEL_PARTS).dq_parts == 1);

// The index of this thread block's work. In deterministic mode the index comes from an atomic counter when the thread
// block starts, so that a thread block waits at a semaphore only for thread blocks that have already started.
template <params::Mainloop MAINLOOP>
__device__ __forceinline__ int backward_index(const params::Backward& p) {
  static_assert(!params::facts(MAINLOOP).persistent);
  if (!p.dq_semaphore) return blockIdx.x;
  __shared__ int ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(p.dq_semaphore + int64_t(p.shape.query_heads) * p.shape.query_tiles, 1);
  __syncthreads();
  return ticket;
}

// Whether the queries of a tile see all, some or none of `keys` keys from `first_key` on.
template <Hidden HIDDEN>
struct TileVisibility {
  bool masked;  // at least one query of the tile does not see all of the keys
  bool seen;    // at least one query of the tile sees at least one of the keys

  __device__ __forceinline__ TileVisibility(const params::Backward& p, const Segment& segment, const QueryTile& tile, int first_key,
                                            int keys) {
    Sight<HIDDEN> sight(segment, p);
    int first_query = tile.tile * TILE, last_query = min(first_query + TILE, segment.query_len) - 1;
    masked = sight.visible_keys(first_query) < first_key + keys;
    seen = sight.visible_keys(last_query) > first_key;
    if constexpr (HIDDEN == OUTER_KEYS) {
      masked |= sight.first_key(last_query) > first_key;
      seen &= sight.first_key(first_query) < first_key + keys;
    }
  }
};

// What the mainloop requires of its numerics.
template <class N>
concept BackwardSm80Numerics = requires(N numerics, const params::Backward& p, const BackwardBlock& block, unsigned char* shared,
                                        const QueryTile& tile, TileVisibility<OUTER_KEYS> visibility, const DqAccumulator& sums) {
  typename N::Type;
  requires N::D % 64 == 0;                  // the padded head_dim
  requires N::Plan::THREADS == N::Plan::WARPS * 32 && N::SHARED_BYTES > 0;  // N::Plan is a BackwardPlan
  N::COOPERATES || true;                    // whether warps meet at a barrier inside a tile
  requires N::LAG == 1 || N::LAG == 2;      // add_dq() is called LAG iterations after scores() of the same tile
  N(p, block, shared);
  numerics.load_keys();     // issues the asynchronous copies of K and V
  numerics.keys_arrived();  // prepares K and V after they have arrived
  // Issues the asynchronous copies of a tile of queries into a stage.
  numerics.load(tile, 0);
  // scores(tile, stage, slot, visibility): computes S^T, P^T and dS^T, stores dS^T in a slot, and adds to dV and dK.
  numerics.scores(tile, 0, 0, visibility);
  // prepare_dq(slot of dS^T): called only if LAG is 2, one iteration after scores() and one before add_dq() of the same
  // tile.
  numerics.prepare_dq(0);
  // add_dq(the tile's number in the padded buffers, slot, sums): computes dQ of the tile whose scores were computed
  // LAG iterations earlier, and adds it to `sums`. `slot` is the slot that this iteration's `scores` uses. If LAG is 1,
  // add_dq reads dS^T in the other slot. If LAG is 2, it reads the result of prepare_dq(slot).
  numerics.add_dq(0, 0, sums);
  // Finishes the accumulators after the last tile.
  numerics.flush_magic();
  numerics.dk, numerics.dv;
  requires N::CHANNEL_PARTS >= 1;  // number of channel parts; a thread block computes dK, dV and dQ of one part
};

// dS^T needs no barrier other than the one that starts each iteration, because it is stored in one of two slots, and
// read one iteration later (by add_dq, or by prepare_dq if LAG is 2). A warp calls add_dq() before scores(). Exception:
// if COOPERATES is false and dq_semaphore is null, only the first four warps do. The other warps call scores() first,
// so that their arithmetic overlaps with the MMAs of the first four warps, and vice versa.
template <BackwardSm80Numerics Numerics, class Queries = EveryQuery>
__device__ __forceinline__ void backward_sm80(const params::Backward& p) {
  using T = typename Numerics::Type;
  using Plan = typename Numerics::Plan;
  constexpr int LAG = Numerics::LAG;
  extern __shared__ __align__(1024) unsigned char shared[];
  constexpr int PARTS = Numerics::CHANNEL_PARTS;
  int index = backward_index<params::BACKWARD_SM80>(p);
  BackwardBlock block = Queries::take(p, index / PARTS, Plan::KEYS);
  if constexpr (PARTS > 1) block.channel_part = index % PARTS;
  const Segment& segment = block.segment;
  if (block.first_key >= segment.key_len) return;
  int warp_key = block.first_key + threadIdx.x / 32 * 16;
  Queries queries(p, block, Plan::KEYS);
  int iterations = queries.count;
  int order = block.first_key / Plan::KEYS * PARTS;
  if constexpr (PARTS > 1) order += block.channel_part;
  DqAccumulator sums{p.dq_accum, p.dq_semaphore, order, 0, Plan::THREADS, 0};

  Numerics numerics(p, block, shared);
  numerics.load_keys();
  typename Queries::Tile tile = queries.start();
  typename Queries::Added past[LAG];  // the LAG previous tiles, the latest first: their dQ has not been added yet
  if (iterations > 0) numerics.load(tile, 0);
  ptx::cp_async_commit();
  bool late = !Numerics::COOPERATES && !p.dq_semaphore && threadIdx.x >= 128;
  for (int i = 0; i < iterations + LAG; ++i) {
    typename Queries::Tile next = tile;
    queries.advance(next);
    int stage = Plan::STAGES == 2 ? i & 1 : 0;
    ptx::cp_async_wait<0>();
    // After the barrier all threads' copies of this tile are visible, and all warps have read the previous tile.
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
          int padded = sums.set_order(past[LAG - 1], Queries::template RANK_BLOCKS<Plan::KEYS> * PARTS);
          sums.acquire(padded);
          numerics.add_dq(padded, i & 1, sums);
          sums.release(padded);
        }
        if (LAG == 2 && i >= 1 && i <= iterations) numerics.prepare_dq(i & 1 ^ 1);
      } else if (i < iterations) {
        numerics.scores(tile, stage, i & 1, TileVisibility<Queries::HIDDEN>(p, segment, tile, warp_key, 16));
      }
    }
    if (Plan::STAGES == 1) {
      __syncthreads();
      if (i + 1 < iterations) numerics.load(next, 0);
      ptx::cp_async_commit();
    }
    if (LAG == 2) past[1] = past[0];
    past[0] = queries.added(tile);
    tile = next;
  }
  numerics.flush_magic();
  int first_channel = block.channel_part * (Numerics::D / PARTS);
  store_gradient<DK, Queries, T, 0, PARTS>(p, block, warp_key, numerics.dk, 0, first_channel);
  store_gradient<DV, Queries, T, 0, PARTS>(p, block, warp_key, numerics.dv, 0, first_channel);
}

}  // namespace sage::attention
