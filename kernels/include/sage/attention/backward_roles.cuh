// The backward walk on Hopper: the same as backward.cuh, with a part for each warpgroup. Two, the keys' groups, have 64
// keys each, and do scores and dV; the third, the sums' group, fetches tiles of queries and adds what the
// others made of them, dS, to dQ. Where the keys' groups have the registers they add to dK too (KEYS_ADD), else the sums'
// group does. After the start nobody waits for all: groups meet at the barriers below, a tile or more apart, and
// registers go to those who need them.
#pragma once

#include <limits.h>
#include <sage/attention/backward.cuh>
#include <sage/attention/panels.cuh>

namespace sage::attention {

constexpr int ROLES_THREADS = 384;
constexpr int ROLES_KEYS = 128;   // of a block
constexpr int GROUP_KEYS = 64;    // of a keys' group
constexpr int GROUPS = ROLES_KEYS / GROUP_KEYS;
constexpr int KEYS_THREADS = GROUPS * GROUP_THREADS;

// Barriers; 0 is __syncthreads. Those of a tile exist for each parity of tiles, because one can be ahead by a tile.
enum Meeting : int {
  SLOT = 1,        // for each group: the slot of dS is free
  DONE = 5,        // for each group: its part of dS is in the slot
  FREE = 9,        // both groups are done with the tile of queries, and with all they make for dQ
  KEYS_CAME = 11,  // among the keys' groups
  ADDERS = 12,     // inside the sums' group
  OWN = 13,        // inside each keys' group
  ALL = 15,        // once: the keys have come
};
__device__ __forceinline__ int meeting(Meeting kind, int tile, int group) { return kind + (tile & 1) * GROUPS + group; }
__device__ __forceinline__ int meeting(Meeting kind, int tile) { return kind + (tile & 1); }

// The first tiles of queries do not see all of GROUP_KEYS keys: how many tiles these are.
__device__ __forceinline__ int hiding_tiles(const Segment& segment, int first_key) {
  if (first_key + GROUP_KEYS > segment.key_len) return INT_MAX;
  return (segment.first_query(first_key + GROUP_KEYS - 1) + TILE - 1) / TILE;
}

// Whether the keys' groups have registers for dK beside dV.
template <int D>
constexpr bool KEYS_ADD = D == 64;

// Tiles of queries on their way: each of the two stages has a barrier in shared memory that opens when its tile has come.
struct Landing {
  uint32_t barriers;

  // By one thread. `bulk`: whether one thread also announces bulk copies.
  __device__ __forceinline__ void prepare(bool bulk) const {
    for (int stage = 0; stage < 2; ++stage) ptx::landing_init(at(stage), GROUP_THREADS + bulk);
  }
  __device__ __forceinline__ uint32_t at(int stage) const { return barriers + stage * 8; }
  // Waits for tile number `i` of the walk, for products and others.
  __device__ __forceinline__ void wait(int i) const {
    ptx::landing_wait(at(i & 1), i >> 1);
    ptx::wgmma_publish();
  }
};

// Numerics is the block's shared memory, and has: Type, D, SHARED_BYTES; load_keys() and keys_arrived(), by the keys'
// groups; load(tile, stage, thread, landing), asynchronous, by the sums' group, with bulk copies if BULK; and what each
// part keeps in its registers:
//   KeysPart: start(stage), S^T of a tile that has come; scores(tile's number, stage, hides, slot, done, next), from there
//     to dS^T, in its slot after slot(), then done(); next() as soon as registers allow it, which starts the next tile;
//     and dV and perhaps dK; end() at the end; dv, perhaps dk.
//   SumsPart: add_keys(group, slot), dK of a group's keys where keys' groups do not add it, and what dQ needs of them;
//     added(), when the tile's memory is no longer read; add_dq(padded tile, slot, sums); perhaps dk of each group.
template <class Numerics>
__device__ __forceinline__ void backward_with_roles(const params::Backward& p) {
  using T = typename Numerics::Type;
  extern __shared__ __align__(1024) unsigned char shared[];
  const params::Shape& shape = p.shape;
  // In shared memory: registers are for products.
  __shared__ BackwardBlock block;
  int index = backward_index(p);
  __shared__ int hides_until[GROUPS];
  __shared__ uint64_t landing_barriers[2];
  Landing landing{ptx::shared_address(landing_barriers)};
  if (threadIdx.x == 0) {
    landing.prepare(Numerics::BULK);
    block = BackwardBlock(shape, index, ROLES_KEYS);
    for (int g = 0; g < GROUPS; ++g) hides_until[g] = hiding_tiles(block.segment, block.first_key + g * GROUP_KEYS);
  }
  __syncthreads();
  if (block.first_key >= block.segment.key_len) return;
  int first_tile, iterations = count_tiles(shape, block, first_tile);
  QueryTile tile(shape, block, first_tile);
  Numerics numerics(p, block, shared);
  // What the compiler knows to be the same for a whole warp needs no registers.
  int group = __shfl_sync(~0u, threadIdx.x / GROUP_THREADS, 0);
  int warp_key = block.first_key + threadIdx.x / 32 % 4 * 16;

  if (group == GROUPS) {
    ptx::set_registers<KEYS_ADD<Numerics::D> ? 120 : 184, ROLES_THREADS>();
    DqSums sums{p.dq_sums, p.turns, block.first_key / ROLES_KEYS, KEYS_THREADS, GROUP_THREADS, ADDERS};
    QueryTile next = tile;  // to be fetched
    auto fetch = [&](int number) {
      // Opaque: addresses are worked out anew for each tile. Kept, they would cost registers that the products need.
      if (number < iterations)
        numerics.load(next, number & 1, ptx::opaque(threadIdx.x) - KEYS_THREADS, landing.at(number & 1));
      next.advance(shape, block, first_tile);
    };
    auto free_slot = [&](int number) {
      if (number >= iterations) return;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) ptx::arrive(meeting(SLOT, number, g), 2 * GROUP_THREADS);
    };
    fetch(0), fetch(1);
    free_slot(0), free_slot(1);
    typename Numerics::SumsPart part(numerics);
    ptx::barrier(ALL, ROLES_THREADS);
    for (int i = 0; i < iterations; ++i) {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        ptx::barrier(meeting(DONE, i, g), 2 * GROUP_THREADS);
        part.add_keys(g, i & 1);
      }
      part.added();
      ptx::barrier(meeting(FREE, i), ROLES_THREADS);
      fetch(i + 2);
      sums.wait(tile.padded);
      part.add_dq(tile.padded, i & 1, sums);
      sums.pass_on(tile.padded);
      free_slot(i + 2);
      tile.advance(shape, block, first_tile);
    }
    if constexpr (!KEYS_ADD<Numerics::D>) {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g)
        store_gradient<T>(p.dk, p, block, warp_key + g * GROUP_KEYS, part.dk[g], shape.softmax_scale);
    }
  } else {
    ptx::set_registers<KEYS_ADD<Numerics::D> ? 192 : 160, ROLES_THREADS>();
    numerics.load_keys();
    ptx::copy_commit();
    ptx::copy_wait<0>();
    ptx::barrier(KEYS_CAME, KEYS_THREADS);
    numerics.keys_arrived();
    ptx::wgmma_publish();
    ptx::barrier(ALL, ROLES_THREADS);
    typename Numerics::KeysPart part(numerics, group);
    if (iterations > 0) landing.wait(0);
    part.start(0);
    int number = first_tile;  // of the tile, inside the segment
    for (int i = 0; i < iterations; ++i) {
      auto slot = [&] { ptx::barrier(meeting(SLOT, i, group), 2 * GROUP_THREADS); };
      auto done = [&] {
        ptx::wgmma_publish();
        ptx::arrive(meeting(DONE, i, group), 2 * GROUP_THREADS);
      };
      auto next = [&] {
        // After the last tile too, on what lies there: products that are only sometimes under way cannot overlap.
        if (i + 1 < iterations) landing.wait(i + 1);
        part.start(i + 1 & 1);
      };
      part.scores(number, i & 1, number < hides_until[group], slot, done, next);
      ptx::arrive(meeting(FREE, i), ROLES_THREADS);
      if (++number == block.segment.query_tiles()) number = first_tile;
    }
    part.end();
    store_gradient<T>(p.dv, p, block, warp_key + group * GROUP_KEYS, part.dv, 1.0f);
    if constexpr (KEYS_ADD<Numerics::D>)
      store_gradient<T>(p.dk, p, block, warp_key + group * GROUP_KEYS, part.dk, shape.softmax_scale);
  }
}

}  // namespace sage::attention
