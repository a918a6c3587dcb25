// The backward walk on Hopper where dV, dK and dQ are products in 16 bit. Two consumer warpgroups have 64 keys each, whose
// dV and dK stay in registers; of the third warpgroup one warp, the producer, fetches tiles of queries, and another, the
// storer, adds dQ to its sums:
//
//   producer     Q, dO of tile i + STAGES - 1              ring of stages
//   consumers    S, dP -> P -> dV -> dS | barrier | dQ, dK  each its own keys; dQ of all 128, half of the channels each
//   storer       dQ of tile i                              shared memory -> sums, one bulk operation for each consumer
//
// The only time that consumers meet is when dS of a tile lies in shared memory, because dQ sums over all keys of the block.
// (FlashAttention-3, arXiv 2407.08608, section 3.4, has the same parts.)
#pragma once

#include <limits.h>
#include <sage/attention/backward.cuh>
#include <sage/attention/panels.cuh>
#include <sage/attention/ring.cuh>

namespace sage::attention {

constexpr int ROLES_THREADS = 384;
constexpr int ROLES_KEYS = 128;   // of a block
constexpr int GROUP_KEYS = 64;    // of a consumer warpgroup
constexpr int GROUPS = ROLES_KEYS / GROUP_KEYS;
constexpr int KEYS_THREADS = GROUPS * GROUP_THREADS;

// The first tiles of queries do not see all of GROUP_KEYS keys: how many tiles these are.
__device__ __forceinline__ int hiding_tiles(const Segment& segment, int first_key) {
  if (first_key + GROUP_KEYS > segment.key_len) return INT_MAX;
  return (segment.first_query(first_key + GROUP_KEYS - 1) + TILE - 1) / TILE;
}

// One thread prepares what all share: the ring, which so many threads and warps use, the block, and its hiding tiles.
template <class Tiles>
__device__ __forceinline__ void prepare_keys(const params::Shape& shape, int index, Tiles& ring, int arrivals, int warps,
                                             BackwardBlock& block, int (&hides_until)[GROUPS]) {
  if (threadIdx.x == 0) {
    ring.prepare(arrivals, warps);
    block = BackwardBlock(shape, index, ROLES_KEYS);
    for (int g = 0; g < GROUPS; ++g) hides_until[g] = hiding_tiles(block.segment, block.first_key + g * GROUP_KEYS);
  }
  __syncthreads();
}

// P out of its logarithms, 0 where a query does not see a key. The mask comes first, so that no branch is between the
// exponentials and what comes after: units work side by side.
__device__ __forceinline__ void take_exponentials(Scores& s, bool hides, const Segment& segment, int first_query, int first_key,
                                                  int lane) {
  if (__builtin_expect(hides, false)) mask_scores(s, segment, first_query, first_key, lane, -CUDART_INF_F);
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = ptx::exp2(s[n][e]);
}

// Registers of a thread: of the consumers, and of the producer's warpgroup.
constexpr int CONSUMER_REGISTERS = 240, PRODUCER_REGISTERS = 24;
static_assert(GROUPS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (GROUPS + 1) * ptx::START_REGISTERS<ROLES_THREADS>,
              "who asks for more waits for ever");

// Named barriers; 0 is __syncthreads.
enum ConsumerBarrier : int {
  ALL_CONSUMERS = 1,
  DQ_EMPTY = 2,  // for each consumer: its part of dQ may be written to shared memory,
  DQ_FULL = 4,   // and is there
};
constexpr int DQ_THREADS = GROUP_THREADS + 32;  // a consumer and the storer

// The storer: adds what each consumer left in `staging`, PART_BYTES a consumer, to dQ's sums. There a tile has a part for each
// consumer, with strips of 16 queries in the order of the fragments.
template <int PART_BYTES, class Queries>
__device__ __forceinline__ void store_dq(const params::Backward& p, const Queries& queries, int block_number, uint32_t staging) {
  int lane = threadIdx.x % 32;
  DqSums sums{p.dq_sums, p.turns, block_number, 0, 0, 0};
  typename Queries::Tile tile = queries.start();
  for (int g = 0; g < GROUPS; ++g) ptx::arrive(DQ_EMPTY + g, DQ_THREADS);
#pragma unroll 1
  for (int i = 0; i < queries.count; ++i) {
    int padded = sums.take_turn(Queries::added(tile), 1);
    if (p.turns && lane == 0) {
      while (ptx::load_acquire(p.turns + padded) != sums.turn) {}
      ptx::wgmma_publish();
    }
    float* to = p.dq_sums + int64_t(padded) * (GROUPS * PART_BYTES / 4);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      ptx::barrier(DQ_FULL + g, DQ_THREADS);
      if (lane == 0) ptx::bulk_add(to + g * (PART_BYTES / 4), staging + g * PART_BYTES, PART_BYTES);
    }
    if (i + 1 < queries.count) {
      if (lane == 0) ptx::bulk_wait_read<1>();
      __syncwarp();
      ptx::arrive(DQ_EMPTY, DQ_THREADS);
      if (lane == 0) ptx::bulk_wait_read<0>();
      __syncwarp();
      ptx::arrive(DQ_EMPTY + 1, DQ_THREADS);
    }
    if (p.turns && lane == 0) {
      ptx::bulk_wait();
      __threadfence();
      ptx::add_release(p.turns + padded, 1);
    }
    queries.advance(tile);
  }
  // Before the memory goes.
  if (lane == 0) ptx::bulk_wait_read<0>();
}

// Numerics is the block's shared memory, and has: Type, D, STAGES, SHARED_BYTES, DQ_AT, DQ_PART_BYTES; ARRIVALS, how many times
// the producer tells of a tile's copies; load_keys() and keys_arrived(), by the consumers; load(tile, stage, landing), by the
// producer; and Consumer, what a consumer keeps in registers: visit(tile's number, stage, slot, hides), all products of a tile;
// dv and dk.
template <class Numerics, class Queries = EveryQuery>
__device__ __forceinline__ void backward_with_consumers(const params::Backward& p) {
  using T = typename Numerics::Type;
  using Tiles = Ring<Numerics::STAGES>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const params::Shape& shape = p.shape;
  // In shared memory: registers are for products.
  __shared__ BackwardBlock block;
  int index = backward_index(p);
  __shared__ int hides_until[GROUPS];
  __shared__ typename Tiles::Barriers barriers;
  Tiles ring(barriers);
  prepare_keys(shape, index, ring, Numerics::ARRIVALS, KEYS_THREADS / 32, block, hides_until);
  if (block.first_key >= block.segment.key_len) return;
  Queries queries(p, block);
  Numerics numerics(p, block, shared);
  int group = ptx::uniform(threadIdx.x / GROUP_THREADS);

  if (group == GROUPS) {
    ptx::set_registers<PRODUCER_REGISTERS, ROLES_THREADS>();
    int warp = ptx::uniform(threadIdx.x / 32 % 4);
    if (warp == 0) {
      typename Queries::Tile tile = queries.start();
#pragma unroll 1
      for (int i = 0; i < queries.count; ++i) {
        ring.wait_empty(i);
        numerics.load(tile, ring.stage(i), ring.full(i));
        queries.advance(tile);
      }
    } else if (warp == 1) {
      store_dq<Numerics::DQ_PART_BYTES>(p, queries, block.first_key / ROLES_KEYS, ptx::shared_address(shared) + Numerics::DQ_AT);
    }
  } else {
    ptx::set_registers<CONSUMER_REGISTERS, ROLES_THREADS>();
    numerics.load_keys();
    ptx::copy_commit();
    ptx::copy_wait<0>();
    ptx::barrier(ALL_CONSUMERS, KEYS_THREADS);
    numerics.keys_arrived();
    ptx::wgmma_publish();
    ptx::barrier(ALL_CONSUMERS, KEYS_THREADS);
    int iterations = queries.count;
    typename Numerics::Consumer consumer(numerics, group);
    int number = queries.first;  // of the tile, inside the segment, or as it is masked
#pragma unroll 1
    for (int i = 0; i < iterations; ++i) {
      ring.wait(i);
      consumer.visit(number, ring.stage(i), i & 1, number < hides_until[group]);
      ring.release(i);
      if (++number == queries.end) number = queries.first;
    }
    int warp_key = block.first_key + group * GROUP_KEYS + threadIdx.x / 32 % 4 * 16;
    store_gradient<T>(p.dv, p, block, warp_key, consumer.dv, 1.0f);
    store_gradient<T>(p.dk, p, block, warp_key, consumer.dk, shape.softmax_scale);
  }
}

}  // namespace sage::attention
