// The backward walk on Hopper: the same as backward.cuh, with a part for each warpgroup. Two, the keys' groups, have 64
// keys each, and do scores and dV; the third, the sums' warpgroup, fetches tiles of queries and adds what the
// others made of them, dS, to dQ. Where the keys' groups have the registers they add to dK too (CONSUMERS_KEEP_DK), else the sums'
// warpgroup does. After the start nobody waits for all: groups meet at the barriers below, a tile or more apart, and
// registers go to those who need them.
#pragma once

#include <sage/attention/mainloop/backward_sm90.cuh>

namespace sage::attention {

// Registers of a thread of the sums' warpgroup, where those of the keys' groups have so many.
template <int KEYS>
constexpr int DQ_REGISTERS = (CONSUMERS + 1) * ptx::LAUNCH_REGISTERS<SM90_THREADS> - CONSUMERS * KEYS;

// Barriers; 0 is __syncthreads. Those of a tile exist for each parity of tiles, because one can be ahead by a tile.
enum NamedBarrier : int {
  SLOT_EMPTY = 1,       // for each warpgroup: the slot of what it makes of a tile is free
  DK_OPERANDS_FULL = 5,       // for each warpgroup: what dK needs is in the slot, where the sums' warpgroup adds it
  DS_FULL = 9,      // what dQ needs is in the slot, of both groups
  KEYS_LOADED = 11, // among the keys' groups
  DQ_WARPGROUP = 12,    // inside the sums' warpgroup
  WITHIN_CONSUMER = 13,       // inside each keys' warpgroup
};
__device__ __forceinline__ int named_barrier(NamedBarrier kind, int tile, int warpgroup) { return kind + (tile & 1) * CONSUMERS + warpgroup; }
__device__ __forceinline__ int named_barrier(NamedBarrier kind, int tile) { return kind + (tile & 1); }

// Whether the keys' groups have registers for dK beside dV.
template <int D>
constexpr bool CONSUMERS_KEEP_DK = D == 64;

// Adds to dQ from shared memory, 64 channels: each warp of the sums' warpgroup leaves what it adds there, and one operation adds
// it while the warp goes on. (Several a tile would wait for each other; larger heads add from registers.)
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
  __device__ __forceinline__ void release(int padded_tile) const {
    if (!semaphore) return;
    if (threadIdx.x % 32 == 0) ptx::cp_async_bulk_wait();
    DqAccumulator::release(padded_tile);
  }
  // Before the memory goes.
  __device__ __forceinline__ void end() const { ptx::cp_async_bulk_wait_read(); }
};

// Adds from registers, in one way, which is right in semaphore too: registers are short.
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

// Numerics is the block's shared memory, and has: Type, D, STAGES, SHARED_BYTES; CONSUMER_REGISTERS of a thread of the keys'
// groups; STAGING_AT, for BulkDqAccumulator at head_dim 64; load_keys() and keys_arrived(), by the keys' groups; load(tile, stage,
// thread, mbarrier), asynchronous, by the first thread of the sums' warpgroup where the tensors have maps (params: dout.mapped),
// else by all of it; fetching(params), how many threads tell of a tile's copies; and what each part keeps in its registers:
//   KeyConsumer: start(stage), S^T of a tile that has come; scores(tile's number, stage, slot, masked, free, done, ready, next),
//     from there to what the slot gets after free(): done() when what dK needs is there, ready() when what dQ needs is;
//     next() as soon as registers allow it, which starts the next tile; and dV and perhaps dK; end() at the end; dv, perhaps
//     dk.
//   DqConsumer: add_keys(warpgroup, stage, slot), dK of a warpgroup's keys where keys' groups do not add it; added(), when the tile's
//     memory is no longer read; start(slot), dQ's first product; add_dq(padded tile, slot, sums, read),
//     with read() when the slot is no longer read; perhaps dk of each warpgroup.
template <class Numerics, class Queries = EveryQuery>
__device__ __forceinline__ void backward_sm90_dq_warpgroup(const params::Backward& p) {
  using T = typename Numerics::Type;
  using Tiles = Pipeline<Numerics::STAGES>;
  constexpr bool KEEP_DK = CONSUMERS_KEEP_DK<Numerics::D>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const params::Shape& shape = p.shape;
  // In shared memory: registers are for products.
  __shared__ BackwardBlock block;
  int index = backward_index(p);
  __shared__ int masked_until[CONSUMERS];
  __shared__ typename Tiles::Barriers barriers;
  Tiles pipeline(barriers);
  int warps = (CONSUMER_THREADS + (KEEP_DK ? 0 : WARPGROUP_THREADS)) / 32;
  prepare_keys(shape, index, pipeline, Numerics::fetching(p), warps, block, masked_until);
  if (block.first_key >= block.segment.key_len) return;
  Queries queries(p, block);
  int iterations = queries.count;
  typename Queries::Tile tile = queries.start();
  Numerics numerics(p, block, shared);
  int warpgroup = ptx::uniform(threadIdx.x / WARPGROUP_THREADS);
  int warp_key = block.first_key + threadIdx.x / 32 % 4 * 16;

  if (warpgroup == CONSUMERS) {
    ptx::setmaxnreg<DQ_REGISTERS<Numerics::CONSUMER_REGISTERS>, SM90_THREADS>();
    auto sums = choose_accumulator<Numerics::D>({p.dq_accum, p.dq_semaphore, block.first_key / SM90_KEYS, CONSUMER_THREADS, WARPGROUP_THREADS, DQ_WARPGROUP},
                                         ptx::shared_address(shared) + Numerics::STAGING_AT);
    // To be fetched, AHEAD of the tile that is worked on: with more than two stages, into that of the tile before it.
    constexpr int AHEAD = Numerics::STAGES == 2 ? 2 : Numerics::STAGES - 1;
    typename Queries::Tile next = tile;
    auto fetch = [&](int number) {
      // Opaque: addresses are worked out anew for each tile. Kept, they would cost registers that the products need.
      int thread = ptx::opaque(threadIdx.x) - CONSUMER_THREADS;
      if (number < iterations && (!p.dout.mapped || thread == 0)) {
        pipeline.wait_empty(number);
        numerics.load(next, pipeline.stage(number), thread, pipeline.full(number));
      }
      queries.advance(next);
    };
    auto free_slot = [&](int number) {
      if (number >= iterations) return;
#pragma unroll
      for (int g = 0; g < CONSUMERS; ++g) ptx::named_barrier_arrive(named_barrier(SLOT_EMPTY, number, g), 2 * WARPGROUP_THREADS);
    };
#pragma unroll 1
    for (int n = 0; n < AHEAD; ++n) fetch(n);
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
      fetch(i + AHEAD);
      ptx::named_barrier_sync(named_barrier(DS_FULL, i), SM90_THREADS);
      part.start(i & 1);
      sums.set_order(Queries::added(tile), 1);
      sums.acquire(tile.padded);
      part.add_dq(tile.padded, i & 1, sums, [&] { free_slot(i + 2); });
      sums.release(tile.padded);
      queries.advance(tile);
    }
    sums.end();
    if constexpr (!KEEP_DK) {
#pragma unroll
      for (int g = 0; g < CONSUMERS; ++g)
        store_gradient<T>(p.dk, p, block, warp_key + g * CONSUMER_KEYS, part.dk[g], shape.softmax_scale);
    }
  } else {
    ptx::setmaxnreg<Numerics::CONSUMER_REGISTERS, SM90_THREADS>();
    numerics.load_keys();
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::named_barrier_sync(KEYS_LOADED, CONSUMER_THREADS);
    numerics.keys_arrived();
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(KEYS_LOADED, CONSUMER_THREADS);
    typename Numerics::KeyConsumer part(numerics, warpgroup);
    auto come = [&](int number) {
      pipeline.wait(number);
      if (!p.dout.mapped) ptx::fence_proxy_async();
    };
    if (iterations > 0) come(0);
    part.start(0);
    int number = queries.first;  // of the tile, inside the segment, or as it is masked
    for (int i = 0; i < iterations; ++i) {
      auto free = [&] { ptx::named_barrier_sync(named_barrier(SLOT_EMPTY, i, warpgroup), 2 * WARPGROUP_THREADS); };
      auto done = [&] {
        if (!KEEP_DK) ptx::named_barrier_arrive(named_barrier(DK_OPERANDS_FULL, i, warpgroup), 2 * WARPGROUP_THREADS);
      };
      auto ready = [&] { ptx::named_barrier_arrive(named_barrier(DS_FULL, i), SM90_THREADS); };
      auto next = [&] {
        // After the last tile too, on what lies there: products that are only sometimes under way cannot overlap.
        if (i + 1 < iterations) come(i + 1);
        part.start(pipeline.stage(i + 1));
      };
      part.scores(number, pipeline.stage(i), i & 1, number < masked_until[warpgroup], free, done, ready, next);
      pipeline.release(i);
      if (++number == queries.end) number = queries.first;
    }
    part.end();
    store_gradient<T>(p.dv, p, block, warp_key + warpgroup * CONSUMER_KEYS, part.dv, 1.0f);
    if constexpr (KEEP_DK) store_gradient<T>(p.dk, p, block, warp_key + warpgroup * CONSUMER_KEYS, part.dk, shape.softmax_scale);
  }
}

}  // namespace sage::attention
