// The backward mainloop for Hopper at head_dim above 64 and up to 128, for schemes with 16-bit matmuls for dV, dK and
// dQ. A thread block computes dK and dV of 128 keys of one key head, and the keys' contribution to dQ for the tiles of
// 64 queries that see these keys. Its warpgroups are specialized.
//
//   consumers     Two warpgroups have 64 keys each, whose dV and dK stay in registers. They compute S, dP, P, dS, dV
//                 and dK of these keys. dQ sums over all 128 keys; each consumer computes half of dQ's channels.
//   producer      Warp 0 of the third warpgroup copies Q, dO and the row state (log-sum-exp, delta) of each tile into a
//                 pipeline of STAGES stages.
//   storer        Warp 1 of the third warpgroup adds dQ from shared memory to the sums in global memory, by one bulk
//                 addition per consumer.
//   ALL_CONSUMERS Named barrier: dS^T of a tile is in shared memory. The consumers meet nowhere else in the loop.
//   DQ_EMPTY, DQ_FULL  Named barriers that hand over the staging memory of dQ between each consumer and the storer.
//   dq_semaphore  In deterministic mode the storer waits for its thread block's turn to add to dQ of each tile.
//
// Timeline of query tile i, with two stages. wgmmas are asynchronous: they run while later instructions execute.
//
//   producer    |Q, dO of tile i + 1, once both consumers have released tile i - 1
//   consumer 0  |S, dP issued|P, dS|dS stored|dV issued|barrier|dQ, dK issued|dQ staged|S, dP of tile i + 1 ..
//   consumer 1  |S, dP issued|P, dS|dS stored|dV issued|barrier|dQ, dK issued|dQ staged|S, dP of tile i + 1 ..
//   storer      |dQ of tile i - 1 added                                                |dQ of tile i added ..
//
// FlashAttention-3 (arXiv 2407.08608, appendix B.1) divides the work in the same way.
#pragma once

#include <limits.h>
#include <sage/attention/key_gradients.cuh>
#include <sage/attention/mainloop/backward_sm80.cuh>
#include <sage/attention/panels.cuh>
#include <sage/tile/pipeline.cuh>

namespace sage::attention {

constexpr int SM90_THREADS = 384;
constexpr int SM90_KEYS = 128;   // of a thread block
constexpr int CONSUMER_KEYS = 64;    // of a consumer warpgroup
constexpr int CONSUMERS = SM90_KEYS / CONSUMER_KEYS;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP_THREADS;

// Whether a tile's scores need a mask (`some`), and which keys the mask hides (HIDDEN).
template <Hidden HIDDEN>
struct Masked {
  bool some;
};

// The index of the first tile of queries in which no query's last visible key is before key `first_key` +
// CONSUMER_KEYS - 1. INT_MAX if the segment ends before this key.
template <class Sight>
__device__ __forceinline__ int seen_whole_from(const Segment& segment, const Sight& sight, int first_key) {
  if (first_key + CONSUMER_KEYS > segment.key_len) return INT_MAX;
  return (sight.first_query(first_key + CONSUMER_KEYS - 1) + TILE - 1) / TILE;
}

// The query tiles that need a mask for a consumer's keys: all tiles before the first tile in which every query sees all
// of the keys. A window also needs a mask in the first tile whose last query does not see the consumer's first key, and
// in all later tiles.
template <Hidden HIDDEN>
struct MaskedTiles {
  int below[CONSUMERS];

  __device__ __forceinline__ void set(const BackwardBlock& block, const params::Backward&) {
    for (int g = 0; g < CONSUMERS; ++g) below[g] = seen_whole_from(block.segment, block.segment, block.first_key + g * CONSUMER_KEYS);
  }
  __device__ __forceinline__ Masked<HIDDEN> of(int tile, int consumer) const { return {tile < below[consumer]}; }
};
template <>
struct MaskedTiles<OUTER_KEYS> {
  int below[CONSUMERS], from[CONSUMERS];

  __device__ __forceinline__ void set(const BackwardBlock& block, const params::Backward& p) {
    Sight<OUTER_KEYS> sight(block.segment, p);
    for (int g = 0; g < CONSUMERS; ++g) {
      int first_key = block.first_key + g * CONSUMER_KEYS;
      below[g] = seen_whole_from(block.segment, sight, first_key), from[g] = sight.end_query(first_key) / TILE;
    }
  }
  __device__ __forceinline__ Masked<OUTER_KEYS> of(int tile, int consumer) const {
    return {tile < below[consumer] || tile >= from[consumer]};
  }
};

// One thread prepares what the warps share: `pipeline`, `block` and `masked`.
template <class Queries, int CHANNEL_PARTS = 1, class Tiles>
__device__ __forceinline__ void prepare_keys(const params::Backward& p, int index, Tiles& pipeline, int arrivals, int warps,
                                             BackwardBlock& block, MaskedTiles<Queries::HIDDEN>& masked) {
  if (threadIdx.x == 0) {
    pipeline.prepare(arrivals, warps);
    block = Queries::take(p, index / CHANNEL_PARTS, SM90_KEYS);
    if constexpr (CHANNEL_PARTS > 1) block.channel_part = index % CHANNEL_PARTS;
    masked.set(block, p);
  }
  __syncthreads();
}

// Computes P from its logarithms; P is 0 where a query does not see a key. The mask comes first, so that no branch
// separates the exponentials from the instructions that follow: ptxas can then interleave them, and several
// execution units work at once.
template <Hidden HIDDEN>
__device__ __forceinline__ void take_exponentials(Scores& s, Masked<HIDDEN> masked, const Sight<HIDDEN>& sight, int first_query, int first_key,
                                                  int lane) {
  if (__builtin_expect(masked.some, false)) mask_scores(s, sight, first_query, first_key, lane, -CUDART_INF_F);
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = ptx::exp2(s[n][e]);
}

// Registers per thread: of the consumers, and of the warpgroup of producer and storer.
constexpr int KV_CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
static_assert(CONSUMERS * KV_CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (CONSUMERS + 1) * ptx::LAUNCH_REGISTERS<SM90_THREADS>,
              "setmaxnreg.inc would wait for ever: the warpgroups ask for more registers than the block has at launch");

// Named barriers; 0 is __syncthreads.
enum ConsumerBarrier : int {
  ALL_CONSUMERS = 1,  // both consumers have written K and V, or dS^T of the current tile, to shared memory
  DQ_EMPTY = 2,  // one per consumer: the staging memory of its channels of dQ may be written
  DQ_FULL = 4,   // one per consumer: its channels of dQ are in staging memory
};
constexpr int DQ_THREADS = WARPGROUP_THREADS + 32;  // threads at DQ_EMPTY and DQ_FULL: a consumer and the storer's warp

// The storer's loop: adds each consumer's channels of dQ (PART_BYTES bytes of `staging`) to the sums of dQ. The staging
// memory and the sums are in the layout of DqLayout, with one part per consumer.
template <int PART_BYTES, class Queries>
__device__ __forceinline__ void store_dq(const params::Backward& p, const Queries& queries, int block_number, uint32_t staging) {
  int lane = threadIdx.x % 32;
  DqAccumulator sums{p.dq_accum, p.dq_semaphore, block_number, 0, 0, 0};
  typename Queries::Tile tile = queries.start();
  for (int g = 0; g < CONSUMERS; ++g) ptx::named_barrier_arrive(DQ_EMPTY + g, DQ_THREADS);
#pragma unroll 1
  for (int i = 0; i < queries.count; ++i) {
    int padded = sums.set_order(queries.added(tile), 1);
    if (p.dq_semaphore && lane == 0) {
      while (ptx::load_acquire(p.dq_semaphore + padded) != sums.order) {}
      ptx::fence_proxy_async_all();
    }
    static_assert(params::facts(params::BACKWARD_SM90).dq_parts == CONSUMERS);
    float* to = p.dq_accum + int64_t(padded) * (CONSUMERS * PART_BYTES / 4);
#pragma unroll
    for (int g = 0; g < CONSUMERS; ++g) {
      ptx::named_barrier_sync(DQ_FULL + g, DQ_THREADS);
      if (lane == 0) ptx::cp_reduce_async_bulk(to + g * (PART_BYTES / 4), staging + g * PART_BYTES, PART_BYTES);
    }
    if (i + 1 < queries.count) {
      if (lane == 0) ptx::cp_async_bulk_wait_read<1>();
      __syncwarp();
      ptx::named_barrier_arrive(DQ_EMPTY, DQ_THREADS);
      if (lane == 0) ptx::cp_async_bulk_wait_read<0>();
      __syncwarp();
      ptx::named_barrier_arrive(DQ_EMPTY + 1, DQ_THREADS);
    }
    if (p.dq_semaphore && lane == 0) {
      ptx::cp_async_bulk_wait();
      __threadfence();
      ptx::add_release(p.dq_semaphore + padded, 1);
    }
    queries.advance(tile);
  }
  // Shared memory must not be freed before the last bulk additions have read it.
  if (lane == 0) ptx::cp_async_bulk_wait_read<0>();
}

// The gradients of 16 keys are staged in this many bytes of shared memory, 64 channels of one gradient at a time. 64
// channels of V of 16 keys have as many bytes. So each warp stages the gradients of its 16 keys where V of these keys
// was stored.
constexpr int GRADIENT_STAGING = 16 * 128;

// What the mainloops for Hopper require of their numerics, which define the layout of shared memory.
template <class N>
concept BackwardTilesSm90 = requires(N numerics, const params::Backward& p, const BackwardBlock& block, unsigned char* shared) {
  typename N::Type;
  requires N::D % 64 == 0;                           // the padded head_dim
  requires N::STAGES >= 1 && N::SHARED_BYTES > 0;    // stages of the pipeline
  N(p, block, shared);
  numerics.load_keys();     // the consumers call it: issues the asynchronous copies of K and V
  numerics.keys_arrived();  // prepares K and V after they have arrived
  // gradient_staging(warp): the address of GRADIENT_STAGING bytes for the epilogue of a consumer's warp, in the memory
  // of V, which no copy writes and no wgmma reads any more.
  numerics.gradient_staging(0);
};

// What this mainloop requires of its numerics N, in addition to BackwardTilesSm90. N::Consumer is the state that a
// consumer keeps in registers.
template <class N>
concept BackwardSm90Numerics =
    BackwardTilesSm90<N> && requires(N numerics, const QueryTile& tile, uint32_t mbarrier, typename N::Consumer consumer) {
      requires N::DQ_AT + CONSUMERS * N::DQ_PART_BYTES <= N::SHARED_BYTES;  // the staging memory of dQ
      requires N::ARRIVALS >= 1;  // how often the producer arrives at a tile's mbarrier
      // The producer calls it: issues the copies of a tile of queries into a stage.
      numerics.load(tile, 0, mbarrier);
      (typename N::Consumer(numerics, 0));
      // visit(number of the tile of queries, stage, slot of dS^T, masked): computes all matmuls of the tile.
      consumer.visit(0, 0, 0, Masked<OUTER_KEYS>{});
      consumer.dv, consumer.dk;
      consumer.score_mod.next_head();  // score_mod: a policy of numerics/score_mod.cuh
    };

// The consumers copy and prepare K and V; afterwards wgmmas may read K and V. BARRIER: named barrier of the consumers.
template <int BARRIER, BackwardTilesSm90 Numerics>
__device__ __forceinline__ void fetch_keys(Numerics& numerics) {
  numerics.load_keys();
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::named_barrier_sync(BARRIER, CONSUMER_THREADS);
  numerics.keys_arrived();
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(BARRIER, CONSUMER_THREADS);
}

template <BackwardSm90Numerics Numerics, class Queries = EveryQuery>
__device__ __forceinline__ void backward_sm90(const params::Backward& p) {
  using T = typename Numerics::Type;
  using Tiles = Pipeline<Numerics::STAGES>;
  extern __shared__ __align__(1024) unsigned char shared[];
  // In shared memory, because the wgmmas need the registers.
  __shared__ BackwardBlock block;
  int index = backward_index<params::BACKWARD_SM90>(p);
  __shared__ MaskedTiles<Queries::HIDDEN> masked;
  __shared__ typename Tiles::Barriers barriers;
  Tiles pipeline(barriers);
  prepare_keys<Queries>(p, index, pipeline, Numerics::ARRIVALS, CONSUMER_THREADS / 32, block, masked);
  if (block.first_key >= block.segment.key_len) return;
  Queries queries(p, block, SM90_KEYS);
  Numerics numerics(p, block, shared);
  int warpgroup = ptx::uniform(threadIdx.x / WARPGROUP_THREADS);

  if (warpgroup == CONSUMERS) {
    ptx::setmaxnreg<PRODUCER_REGISTERS, SM90_THREADS>();
    int warp = ptx::uniform(threadIdx.x / 32 % 4);
    if (warp == 0) {
      typename Queries::Tile tile = queries.start();
#pragma unroll 1
      for (int i = 0; i < queries.count; ++i) {
        pipeline.wait_empty(i);
        numerics.load(tile, pipeline.stage(i), pipeline.full(i));
        queries.advance(tile);
      }
    } else if (warp == 1) {
      store_dq<Numerics::DQ_PART_BYTES>(p, queries, block.first_key / SM90_KEYS, ptx::shared_address(shared) + Numerics::DQ_AT);
    }
  } else {
    ptx::setmaxnreg<KV_CONSUMER_REGISTERS, SM90_THREADS>();
    fetch_keys<ALL_CONSUMERS>(numerics);
    int iterations = queries.count;
    typename Numerics::Consumer consumer(numerics, warpgroup);
    int number = queries.first;  // the query tile's index in the segment (with a selection: see ListedQueries)
#pragma unroll 1
    for (int i = 0; i < iterations; ++i) {
      pipeline.wait(i);
      consumer.visit(number, pipeline.stage(i), i & 1, masked.of(number, warpgroup));
      pipeline.release(i);
      if (++number == queries.end) number = queries.first, consumer.score_mod.next_head();
    }
    int warp = threadIdx.x / 32, warp_key = block.first_key + warp * 16;
    // dK is staged in the last panel of V, so that staging it need not wait until the staged dV is read.
    constexpr int LAST_PANEL = (Numerics::D / 64 - 1) * SM90_KEYS * 128;
    store_gradient<DV, Queries, T, GRADIENT_STAGING>(p, block, warp_key, consumer.dv, numerics.gradient_staging(warp));
    store_gradient<DK, Queries, T, GRADIENT_STAGING>(p, block, warp_key, consumer.dk, numerics.gradient_staging(warp) + LAST_PANEL);
  }
}

}  // namespace sage::attention
