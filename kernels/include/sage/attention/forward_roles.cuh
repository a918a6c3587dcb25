// The forward walk on Hopper: the same as forward.cuh, with a part for each warpgroup. Query groups keep 64 queries each;
// one more group fetches tiles of keys and values into a ring of stages. While a query group works on the softmax of a
// tile, the products of P and the values of the tile before are under way.
#pragma once

#include <sage/attention/forward.cuh>
#include <sage/attention/panels.cuh>

namespace sage::attention {

template <int D>
struct ForwardRoles {
  static constexpr int GROUPS = D == 64 ? 3 : 2;  // of queries
  static constexpr int QUERIES = 64 * GROUPS;
  static constexpr int STAGES = D == 64 ? 4 : 3;
  static constexpr int THREADS = (GROUPS + 1) * GROUP_THREADS;
  static constexpr int QUERIES_REGISTERS = D == 64 ? 152 : 224, FETCH_REGISTERS = 56;
};

// A place in the ring, and how often the ring has been gone round.
template <int STAGES>
struct RingPlace {
  int stage = 0, round = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, ++round;
  }
};

// Numerics is the block's shared memory, and has: Type, D, SHARED_BYTES; ARRIVALS, how many threads tell of a tile's
// copies; load_queries(group, thread); load(tile, stage, thread, landing), asynchronous; and Part, what a query group
// keeps in its registers: start(stage), S of a tile that has come; softmax<HIDES, PENDING>(tile, stage, segment, first
// query), from there to P, with PENDING later products under way; add(stage), P V under way; added(), the end of that,
// when `softmax` of the next tile has been; take(), that tile's P for the next add. rows, the softmax of its queries.
template <class Numerics>
__device__ __forceinline__ void forward_with_roles(const params::Forward& p) {
  using T = typename Numerics::Type;
  using Roles = ForwardRoles<Numerics::D>;
  using Ring = RingPlace<Roles::STAGES>;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ ForwardBlock block;
  __shared__ uint64_t full_barriers[Roles::STAGES], empty_barriers[Roles::STAGES];
  uint32_t full = ptx::shared_address(full_barriers), empty = ptx::shared_address(empty_barriers);
  if (threadIdx.x == 0) {
    block = ForwardBlock(p.shape, blockIdx.x, Roles::QUERIES);
    for (int i = 0; i < Roles::STAGES; ++i) {
      ptx::landing_init(full + i * 8, Numerics::ARRIVALS);
      ptx::landing_init(empty + i * 8, Roles::GROUPS * 4);  // a lane of each warp
    }
  }
  __syncthreads();
  const Segment& segment = block.segment;
  if (block.first >= segment.query_len) return;
  Numerics numerics(p, block, shared);
  auto tiles_of = [&](int first, int queries) {
    int last = min(first + queries, segment.query_len) - 1;
    return first <= last ? (segment.visible_keys(last) + TILE - 1) / TILE : 0;
  };
  int all_tiles = tiles_of(block.first, Roles::QUERIES);
  int group = __shfl_sync(~0u, threadIdx.x / GROUP_THREADS, 0);
  Ring ring;

  if (group == Roles::GROUPS) {
    ptx::set_registers<Roles::FETCH_REGISTERS, Roles::THREADS>();
    for (int tile = 0; tile < all_tiles; ++tile) {
      if (ring.round > 0) ptx::landing_wait(empty + ring.stage * 8, ring.round - 1);
      numerics.load(tile, ring.stage, ptx::opaque(threadIdx.x) - Roles::GROUPS * GROUP_THREADS, full + ring.stage * 8);
      ring.advance();
    }
    ptx::copy_wait_all();
  } else {
    ptx::set_registers<Roles::QUERIES_REGISTERS, Roles::THREADS>();
    int first = block.first + group * 64;
    numerics.load_queries(group, threadIdx.x % GROUP_THREADS);
    ptx::copy_wait_all();
    ptx::wgmma_publish();
    ptx::barrier(1 + group, GROUP_THREADS);
    typename Numerics::Part part(numerics, group);
    int tiles = tiles_of(first, 64), whole_tiles = segment.visible_keys(first) / TILE;
    auto come = [&](const Ring& at) {
      ptx::landing_wait(full + at.stage * 8, at.round);
      if (Numerics::ARRIVALS == GROUP_THREADS) ptx::wgmma_publish();
    };
    auto release = [&](const Ring& at) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::landing_arrive(empty + at.stage * 8);
    };
    if (tiles > 0) {
      come(ring);
      part.start(ring.stage);
      part.template softmax<true, 0>(0, ring.stage, segment, first);
      part.take();
      for (int tile = 1; tile < tiles; ++tile) {
        Ring past = ring;
        ring.advance();
        come(ring);
        part.start(ring.stage);
        part.add(past.stage);
        if (__builtin_expect(tile < whole_tiles, true))
          part.template softmax<false, Numerics::ADDS>(tile, ring.stage, segment, first);
        else
          part.template softmax<true, Numerics::ADDS>(tile, ring.stage, segment, first);
        part.added();
        release(past);
        part.take();
      }
      part.add(ring.stage);
      part.added();
      release(ring);
      ring.advance();
    }
    // Tiles that only later queries of the block see.
    for (int tile = tiles; tile < all_tiles; ++tile) {
      ptx::landing_wait(full + ring.stage * 8, ring.round);
      release(ring);
      ring.advance();
    }
    store<T>(p, block, part.rows);
  }
}

}  // namespace sage::attention
