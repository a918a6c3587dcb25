// The forward walk on Hopper: the same as forward.cuh, with a part for each warpgroup. Query groups keep 64 queries each;
// one more group fetches keys and values into a ring of stages, TILES tiles a step. There is a block for each
// multiprocessor, which takes one piece of work after the other: keys of the next come while the last is being written.
#pragma once

#include <sage/attention/forward.cuh>
#include <sage/attention/panels.cuh>
#include <sage/attention/ring.cuh>

namespace sage::attention {

// Groups of queries where nothing else decides: what the registers hold.
template <int D>
constexpr int USUAL_GROUPS = D == 64 ? 3 : 2;

template <int D, int TILES_, int REGISTERS_TO_FETCH, int GROUPS_>
struct ForwardRoles {
  static constexpr int GROUPS = GROUPS_, TILES = TILES_;  // of queries; of keys a step
  static constexpr int QUERIES = 64 * GROUPS, KEYS = TILE * TILES;
  static constexpr int STAGES = D == 64 ? 4 : 3;
  static constexpr int THREADS = (GROUPS + 1) * GROUP_THREADS;
  // Groups share what the block starts with; more than that none would ever get.
  static constexpr int FETCH_REGISTERS = REGISTERS_TO_FETCH, ALL_REGISTERS = ptx::START_REGISTERS<THREADS> * (GROUPS + 1);
  static constexpr int QUERIES_REGISTERS = (ALL_REGISTERS - FETCH_REGISTERS) / GROUPS / 8 * 8;
};

// The next piece of work, head -1 after the last: at first that of the block's index, then the one that nobody has taken.
template <class Block, int QUERIES>
__device__ __forceinline__ Block next_block(const params::Forward& p, bool first) {
  const params::Shape& shape = p.shape;
  int all = (shape.query_len + QUERIES - 1) / QUERIES * shape.query_heads * shape.segment_count;
  auto take = [&] { return int(gridDim.x) + atomicAdd(p.tickets, 1); };
  for (int index = first ? blockIdx.x : take(); index < all; index = take()) {
    Block block(p, index, QUERIES);
    if (block.first < block.end) return block;
  }
  Block none;
  none.head = -1;
  return none;
}

// Numerics is a block's shared memory, and has: Type, D, Roles, SHARED_BYTES; FETCH_THREADS, who fetches; ORDINARY_COPIES,
// whether not by bulk copies; QUERY_ARRIVALS and STEP_ARRIVALS, how many times they tell of copies; load_queries(slot,
// thread, landing) and load(step, stage, thread, landing), asynchronous; and Part, what a query group keeps in its
// registers: start(stage), S of a step whose keys have come; softmax<HIDES, PENDING>(step, stage, segment, first query),
// from there to P, with PENDING later products under way; add(stage), P V under way; added<PENDING>(), the end of that.
// rows, the softmax of its queries.
//
// VALUES_FIRST says in which order a step's products are asked for. Values first: they are waited for while the next S is
// under way; the other groups' softmax hides them, and no registers hold both S and what is added. Values last: they are
// under way while the group works on the next softmax, and take() gives P to the next add when they are done.
template <class Numerics, class Block = EveryKey>
__device__ __forceinline__ void forward_with_roles(const params::Forward& p) {
  using T = typename Numerics::Type;
  using Roles = typename Numerics::Roles;
  using Steps = Ring<Roles::STAGES>;
  using Blocks = Ring<2>;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Block blocks[2];  // this one, and the next, whose queries come meanwhile
  __shared__ typename Steps::Barriers step_barriers;
  __shared__ typename Blocks::Barriers block_barriers;
  Steps ring(step_barriers);
  Blocks turns(block_barriers);
  if (threadIdx.x == 0) {
    ring.prepare(Numerics::STEP_ARRIVALS, Roles::GROUPS * 4);
    turns.prepare(1 + Numerics::QUERY_ARRIVALS, Roles::GROUPS * GROUP_THREADS);  // the block, and its queries
  }
  __syncthreads();
  auto steps_of = [](const Block& block, int first, int queries) {
    int last = block.last_of(first, queries);
    return first <= last ? (block.visible(last) + Roles::KEYS - 1) / Roles::KEYS : 0;
  };
  int group = ptx::uniform(threadIdx.x / GROUP_THREADS);
  int before = 0;  // steps of earlier turns

  if (group == Roles::GROUPS) {
    ptx::set_registers<Roles::FETCH_REGISTERS, Roles::THREADS>();
    int thread = ptx::opaque(threadIdx.x) - Roles::GROUPS * GROUP_THREADS;
    if (thread >= Numerics::FETCH_THREADS) return;
    for (int turn = 0;; ++turn) {
      turns.wait_empty(turn);
      Block& block = blocks[turn % 2];
      if (thread == 0) {
        block = next_block<Block, Roles::QUERIES>(p, turn == 0);
        ptx::landing_arrive(turns.full(turn));
      }
      ptx::barrier(1, Numerics::FETCH_THREADS);
      if (block.head < 0) {
        if (thread < Numerics::QUERY_ARRIVALS) ptx::landing_arrive(turns.full(turn));
        break;
      }
      Numerics numerics(p, block, shared);
      numerics.load_queries(turn % 2, thread, turns.full(turn));
      int steps = steps_of(block, block.first, Roles::QUERIES);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        int n = before + step;
        ring.wait_empty(n);
        numerics.load(block.template number<Roles::TILES>(step), ring.stage(n), thread, ring.full(n));
      }
      before += steps;
    }
    ptx::copy_wait_all();
    return;
  }

  ptx::set_registers<Roles::QUERIES_REGISTERS, Roles::THREADS>();
  auto came = [](auto& what, int n) {
    what.wait(n);
    if (Numerics::ORDINARY_COPIES) ptx::wgmma_publish();
  };
  for (int turn = 0;; ++turn) {
    came(turns, turn);
    const Block& block = blocks[turn % 2];
    if (block.head < 0) break;
    const Segment& segment = block.segment;
    Numerics numerics(p, block, shared);
    int first = block.first + group * 64;
    typename Numerics::Part part(numerics, turn % 2, group);
    int steps = steps_of(block, first, 64), whole_steps = block.visible(first) / Roles::KEYS;
    const int skipped_steps = block.skipped / Roles::KEYS;
    auto start = [&](int step) {
      came(ring, before + step);
      part.start(ring.stage(before + step));
    };
    auto add = [&](int step) { part.add(ring.stage(before + step)); };
    constexpr bool VALUES_FIRST = Numerics::VALUES_FIRST;
    if (steps > 0) {
      start(0);
      if (whole_steps > 0) part.template softmax<false, 0>(skipped_steps, ring.stage(before), segment, first);
      else part.template softmax<true, 0>(skipped_steps, ring.stage(before), segment, first);
      if constexpr (!VALUES_FIRST) part.take();
      for (int step = 1; step < steps; ++step) {
        if constexpr (VALUES_FIRST) {
          add(step - 1);
          start(step);
          part.template added<1>();
          ring.release(before + step - 1);
        } else {
          start(step);
          add(step - 1);
        }
        constexpr int PENDING = VALUES_FIRST ? 0 : 1;
        int stage = ring.stage(before + step);
        if (__builtin_expect(step < whole_steps, true))
          part.template softmax<false, PENDING>(step + skipped_steps, stage, segment, first);
        else
          part.template softmax<true, PENDING>(step + skipped_steps, stage, segment, first);
        if constexpr (!VALUES_FIRST) {
          part.template added<0>();
          ring.release(before + step - 1);
          part.take();
        }
      }
      add(steps - 1);
      part.template added<0>();
      ring.release(before + steps - 1);
    }
    // Steps that only later queries of the block see.
    int all_steps = steps_of(block, block.first, Roles::QUERIES);
    for (int step = steps; step < all_steps; ++step) {
      ring.wait(before + step);
      ring.release(before + step);
    }
    before += all_steps;
    store<T>(p, block, part.rows);
    ptx::landing_arrive(turns.empty(turn));  // each thread for itself: all have read of the block
  }
}

}  // namespace sage::attention
