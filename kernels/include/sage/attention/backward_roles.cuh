// The backward walk on Hopper: the same as backward.cuh, with a part for each warpgroup. Two, the keys' groups, have 64
// keys each, and do nothing but scores and dV; the third, the sums' group, fetches tiles of queries and adds what the
// others made of them, dS, to dQ. Where the keys' groups have the registers they add to dK too (KEYS_ADD), else the sums'
// group does. Nobody waits for all: groups meet two at a time, at the barriers below, and registers go to those who need
// them.
#pragma once

#include <limits.h>
#include <sage/attention/backward.cuh>
#include <sage/ptx/wgmma.cuh>

namespace sage::attention {

constexpr int ROLES_THREADS = 384;
constexpr int ROLES_KEYS = 128;   // of a block
constexpr int GROUP_KEYS = 64;    // of a keys' group
constexpr int GROUPS = ROLES_KEYS / GROUP_KEYS;
constexpr int GROUP_THREADS = 128;
constexpr int KEYS_THREADS = GROUPS * GROUP_THREADS;

// Barriers; 0 is __syncthreads. Those of a tile exist for each parity of tiles, because one can be ahead by a tile.
enum Meeting : int {
  READY = 1,       // a tile has come, and its slot of dS is free: for each group
  DONE = 5,        // a group's part of dS is in the slot: for each group
  FREE = 9,        // both groups are done with the tile
  KEYS_CAME = 11,  // among the keys' groups
  ADDERS = 12,     // inside the sums' group
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

// Numerics is the block's shared memory, and has: Type, D, SHARED_BYTES; load_keys() and keys_arrived(), by the keys'
// groups; prepare_landing(), by one thread, load(tile, stage, thread), asynchronous, and wait_for(number), by the sums'
// group; and what each part keeps in its registers:
//   KeysPart: start(stage), S^T of a tile that has come; scores(tile's number, stage, hides, done, next), from there to
//     dS^T in the slot, then done(); next() as soon as registers allow it, which starts the next tile; and dV and perhaps
//     dK; end() at the end; dv, perhaps dk.
//   SumsPart: add_keys(group, slot), dK of a group's keys, where keys' groups do not add it, and added(), when the tile's
//     memory is no longer read; add_dq(padded tile, slot, sums); perhaps dk of each group.
template <class Numerics>
__device__ __forceinline__ void backward_with_roles(const params::Backward& p) {
  using T = typename Numerics::Type;
  extern __shared__ __align__(1024) unsigned char shared[];
  const params::Shape& shape = p.shape;
  // In shared memory: registers are for products.
  __shared__ BackwardBlock block;
  int index = backward_index(p);
  __shared__ int hides_until[GROUPS];
  if (threadIdx.x == 0) {
    block = BackwardBlock(shape, index, ROLES_KEYS);
    for (int g = 0; g < GROUPS; ++g) hides_until[g] = hiding_tiles(block.segment, block.first_key + g * GROUP_KEYS);
  }
  __syncthreads();
  if (block.first_key >= block.segment.key_len) return;
  int first_tile, iterations = count_tiles(shape, block, first_tile);
  QueryTile tile(shape, block, first_tile);
  Numerics numerics(p, block, shared);
  if (threadIdx.x == KEYS_THREADS) numerics.prepare_landing();
  // What the compiler knows to be the same for a whole warp needs no registers.
  int group = __shfl_sync(~0u, threadIdx.x / GROUP_THREADS, 0);
  int warp_key = block.first_key + threadIdx.x / 32 % 4 * 16;

  if (group == GROUPS) {
    ptx::set_registers<KEYS_ADD<Numerics::D> ? 120 : 184, ROLES_THREADS>();
    DqSums sums{p.dq_sums, p.turns, block.first_key / ROLES_KEYS, KEYS_THREADS, GROUP_THREADS, ADDERS};
    QueryTile next = tile;  // to be fetched
    auto fetch = [&](int number) {
      // Opaque: addresses are worked out anew for each tile. Kept, they would cost registers that the products need.
      if (number < iterations) numerics.load(next, number & 1, ptx::opaque(threadIdx.x) - KEYS_THREADS);
      ptx::copy_commit();
      next.advance(shape, block, first_tile);
    };
    fetch(0);
    typename Numerics::SumsPart part(numerics);
    __syncthreads();  // the keys
    int past = 0;
    for (int i = 0; i <= iterations; ++i) {
      if (i < iterations) {
        numerics.wait_for(i);
        ptx::wgmma_publish();
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) ptx::arrive(meeting(READY, i, g), 2 * GROUP_THREADS);
      }
      int buffer = i - 1 & 1;
      if (i > 0) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          ptx::barrier(meeting(DONE, i - 1, g), 2 * GROUP_THREADS);
          if constexpr (!KEYS_ADD<Numerics::D>) part.add_keys(g, buffer);
        }
        if constexpr (!KEYS_ADD<Numerics::D>) part.added();
        ptx::barrier(meeting(FREE, i - 1), ROLES_THREADS);
      }
      fetch(i + 1);
      if (i > 0) {
        sums.wait(past);
        part.add_dq(past, buffer, sums);
        sums.pass_on(past);
      }
      past = tile.padded;
      tile.advance(shape, block, first_tile);
    }
    if constexpr (!KEYS_ADD<Numerics::D>)
#pragma unroll
      for (int g = 0; g < GROUPS; ++g)
      store_gradient<T>(p.dk, p, block, warp_key + g * GROUP_KEYS, part.dk[g], shape.softmax_scale);
  } else {
    ptx::set_registers<KEYS_ADD<Numerics::D> ? 192 : 160, ROLES_THREADS>();
    numerics.load_keys();
    ptx::copy_commit();
    ptx::copy_wait<0>();
    ptx::barrier(KEYS_CAME, KEYS_THREADS);
    numerics.keys_arrived();
    ptx::wgmma_publish();
    __syncthreads();
    typename Numerics::KeysPart part(numerics, group);
    if (iterations > 0) ptx::barrier(meeting(READY, 0, group), 2 * GROUP_THREADS);
    part.start(0);
    int number = first_tile;  // of the tile, inside the segment
    for (int i = 0; i < iterations; ++i) {
      auto done = [&] {
        ptx::wgmma_publish();
        ptx::arrive(meeting(DONE, i, group), 2 * GROUP_THREADS);
      };
      auto next = [&] {
        // After the last tile too, on what lies there: products that are only sometimes under way cannot overlap.
        if (i + 1 < iterations) ptx::barrier(meeting(READY, i + 1, group), 2 * GROUP_THREADS);
        part.start(i + 1 & 1);
      };
      part.scores(number, i & 1, number < hides_until[group], done, next);
      ptx::arrive(meeting(FREE, i), ROLES_THREADS);
      if (++number == block.segment.query_tiles()) number = first_tile;
    }
    part.end();
    store_gradient<T>(p.dv, p, block, warp_key + group * GROUP_KEYS, part.dv, 1.0f);
    if constexpr (KEYS_ADD<Numerics::D>)
      store_gradient<T>(p.dk, p, block, warp_key + group * GROUP_KEYS, part.dk, shape.softmax_scale);
  }
}

// A tile of queries or the block's keys, ROWS rows of D channels in 16 bit, as products read them: panels of 64
// channels, what one swizzled line holds.
template <int ROWS, int D, int THREADS, class T>
__device__ __forceinline__ void copy_panels(uint32_t to, Rows<T> rows, int first, int thread) {
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel) {
    copy_rows<ROWS, 64, THREADS>(to + panel * ROWS * 128, rows, first, thread);
    rows.skip_channels(64);
  }
}

// out += A B^T for a group's 64 keys and 64 queries, both in panels: `a` starts at the group's rows. Its end is to be
// waited for.
template <class T, int D, bool ADD>
__device__ __forceinline__ void start_16(Scores& out, uint32_t a, uint32_t b) {
  if constexpr (ADD) ptx::hold(out);
  else ptx::forget(out);
  ptx::wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel) {
    uint64_t a_rows = ptx::row_descriptor<128>(a + panel * ROLES_KEYS * 128);
    uint64_t b_rows = ptx::row_descriptor<128>(b + panel * TILE * 128);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (ADD || panel > 0 || step > 0) ptx::wgmma_16<T>(out, a_rows + 2 * step, b_rows + 2 * step);
      else ptx::wgmma_16<T, false>(out, a_rows, b_rows);
    }
  }
  ptx::wgmma_commit();
}

}  // namespace sage::attention
