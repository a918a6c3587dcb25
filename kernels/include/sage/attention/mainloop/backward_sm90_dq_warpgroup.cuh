// The backward mainloop for Hopper where a separate warpgroup computes dQ: for 16-bit operands at head_dim 64, and for
// SageBwd. A thread block computes dK and dV of 128 keys of one key head, and the keys' contribution to dQ for the
// tiles of 64 queries that see these keys. Its warpgroups are specialized.
//
//   consumers     Two warpgroups have 64 keys each. They compute S, dP, P, dS and dV, and dK where they have registers
//                 for dK (CONSUMERS_KEEP_DK: head_dim 64). They wait for dQ of tile i only before they store dS of
//                 tile i + 2.
//   dQ warpgroup  The third warpgroup is the producer, which copies tiles of queries into a pipeline of STAGES stages.
//                 It also computes dQ from the consumers' dS, and adds dQ to the sums in global memory; at head_dim 128
//                 it computes dK.
//   SLOT_EMPTY, DK_OPERANDS_FULL, DS_FULL  Named barriers that hand over the two slots of dS between each consumer and
//                 the dQ warpgroup. No barrier joins all warps after the start, so that warpgroups may be a tile or
//                 more apart.
//   dq_semaphore  In deterministic mode the dQ warpgroup waits for its thread block's turn to add to dQ of each tile.
//
// Timelines of tile i: 16-bit operands at head_dim 64 (five stages), and SageBwd at head_dim 128 (two stages), where
// "dK quant" quantizes dS for the matmul of dK:
//
//   consumer 0    |dP issued|P, dS|dV issued|dS stored|dK, S of i + 1 issued|dP of i + 1 issued ..
//   consumer 1    |dP issued|P, dS|dV issued|dS stored|dK, S of i + 1 issued|dP of i + 1 issued ..
//   dQ warpgroup  |dQ of i - 1 added |Q, dO of i + 4 copied|dQ of i issued  |dQ of i added ..
//
//   consumer 0    |S, dP issued|P, dS|dK quant|dQ quant|dV added|S, dP of i + 1 issued ..
//   consumer 1    |S, dP issued|P, dS|dK quant|dQ quant|dV added|S, dP of i + 1 issued ..
//   dQ warpgroup  |dQ of i - 1 added          |dK of i added    |tile i + 2 copied|dQ of i added ..
#pragma once

#include <sage/attention/mainloop/backward_sm90.cuh>

namespace sage::attention {

// Registers per thread of the dQ warpgroup: what the thread block's allocation leaves if a consumer's thread has
// CONSUMER registers.
template <int CONSUMER>
constexpr int DQ_REGISTERS = (CONSUMERS + 1) * ptx::LAUNCH_REGISTERS<SM90_THREADS> - CONSUMERS * CONSUMER;

// Named barriers; 0 is __syncthreads. The first three exist twice, for even and odd tiles, because one warpgroup can be
// ahead of another by a tile.
enum NamedBarrier : int {
  SLOT_EMPTY = 1,        // one per consumer: its half of a slot of dS may be overwritten
  DK_OPERANDS_FULL = 5,  // one per consumer: its operands of dK are in the slot. Used if the dQ warpgroup computes dK
  DS_FULL = 9,           // the operands of dQ, from both consumers, are in the slot
  KEYS_LOADED = 11,      // among the consumers: K and V are in shared memory
  DQ_WARPGROUP = 12,     // in deterministic mode, inside the dQ warpgroup: before and after it adds to dQ
  WITHIN_CONSUMER = 13,  // inside each consumer: all its warps have stored dS
};
__device__ __forceinline__ int named_barrier(NamedBarrier kind, int tile, int warpgroup) { return kind + (tile & 1) * CONSUMERS + warpgroup; }
__device__ __forceinline__ int named_barrier(NamedBarrier kind, int tile) { return kind + (tile & 1); }

// Whether the consumers have registers for dK in addition to dV.
template <int D>
constexpr bool CONSUMERS_KEEP_DK = D == 64;

// For D = 64: each warp of the dQ warpgroup stages its part of dQ in shared memory, and one bulk addition adds it to
// global memory while the warp continues. (Larger heads add from registers: their dQ of a tile needs several additions
// per warp, and each bulk addition would wait until the previous one has read the staged values.)
struct BulkDqAccumulator : DqAccumulator {
  static constexpr int WARP_BYTES = 64 / 8 * 512, BYTES = WARPGROUP_THREADS / 32 * WARP_BYTES;
  uint32_t staging;

  template <int D, int N>
  __device__ __forceinline__ void add(int padded_tile, int strip, int first, int lane, const float (&x)[N][4]) const {
    static_assert(N * 512 == WARP_BYTES);
    uint32_t at = staging + strip * WARP_BYTES;
    if (lane == 0) ptx::cp_async_bulk_wait_read();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; ++n)
      ptx::store_16(at + n * 512 + lane * 16, make_uint4(__float_as_uint(x[n][0]), __float_as_uint(x[n][1]),
                                                        __float_as_uint(x[n][2]), __float_as_uint(x[n][3])));
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::cp_reduce_async_bulk(this->at<D>(padded_tile, strip, first), at, WARP_BYTES);
  }
  __device__ __forceinline__ void acquire(int padded_tile) const {
    if (!semaphore) return;
    DqAccumulator::acquire(padded_tile);
    ptx::fence_proxy_async_all();
  }
  __device__ __forceinline__ void release(int padded_tile) const {
    if (!semaphore) return;
    if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait();
    DqAccumulator::release(padded_tile);
  }
  // Shared memory must not be freed before the last bulk additions have read it.
  __device__ __forceinline__ void end() const { ptx::cp_async_bulk_wait_read(); }
};

// Adds to dQ from registers, by atomic additions. If `semaphore` is not null, plain additions would suffice, but a
// second code path for them would need more registers.
struct AtomicDqAccumulator : DqAccumulator {
  template <int D, int N>
  __device__ __forceinline__ void add(int padded_tile, int strip, int first, int lane, const float (&x)[N][4]) const {
    float* to = at<D>(padded_tile, strip, first) + lane * 4;
#pragma unroll
    for (int n = 0; n < N; ++n) ptx::red_add_4(to + n * 128, x[n][0], x[n][1], x[n][2], x[n][3]);
  }
  __device__ __forceinline__ void end() const {}
};

template <int D>
constexpr int STAGING_BYTES = D == 64 ? BulkDqAccumulator::BYTES : 0;
template <int D>
__device__ __forceinline__ auto choose_accumulator(const DqAccumulator& sums, uint32_t staging) {
  if constexpr (STAGING_BYTES<D> > 0) return BulkDqAccumulator{sums, staging};
  else return AtomicDqAccumulator{sums};
}

// The functions that a consumer calls for each tile of queries, in the order of the calls. They pass the operands of dK
// and dQ to the dQ warpgroup, through a slot in shared memory, and start the next tile.
template <bool KEEP_DK, class Tiles, class KeyConsumer>
struct TileHandover {
  const params::Backward& p;
  const Tiles& pipeline;
  KeyConsumer& consumer;
  const int& warpgroup;
  int tile, tiles;  // the tile's number, from 0, and the number of tiles

  __device__ __forceinline__ void acquire_slot() const {
    ptx::named_barrier_sync(named_barrier(SLOT_EMPTY, tile, warpgroup), 2 * WARPGROUP_THREADS);
  }
  __device__ __forceinline__ void publish_dk_operands() const {
    if (!KEEP_DK) ptx::named_barrier_arrive(named_barrier(DK_OPERANDS_FULL, tile, warpgroup), 2 * WARPGROUP_THREADS);
  }
  __device__ __forceinline__ void publish_dq_operands() const {
    ptx::named_barrier_arrive(named_barrier(DS_FULL, tile), SM90_THREADS);
  }
  // Starts the next tile. After the last tile this function computes on stale data: if a wgmma were in flight on some
  // paths only, ptxas would serialize all wgmmas of the kernel.
  __device__ __forceinline__ void start_next() const {
    if (tile + 1 < tiles) wait(tile + 1);
    consumer.start(pipeline.stage(tile + 1));
  }
  __device__ __forceinline__ void wait(int number) const {
    pipeline.wait(number);
    if (!p.dout.mapped) ptx::fence_proxy_async();
  }
};

// What this mainloop requires in addition to BackwardTilesSm90. The numerics' KeyConsumer is the state that a consumer
// keeps in registers, and their DqConsumer is the state of the dQ warpgroup.
template <class N>
concept BackwardSm90DqWarpgroupNumerics =
    BackwardTilesSm90<N> && requires(N numerics, const params::Backward& p, const QueryTile& tile, uint32_t mbarrier,
                                     typename N::KeyConsumer keys, typename N::DqConsumer dq, void (*call)(),
                                     decltype(choose_accumulator<N::D>(DqAccumulator{}, 0)) sums,
                                     const TileHandover<CONSUMERS_KEEP_DK<N::D>, Pipeline<N::STAGES>, typename N::KeyConsumer>& handover) {
      requires N::CONSUMER_REGISTERS % 8 == 0;  // registers of a consumer's thread
      requires N::STAGING_AT <= N::SHARED_BYTES;  // start of BulkDqAccumulator's memory; used only if head_dim is 64
      // Issues the copies of a tile of queries: (tile, stage, thread, mbarrier). Called by the first thread of the dQ
      // warpgroup if the tensors have TMA tensor maps (dout.mapped), otherwise by all of its threads.
      numerics.load(tile, 0, 0, mbarrier);
      // The arrival count of the mbarriers `full` of tile/pipeline.cuh.
      N::fetching(p);
      (typename N::KeyConsumer(numerics, 0));
      // Issues the wgmmas of S^T of a tile that has arrived, or leaves them to scores() to save registers.
      keys.start(0);
      // scores(the tile's number, stage, slot, masked, handover): computes P, dS, dV, and dK if keys.dk exists. Calls
      // acquire_slot() of `handover`, writes to the slot, and calls the publish functions. Then calls start_next() as
      // soon as enough registers are free for S^T of the next tile.
      keys.scores(0, 0, 0, Masked<OUTER_KEYS>{}, handover);
      // Waits for the wgmma that the last start_next() issued.
      keys.end();
      keys.dv;
      keys.score_mod.next_head();  // score_mod: a policy of numerics/score_mod.cuh
      (typename N::DqConsumer(numerics));
      // Issues the wgmmas of dQ, or leaves them to add_dq() to save registers.
      dq.start(0);
      // add_dq(QueryTile::padded, slot of dS, sums, read): computes dQ of the tile and adds it to `sums`.
      // Calls read() after its last read of the slot.
      dq.add_dq(0, 0, sums, call);
    } && (CONSUMERS_KEEP_DK<N::D> ? requires(typename N::KeyConsumer keys) { keys.dk; } : requires(typename N::DqConsumer dq) {
      // add_keys(number of a consumer, stage of Q, slot of dS): adds dS^T Q to dK of the keys of this consumer.
      dq.add_keys(0, 0, 0);
      // Waits until the wgmmas of add_keys no longer read the stage.
      dq.added();
      dq.dk;
      // The address of GRADIENT_STAGING bytes for the epilogue of the calling warp.
      dq.gradient_staging();
    });

// The dQ warpgroup is also the pipeline's producer. It copies a query tile into the pipeline when it computes dQ of the
// tile that is AHEAD tiles earlier.
template <class Numerics, class Queries, class Tiles>
struct TileProducer {
  // When dQ of tile i is computed: with more than two stages, tile i + AHEAD replaces tile i - 1, so that the producer
  // rarely waits for consumers. With two stages it replaces tile i, after all readers have released the stage.
  static constexpr int AHEAD = Numerics::STAGES == 2 ? 2 : Numerics::STAGES - 1;

  const params::Backward& p;
  Numerics& numerics;
  const Queries& queries;
  const Tiles& pipeline;
  typename Queries::Tile next;  // the tile to copy

  __device__ __forceinline__ void fetch(int number) {
    // Opaque, so that addresses are recomputed for each tile: stored addresses would use registers that wgmmas need.
    int thread = ptx::opaque(threadIdx.x) - CONSUMER_THREADS;
    if (number < queries.count && (!p.dout.mapped || thread == 0)) {
      pipeline.wait_empty(number);
      numerics.load(next, pipeline.stage(number), thread, pipeline.full(number));
    }
    queries.advance(next);
  }
};

// The dQ warpgroup's loop and epilogue: copies query tiles, from `tile` on, computes dQ from the consumers' dS, and
// computes dK if the consumers do not.
template <class Numerics, class Queries, class Tiles>
__device__ __forceinline__ void add_dq_of_tiles(const params::Backward& p, Numerics& numerics, const Queries& queries,
                                                const Tiles& pipeline, typename Queries::Tile tile, uint32_t shared, int warp_key) {
  using T = typename Numerics::Type;
  constexpr bool KEEP_DK = CONSUMERS_KEEP_DK<Numerics::D>;
  const BackwardBlock& block = numerics.block;
  int iterations = queries.count;
  auto sums = choose_accumulator<Numerics::D>({p.dq_accum, p.dq_semaphore, block.first_key / SM90_KEYS, CONSUMER_THREADS, WARPGROUP_THREADS, DQ_WARPGROUP},
                                       shared + Numerics::STAGING_AT);
  TileProducer<Numerics, Queries, Tiles> producer{p, numerics, queries, pipeline, tile};
  auto free_slot = [&](int number) {
    if (number >= iterations) return;
#pragma unroll
    for (int g = 0; g < CONSUMERS; ++g) ptx::named_barrier_arrive(named_barrier(SLOT_EMPTY, number, g), 2 * WARPGROUP_THREADS);
  };
#pragma unroll 1
  for (int n = 0; n < producer.AHEAD; ++n) producer.fetch(n);
  free_slot(0), free_slot(1);
  typename Numerics::DqConsumer part(numerics);
  for (int i = 0; i < iterations; ++i) {
    if constexpr (!KEEP_DK) {
#pragma unroll
      for (int g = 0; g < CONSUMERS; ++g) {
        ptx::named_barrier_sync(named_barrier(DK_OPERANDS_FULL, i, g), 2 * WARPGROUP_THREADS);
        part.add_keys(g, pipeline.stage(i), i & 1);
      }
      part.added();
      pipeline.release(i);
    }
    producer.fetch(i + producer.AHEAD);
    ptx::named_barrier_sync(named_barrier(DS_FULL, i), SM90_THREADS);
    part.start(i & 1);
    sums.set_order(queries.added(tile), 1);
    sums.acquire(tile.padded);
    part.add_dq(tile.padded, i & 1, sums, [&] { free_slot(i + 2); });
    sums.release(tile.padded);
    queries.advance(tile);
  }
  sums.end();
  if constexpr (!KEEP_DK) {
#pragma unroll
    for (int g = 0; g < CONSUMERS; ++g)
      store_gradient<DK, Queries, T, GRADIENT_STAGING>(p, block, warp_key + g * CONSUMER_KEYS, part.dk[g], part.gradient_staging());
  }
}

// A consumer's loop: S, dP, P, dS and dV of its keys, and dK if registers allow it. `warpgroup` is a reference only
// to keep ptxas's schedule of the epilogue, which a value would change.
template <bool KEEP_DK, class Queries, class Tiles, class KeyConsumer>
__device__ __forceinline__ void consume_tiles(const params::Backward& p, const Queries& queries, const Tiles& pipeline,
                                              KeyConsumer& part, const int& warpgroup, const MaskedTiles<Queries::HIDDEN>& masked) {
  TileHandover<KEEP_DK, Tiles, KeyConsumer> handover{p, pipeline, part, warpgroup, 0, queries.count};
  if (handover.tiles > 0) handover.wait(0);
  part.start(0);
  int number = queries.first;  // the query tile's index in the segment (with a selection: see ListedQueries)
  for (int& i = handover.tile; i < handover.tiles; ++i) {
    part.scores(number, pipeline.stage(i), i & 1, masked.of(number, warpgroup), handover);
    pipeline.release(i);
    if (++number == queries.end) number = queries.first, part.score_mod.next_head();
  }
  part.end();
}

template <BackwardSm90DqWarpgroupNumerics Numerics, class Queries = EveryQuery>
__device__ __forceinline__ void backward_sm90_dq_warpgroup(const params::Backward& p) {
  using T = typename Numerics::Type;
  using Tiles = Pipeline<Numerics::STAGES>;
  constexpr bool KEEP_DK = CONSUMERS_KEEP_DK<Numerics::D>;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ BackwardBlock block;
  int index = backward_index<params::BACKWARD_SM90_DQ_WARPGROUP>(p);
  __shared__ MaskedTiles<Queries::HIDDEN> masked;
  __shared__ typename Tiles::Barriers barriers;
  Tiles pipeline(barriers);
  int warps = (CONSUMER_THREADS + (KEEP_DK ? 0 : WARPGROUP_THREADS)) / 32;
  prepare_keys<Queries>(p, index, pipeline, Numerics::fetching(p), warps, block, masked);
  if (block.first_key >= block.segment.key_len) return;
  Queries queries(p, block, SM90_KEYS);
  typename Queries::Tile tile = queries.start();
  Numerics numerics(p, block, shared);
  int warpgroup = ptx::uniform(threadIdx.x / WARPGROUP_THREADS);
  int warp_key = block.first_key + threadIdx.x / 32 % 4 * 16;  // computing it in the epilogues would double the spills
  if (warpgroup == CONSUMERS) {
    ptx::setmaxnreg<DQ_REGISTERS<Numerics::CONSUMER_REGISTERS>, SM90_THREADS>();
    add_dq_of_tiles(p, numerics, queries, pipeline, tile, ptx::shared_address(shared), warp_key);
  } else {
    ptx::setmaxnreg<Numerics::CONSUMER_REGISTERS, SM90_THREADS>();
    fetch_keys<KEYS_LOADED>(numerics);
    typename Numerics::KeyConsumer part(numerics, warpgroup);
    consume_tiles<KEEP_DK>(p, queries, pipeline, part, warpgroup, masked);
    int warp = threadIdx.x / 32;
    warp_key += warpgroup * CONSUMER_KEYS;
    store_gradient<DV, Queries, T, GRADIENT_STAGING>(p, block, warp_key, part.dv, numerics.gradient_staging(warp));
    if constexpr (KEEP_DK)
      store_gradient<DK, Queries, T, GRADIENT_STAGING>(p, block, warp_key, part.dk, numerics.gradient_staging(warp));
  }
}

}  // namespace sage::attention
