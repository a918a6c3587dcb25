// The backward walk on Hopper: the same as backward.cuh, with a part for each warpgroup. Two, the keys' groups, have 64
// keys each, and do scores and dV; the third, the sums' group, fetches tiles of queries and adds what the
// others made of them, dS, to dQ. Where the keys' groups have the registers they add to dK too (KEYS_ADD), else the sums'
// group does. After the start nobody waits for all: groups meet at the barriers below, a tile or more apart, and
// registers go to those who need them.
#pragma once

#include <sage/attention/backward_consumers.cuh>

namespace sage::attention {

// Registers of a thread of the sums' group, where those of the keys' groups have so many.
template <int KEYS>
constexpr int SUMS_REGISTERS = (GROUPS + 1) * ptx::START_REGISTERS<ROLES_THREADS> - GROUPS * KEYS;

// Barriers; 0 is __syncthreads. Those of a tile exist for each parity of tiles, because one can be ahead by a tile.
enum Meeting : int {
  SLOT = 1,       // for each group: the slot of what it makes of a tile is free
  DONE = 5,       // for each group: what dK needs is in the slot, where the sums' group adds it
  READY = 9,      // what dQ needs is in the slot, of both groups
  KEYS_CAME = 11, // among the keys' groups
  ADDERS = 12,    // inside the sums' group
  OWN = 13,       // inside each keys' group
};
__device__ __forceinline__ int meeting(Meeting kind, int tile, int group) { return kind + (tile & 1) * GROUPS + group; }
__device__ __forceinline__ int meeting(Meeting kind, int tile) { return kind + (tile & 1); }

// Whether the keys' groups have registers for dK beside dV.
template <int D>
constexpr bool KEYS_ADD = D == 64;

// Adds to dQ from shared memory, 64 channels: each warp of the sums' group leaves what it adds there, and one operation adds
// it while the warp goes on. (Several a tile would wait for each other; larger heads add from registers.)
struct StagedDqSums : DqSums {
  static constexpr int WARP_BYTES = 64 / 8 * 512, BYTES = GROUP_THREADS / 32 * WARP_BYTES;
  uint32_t staging;

  template <int D, int N>
  __device__ __forceinline__ void add(int padded_tile, int strip, int first, int lane, const float (&x)[N][4]) const {
    static_assert(N * 512 == WARP_BYTES);
    uint32_t at = staging + strip * WARP_BYTES;
    if (lane == 0) ptx::bulk_wait_read();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; ++n)
      ptx::store_16(at + n * 512 + lane * 16, make_uint4(__float_as_uint(x[n][0]), __float_as_uint(x[n][1]),
                                                        __float_as_uint(x[n][2]), __float_as_uint(x[n][3])));
    ptx::wgmma_publish();
    __syncwarp();
    if (lane == 0) ptx::bulk_add(this->at<D>(padded_tile, strip, first), at, WARP_BYTES);
  }
  __device__ __forceinline__ void pass_on(int padded_tile) const {
    if (!turns) return;
    if (threadIdx.x % 32 == 0) ptx::bulk_wait();
    DqSums::pass_on(padded_tile);
  }
  // Before the memory goes.
  __device__ __forceinline__ void end() const { ptx::bulk_wait_read(); }
};

// Adds from registers, in one way, which is right in turns too: registers are short.
struct DirectDqSums : DqSums {
  template <int D, int N>
  __device__ __forceinline__ void add(int padded_tile, int strip, int first, int lane, const float (&x)[N][4]) const {
    float* to = at<D>(padded_tile, strip, first) + lane * 4;
#pragma unroll
    for (int n = 0; n < N; ++n) ptx::add_global(to + n * 128, x[n][0], x[n][1], x[n][2], x[n][3]);
  }
  __device__ __forceinline__ void end() const {}
};

template <int D>
constexpr int STAGING_BYTES = D == 64 ? StagedDqSums::BYTES : 0;
template <int D>
__device__ __forceinline__ auto choose_sums(const DqSums& sums, uint32_t staging) {
  if constexpr (STAGING_BYTES<D> > 0) return StagedDqSums{sums, staging};
  else return DirectDqSums{sums};
}

// Numerics is the block's shared memory, and has: Type, D, STAGES, SHARED_BYTES; KEYS_REGISTERS of a thread of the keys'
// groups; STAGING_AT, for StagedDqSums at head_dim 64; load_keys() and keys_arrived(), by the keys' groups; load(tile, stage,
// thread, landing), asynchronous, by the first thread of the sums' group where the tensors have maps (params: dout.mapped),
// else by all of it; fetching(params), how many threads tell of a tile's copies; and what each part keeps in its registers:
//   KeysPart: start(stage), S^T of a tile that has come; scores(tile's number, stage, slot, hides, free, done, ready, next),
//     from there to what the slot gets after free(): done() when what dK needs is there, ready() when what dQ needs is;
//     next() as soon as registers allow it, which starts the next tile; and dV and perhaps dK; end() at the end; dv, perhaps
//     dk.
//   SumsPart: add_keys(group, stage, slot), dK of a group's keys where keys' groups do not add it; added(), when the tile's
//     memory is no longer read; start(slot), dQ's first product; add_dq(padded tile, slot, sums, read),
//     with read() when the slot is no longer read; perhaps dk of each group.
template <class Numerics, class Queries = EveryQuery>
__device__ __forceinline__ void backward_with_roles(const params::Backward& p) {
  using T = typename Numerics::Type;
  using Tiles = Ring<Numerics::STAGES>;
  constexpr bool ADD = KEYS_ADD<Numerics::D>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const params::Shape& shape = p.shape;
  // In shared memory: registers are for products.
  __shared__ BackwardBlock block;
  int index = backward_index(p);
  __shared__ int hides_until[GROUPS];
  __shared__ typename Tiles::Barriers barriers;
  Tiles ring(barriers);
  int warps = (KEYS_THREADS + (ADD ? 0 : GROUP_THREADS)) / 32;
  prepare_keys(shape, index, ring, Numerics::fetching(p), warps, block, hides_until);
  if (block.first_key >= block.segment.key_len) return;
  Queries queries(p, block);
  int iterations = queries.count;
  typename Queries::Tile tile = queries.start();
  Numerics numerics(p, block, shared);
  int group = ptx::uniform(threadIdx.x / GROUP_THREADS);
  int warp_key = block.first_key + threadIdx.x / 32 % 4 * 16;

  if (group == GROUPS) {
    ptx::set_registers<SUMS_REGISTERS<Numerics::KEYS_REGISTERS>, ROLES_THREADS>();
    auto sums = choose_sums<Numerics::D>({p.dq_sums, p.turns, block.first_key / ROLES_KEYS, KEYS_THREADS, GROUP_THREADS, ADDERS},
                                         ptx::shared_address(shared) + Numerics::STAGING_AT);
    // To be fetched, AHEAD of the tile that is worked on: with more than two stages, into that of the tile before it.
    constexpr int AHEAD = Numerics::STAGES == 2 ? 2 : Numerics::STAGES - 1;
    typename Queries::Tile next = tile;
    auto fetch = [&](int number) {
      // Opaque: addresses are worked out anew for each tile. Kept, they would cost registers that the products need.
      int thread = ptx::opaque(threadIdx.x) - KEYS_THREADS;
      if (number < iterations && (!p.dout.mapped || thread == 0)) {
        ring.wait_empty(number);
        numerics.load(next, ring.stage(number), thread, ring.full(number));
      }
      queries.advance(next);
    };
    auto free_slot = [&](int number) {
      if (number >= iterations) return;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) ptx::arrive(meeting(SLOT, number, g), 2 * GROUP_THREADS);
    };
#pragma unroll 1
    for (int n = 0; n < AHEAD; ++n) fetch(n);
    free_slot(0), free_slot(1);
    typename Numerics::SumsPart part(numerics);
    for (int i = 0; i < iterations; ++i) {
      if constexpr (!ADD) {
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          ptx::barrier(meeting(DONE, i, g), 2 * GROUP_THREADS);
          part.add_keys(g, ring.stage(i), i & 1);
        }
        part.added();
        ring.release(i);
      }
      fetch(i + AHEAD);
      ptx::barrier(meeting(READY, i), ROLES_THREADS);
      part.start(i & 1);
      sums.take_turn(Queries::added(tile), 1);
      sums.wait(tile.padded);
      part.add_dq(tile.padded, i & 1, sums, [&] { free_slot(i + 2); });
      sums.pass_on(tile.padded);
      queries.advance(tile);
    }
    sums.end();
    if constexpr (!ADD) {
#pragma unroll
      for (int g = 0; g < GROUPS; ++g)
        store_gradient<T>(p.dk, p, block, warp_key + g * GROUP_KEYS, part.dk[g], shape.softmax_scale);
    }
  } else {
    ptx::set_registers<Numerics::KEYS_REGISTERS, ROLES_THREADS>();
    numerics.load_keys();
    ptx::copy_commit();
    ptx::copy_wait<0>();
    ptx::barrier(KEYS_CAME, KEYS_THREADS);
    numerics.keys_arrived();
    ptx::wgmma_publish();
    ptx::barrier(KEYS_CAME, KEYS_THREADS);
    typename Numerics::KeysPart part(numerics, group);
    auto come = [&](int number) {
      ring.wait(number);
      if (!p.dout.mapped) ptx::wgmma_publish();
    };
    if (iterations > 0) come(0);
    part.start(0);
    int number = queries.first;  // of the tile, inside the segment, or as it is masked
    for (int i = 0; i < iterations; ++i) {
      auto free = [&] { ptx::barrier(meeting(SLOT, i, group), 2 * GROUP_THREADS); };
      auto done = [&] {
        if (!ADD) ptx::arrive(meeting(DONE, i, group), 2 * GROUP_THREADS);
      };
      auto ready = [&] { ptx::arrive(meeting(READY, i), ROLES_THREADS); };
      auto next = [&] {
        // After the last tile too, on what lies there: products that are only sometimes under way cannot overlap.
        if (i + 1 < iterations) come(i + 1);
        part.start(ring.stage(i + 1));
      };
      part.scores(number, ring.stage(i), i & 1, number < hides_until[group], free, done, ready, next);
      ring.release(i);
      if (++number == queries.end) number = queries.first;
    }
    part.end();
    store_gradient<T>(p.dv, p, block, warp_key + group * GROUP_KEYS, part.dv, 1.0f);
    if constexpr (ADD) store_gradient<T>(p.dk, p, block, warp_key + group * GROUP_KEYS, part.dk, shape.softmax_scale);
  }
}

}  // namespace sage::attention
