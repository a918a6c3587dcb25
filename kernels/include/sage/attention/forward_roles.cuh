// The forward walk on Hopper: the same as forward.cuh, with a part for each warpgroup. Query groups keep 64 queries each;
// one more group fetches keys and values into a ring of stages, TILES tiles a step: both of a step together, or apart, each
// as early as it is wanted. There is a block for each
// multiprocessor, which takes one piece of work after the other: keys of the next come while the last is being written.
#pragma once

#include <type_traits>

#include <sage/attention/forward.cuh>
#include <sage/attention/panels.cuh>
#include <sage/attention/ring.cuh>

namespace sage::attention {

// Groups of queries where nothing else decides: what the registers hold.
template <int D>
constexpr int USUAL_GROUPS = D == 64 ? 3 : 2;

template <int TILES_, int STAGES_, int REGISTERS_TO_FETCH, int GROUPS_>
struct ForwardRoles {
  static constexpr int GROUPS = GROUPS_, TILES = TILES_;  // of queries; of keys a step
  static constexpr int QUERIES = 64 * GROUPS, KEYS = TILE * TILES;
  static constexpr int STAGES = STAGES_;
  static constexpr int THREADS = (GROUPS + 1) * GROUP_THREADS;
  // Groups share what the block starts with; more than that none would ever get.
  static constexpr int FETCH_REGISTERS = REGISTERS_TO_FETCH, ALL_REGISTERS = ptx::START_REGISTERS<THREADS> * (GROUPS + 1);
  static constexpr int QUERIES_REGISTERS = (ALL_REGISTERS - FETCH_REGISTERS) / GROUPS / 8 * 8;
};

// Named barriers; 0 is __syncthreads.
enum ForwardBarrier : int {
  FETCHERS = 1,
  TURN = 2,  // for each group of queries: it may ask for its products,
  READ = 5,  // and all its warps have read its queries
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

// Numerics is a block's shared memory, and has: Type, D, Roles, SHARED_BYTES; FETCH_THREADS, who fetches; QUERY_ARRIVALS and
// STEP_ARRIVALS, how many times they tell of copies; load_queries(slot, thread, landing) and load(step, stage, thread,
// landing), or load(values, step, ..) for each apart, asynchronous; and Part, what a query group keeps in its registers:
// start(stage), S of a step whose keys have come; softmax<HIDES, PENDING>(step, stage, segment, first query), from there to
// P, with PENDING later products under way; add(stage), P V under way, and add_last(stage), that of the last step;
// added<PENDING>(), the end of that. rows, the softmax of its queries.
//
// VALUES_FIRST says in which order a step's products are asked for. Values first: they are waited for while the next S is
// under way; the other groups' softmax hides them, and no registers hold both S and what is added. Keys and values share a
// stage. Values last: they are under way while the group works on the next softmax, and take() gives P to the next add when
// they are done; scored<PENDING>() is the end of S, when its keys are no longer read. Keys and values have stages of their own
// in the ring, in the order in which they are wanted: keys 0, keys 1, values 0, keys 2, values 1, ..
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
      ptx::barrier(FETCHERS, Numerics::FETCH_THREADS);
      if (block.head < 0) {
        if (thread < Numerics::QUERY_ARRIVALS) ptx::landing_arrive(turns.full(turn));
        break;
      }
      Numerics numerics(p, block, shared);
      numerics.load_queries(turn % 2, thread, turns.full(turn));
      int steps = steps_of(block, block.first, Roles::QUERIES);
      int pieces = Numerics::VALUES_FIRST ? steps : 2 * steps;
#pragma unroll 1
      for (int piece = 0; piece < pieces; ++piece) {
        int n = before + piece;
        ring.wait_empty(n);
        if constexpr (Numerics::VALUES_FIRST) {
          numerics.load(block.template number<Roles::TILES>(piece), ring.stage(n), thread, ring.full(n));
        } else {
          bool values = piece + 1 == pieces || (piece > 0 && piece % 2 == 0);
          int step = piece + 1 == pieces ? steps - 1 : values ? piece / 2 - 1 : (piece + 1) / 2;
          numerics.load(values, block.template number<Roles::TILES>(step), ring.stage(n), thread, ring.full(n));
        }
      }
      before += pieces;
    }
    ptx::copy_wait_all();
    return;
  }

  ptx::set_registers<Roles::QUERIES_REGISTERS, Roles::THREADS>();
  if (!Numerics::VALUES_FIRST && group == Roles::GROUPS - 1) ptx::arrive(TURN, 2 * GROUP_THREADS);  // group 0 begins
  for (int turn = 0;; ++turn) {
    turns.wait(turn);
    const Block& block = blocks[turn % 2];
    if (block.head < 0) break;
    const Segment& segment = block.segment;
    Numerics numerics(p, block, shared);
    int first = block.first + group * 64;
    typename Numerics::Part part(numerics, turn % 2, group);
    int steps = steps_of(block, first, 64), whole_steps = block.visible(first) / Roles::KEYS;
    const int skipped_steps = block.skipped / Roles::KEYS;
    constexpr bool VALUES_FIRST = Numerics::VALUES_FIRST;
    int all_steps = steps_of(block, block.first, Roles::QUERIES);
    // Where a step's keys and values are in the ring.
    auto keys_of = [&](int step) { return before + (VALUES_FIRST ? step : max(2 * step - 1, 0)); };
    auto values_of = [&](int step) { return before + (VALUES_FIRST ? step : min(2 * step + 2, 2 * all_steps - 1)); };
    auto start = [&](int step) {
      ring.wait(keys_of(step));
      part.start(ring.stage(keys_of(step)));
    };
    auto add = [&](int step) {
      if constexpr (!VALUES_FIRST) ring.wait(values_of(step));
      part.add(ring.stage(values_of(step)));
    };
    auto softmax = [&](int step, auto pending) {
      constexpr int PENDING = decltype(pending)::value;
      if constexpr (!VALUES_FIRST) {
        part.template scored<PENDING>();
        ring.release(keys_of(step));
      }
      int stage = ring.stage(keys_of(step));
      if (__builtin_expect(step < whole_steps, true))
        part.template softmax<false, PENDING>(step + skipped_steps, stage, segment, first);
      else
        part.template softmax<true, PENDING>(step + skipped_steps, stage, segment, first);
    };
    // Groups take turns in asking for products, so that one's run under another's softmax.
    auto take_turn = [&] { ptx::barrier(TURN + group, 2 * GROUP_THREADS); };
    auto pass_turn = [&] { ptx::arrive(TURN + (group + 1) % Roles::GROUPS, 2 * GROUP_THREADS); };
    if (steps > 0) {
      if constexpr (!VALUES_FIRST) take_turn();
      start(0);
      if constexpr (!VALUES_FIRST) pass_turn();
      softmax(0, std::integral_constant<int, 0>());
      if constexpr (!VALUES_FIRST) part.take();
      for (int step = 1; step < steps; ++step) {
        if constexpr (VALUES_FIRST) {
          add(step - 1);
          start(step);
          part.template added<1>();
          ring.release(values_of(step - 1));
          softmax(step, std::integral_constant<int, 0>());
        } else {
          take_turn();
          start(step);
          add(step - 1);
          pass_turn();
          softmax(step, std::integral_constant<int, 1>());
          part.template added<0>();
          ring.release(values_of(step - 1));
          part.take();
        }
      }
      if constexpr (!VALUES_FIRST) ring.wait(values_of(steps - 1));
      part.add_last(ring.stage(values_of(steps - 1)));
      part.template added<0>();
      ring.release(values_of(steps - 1));
    }
    // Steps that only later queries of the block see.
    for (int step = steps; step < all_steps; ++step) {
      ring.wait(keys_of(step));
      ring.release(keys_of(step));
      if constexpr (!VALUES_FIRST) {
        take_turn();
        pass_turn();
        ring.wait(values_of(step));
        ring.release(values_of(step));
      }
    }
    before += VALUES_FIRST ? all_steps : 2 * all_steps;
    ptx::barrier(READ + group, GROUP_THREADS);
    store<T, Numerics::STAGING>(p, block, part.rows, part.staging());
    ptx::wgmma_publish();
    ptx::landing_arrive(turns.empty(turn));  // each thread for itself: all have read of the block
  }
}

}  // namespace sage::attention
