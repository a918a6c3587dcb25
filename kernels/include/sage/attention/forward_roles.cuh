// The forward walk on Hopper: the same as forward.cuh, with a part for each warpgroup. Query groups keep 64 queries each;
// one more group fetches tiles of keys and values into a ring of stages. While a query group works on the softmax of a
// tile, the products of P and the values of the tile before are under way.
#pragma once

#include <sage/attention/forward.cuh>
#include <sage/attention/panels.cuh>
#include <sage/attention/ring.cuh>

namespace sage::attention {

template <int D>
struct ForwardRoles {
  static constexpr int GROUPS = D == 64 ? 3 : 2;  // of queries
  static constexpr int QUERIES = 64 * GROUPS;
  static constexpr int STAGES = D == 64 ? 4 : 3;
  static constexpr int THREADS = (GROUPS + 1) * GROUP_THREADS;
  static constexpr int QUERIES_REGISTERS = D == 64 ? 152 : 224, FETCH_REGISTERS = 56;
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
  using Tiles = Ring<Roles::STAGES>;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ ForwardBlock block;
  __shared__ typename Tiles::Barriers barriers;
  Tiles ring(barriers);
  if (threadIdx.x == 0) {
    block = ForwardBlock(p.shape, blockIdx.x, Roles::QUERIES);
    ring.prepare(Numerics::ARRIVALS, Roles::GROUPS * 4);
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
  int group = ptx::uniform(threadIdx.x / GROUP_THREADS);

  if (group == Roles::GROUPS) {
    ptx::set_registers<Roles::FETCH_REGISTERS, Roles::THREADS>();
    for (int tile = 0; tile < all_tiles; ++tile) {
      ring.wait_empty(tile);
      numerics.load(tile, ring.stage(tile), ptx::opaque(threadIdx.x) - Roles::GROUPS * GROUP_THREADS, ring.full(tile));
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
    auto start = [&](int tile) {
      ring.wait(tile);
      if (Numerics::ARRIVALS == GROUP_THREADS) ptx::wgmma_publish();
      part.start(ring.stage(tile));
    };
    if (tiles > 0) {
      start(0);
      part.template softmax<true, 0>(0, 0, segment, first);
      part.take();
      for (int tile = 1; tile < tiles; ++tile) {
        start(tile);
        part.add(ring.stage(tile - 1));
        if (__builtin_expect(tile < whole_tiles, true))
          part.template softmax<false, Numerics::ADDS>(tile, ring.stage(tile), segment, first);
        else
          part.template softmax<true, Numerics::ADDS>(tile, ring.stage(tile), segment, first);
        part.added();
        ring.release(tile - 1);
        part.take();
      }
      part.add(ring.stage(tiles - 1));
      part.added();
      ring.release(tiles - 1);
    }
    // Tiles that only later queries of the block see.
    for (int tile = tiles; tile < all_tiles; ++tile) {
      ring.wait(tile);
      ring.release(tile);
    }
    store<T>(p, block, part.rows);
  }
}

}  // namespace sage::attention
