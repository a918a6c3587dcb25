// The forward walk on Hopper: the same as forward.cuh, with a part for each warpgroup. Query groups keep 64 queries each;
// one more group fetches keys and values into a ring of stages, TILES tiles a step.
#pragma once

#include <sage/attention/forward.cuh>
#include <sage/attention/panels.cuh>
#include <sage/attention/ring.cuh>

namespace sage::attention {

template <int D, int TILES, int REGISTERS_TO_FETCH>
struct ForwardRoles {
  static constexpr int GROUPS = D == 64 ? 3 : 2;  // of queries
  static constexpr int QUERIES = 64 * GROUPS, KEYS = TILE * TILES;
  static constexpr int STAGES = D == 64 ? 4 : 3;
  static constexpr int THREADS = (GROUPS + 1) * GROUP_THREADS;
  // Groups share what the block starts with; more than that none would ever get.
  static constexpr int FETCH_REGISTERS = REGISTERS_TO_FETCH, ALL_REGISTERS = ptx::START_REGISTERS<THREADS> * (GROUPS + 1);
  static constexpr int QUERIES_REGISTERS = (ALL_REGISTERS - FETCH_REGISTERS) / GROUPS / 8 * 8;
};

// Numerics is the block's shared memory, and has: Type, D, Roles, SHARED_BYTES; ARRIVALS, how many times threads tell of a
// step's copies; load_queries(group, thread); load(step, stage, thread, landing), asynchronous; and Part, what a query
// group keeps in its registers: start(stage), S of a step whose keys have come; softmax<HIDES, PENDING>(step, stage,
// segment, first query), from there to P, with PENDING later products under way; take(), that P for the next add;
// add(stage), P V under way; added<PENDING>(), the end of that. rows, the softmax of its queries.
//
// VALUES_FIRST says in which order the products of a turn are asked for. Values last: they are under way while the group
// works on the next softmax. Values first: they are waited for while the next S is under way; the other groups' softmax
// hides them instead, and no registers hold both S and what they add.
template <class Numerics>
__device__ __forceinline__ void forward_with_roles(const params::Forward& p) {
  using T = typename Numerics::Type;
  using Roles = typename Numerics::Roles;
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
  auto steps_of = [&](int keys) { return (keys + Roles::KEYS - 1) / Roles::KEYS; };
  auto steps_of_queries = [&](int first, int queries) {
    int last = min(first + queries, segment.query_len) - 1;
    return first <= last ? steps_of(segment.visible_keys(last)) : 0;
  };
  int all_steps = steps_of_queries(block.first, Roles::QUERIES);
  int group = ptx::uniform(threadIdx.x / GROUP_THREADS);

  if (group == Roles::GROUPS) {
    ptx::set_registers<Roles::FETCH_REGISTERS, Roles::THREADS>();
    for (int step = 0; step < all_steps; ++step) {
      ring.wait_empty(step);
      numerics.load(step, ring.stage(step), ptx::opaque(threadIdx.x) - Roles::GROUPS * GROUP_THREADS, ring.full(step));
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
    int steps = steps_of_queries(first, 64), whole_steps = segment.visible_keys(first) / Roles::KEYS;
    auto start = [&](int step) {
      ring.wait(step);
      if (Numerics::ARRIVALS == GROUP_THREADS) ptx::wgmma_publish();
      part.start(ring.stage(step));
    };
    constexpr bool VALUES_FIRST = Numerics::VALUES_FIRST;
    if (steps > 0) {
      start(0);
      part.template softmax<true, 0>(0, 0, segment, first);
      part.take();
      for (int step = 1; step < steps; ++step) {
        if constexpr (VALUES_FIRST) {
          part.add(ring.stage(step - 1));
          start(step);
          part.template added<1>();
          ring.release(step - 1);
        } else {
          start(step);
          part.add(ring.stage(step - 1));
        }
        constexpr int PENDING = VALUES_FIRST ? 0 : 1;
        if (__builtin_expect(step < whole_steps, true))
          part.template softmax<false, PENDING>(step, ring.stage(step), segment, first);
        else
          part.template softmax<true, PENDING>(step, ring.stage(step), segment, first);
        if constexpr (!VALUES_FIRST) {
          part.template added<0>();
          ring.release(step - 1);
        }
        part.take();
      }
      part.add(ring.stage(steps - 1));
      part.template added<0>();
      ring.release(steps - 1);
    }
    // Steps that only later queries of the block see.
    for (int step = steps; step < all_steps; ++step) {
      ring.wait(step);
      ring.release(step);
    }
    store<T>(p, block, part.rows);
  }
}

}  // namespace sage::attention
