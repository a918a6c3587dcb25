// The forward walk on Hopper: the same as forward.cuh, with a consumer for each warpgroup. Query groups keep 64 queries each;
// one more warpgroup fetches keys and values into a kv of stages, TILES tiles a step: both of a step together, or apart, each
// as early as it is wanted. There is a block for each
// multiprocessor, which takes one piece of work after the other: keys of the next come while the last is being written.
#pragma once

#include <type_traits>

#include <sage/attention/mainloop/forward_sm80.cuh>
#include <sage/attention/panels.cuh>
#include <sage/attention/pipeline.cuh>
#include <sage/params/plans.cuh>

namespace sage::attention {

// Groups of queries where nothing else decides: what the registers fence_operand.
template <int D>
constexpr int DEFAULT_CONSUMERS = D == 64 ? 3 : 2;

template <int TILES_, int PRODUCER_REGISTERS_, params::Plan PLAN>
struct ForwardWarpgroups {
  static constexpr int CONSUMERS = PLAN.rows / 64, TILES = TILES_;  // of queries; of keys a step
  static constexpr int QUERIES = 64 * CONSUMERS, KEYS = TILE * TILES;
  static constexpr int STAGES = PLAN.stages;
  static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP_THREADS;
  static_assert(PLAN.rows == QUERIES && PLAN.threads == THREADS);
  // Groups share what the block starts with; more than that none would ever get.
  static constexpr int PRODUCER_REGISTERS = PRODUCER_REGISTERS_, ALL_REGISTERS = ptx::LAUNCH_REGISTERS<THREADS> * (CONSUMERS + 1);
  static constexpr int CONSUMER_REGISTERS = (ALL_REGISTERS - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
};

// Named barriers; 0 is __syncthreads.
enum ForwardBarrier : int {
  PRODUCERS = 1,
  MMA_ORDER = 2,  // for each warpgroup of queries: it may ask for its products,
  QUERIES_READ = 5,  // and all its warps have read its queries
};

// The next piece of work, head -1 after the last: at first that of the block's index, then the one that nobody has taken.
template <class Block, int QUERIES>
__device__ __forceinline__ Block next_work(const params::Forward& p, bool first) {
  const params::Shape& shape = p.shape;
  int all = (shape.query_len + QUERIES - 1) / QUERIES * shape.query_heads * shape.segment_count;
  auto take = [&] { return int(gridDim.x) + atomicAdd(p.scheduler_counter, 1); };
  for (int index = first ? blockIdx.x : take(); index < all; index = take()) {
    Block block(p, index, QUERIES);
    if (block.first < block.end) return block;
  }
  Block none;
  none.head = -1;
  return none;
}

// Numerics is a block's shared memory, and has: Type, D, Warpgroups, SHARED_BYTES; PRODUCER_THREADS, who fetches; QUERY_ARRIVALS and
// STEP_ARRIVALS, how many times they tell of copies; load_queries(slot, thread, mbarrier) and load(step, stage, thread,
// mbarrier), or load(values, step, ..) for each apart, asynchronous; and Consumer, what a query warpgroup keeps in its registers:
// start(stage), S of a step whose keys have come; softmax<MASKED, PENDING>(step, stage, segment, first query), from there to
// P, with PENDING later products under way; add(stage), P V under way, and add_last(stage), that of the last step;
// added<PENDING>(), the end of that. softmax, the softmax of its queries.
//
// VALUES_FIRST says in which order a step's products are asked for. Values first: they are waited for while the next S is
// under way; the other groups' softmax masked them, and no registers fence_operand both S and what is added. Keys and values share a
// stage. Values last: they are under way while the warpgroup works on the next softmax, and take() gives P to the next add when
// they are done; scored<PENDING>() is the end of S, when its keys are no longer read. Keys and values have stages of their own
// in the kv, in the order in which they are wanted: keys 0, keys 1, values 0, keys 2, values 1, ..
template <class Numerics, class Block = EveryKey>
__device__ __forceinline__ void forward_sm90(const params::Forward& p) {
  using T = typename Numerics::Type;
  using Warpgroups = typename Numerics::Warpgroups;
  using KvPipeline = Pipeline<Warpgroups::STAGES>;
  using WorkPipeline = Pipeline<2>;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Block blocks[2];  // this one, and the next, whose queries come meanwhile
  __shared__ typename KvPipeline::Barriers kv_barriers;
  __shared__ typename WorkPipeline::Barriers work_barriers;
  KvPipeline kv(kv_barriers);
  WorkPipeline work(work_barriers);
  if (threadIdx.x == 0) {
    kv.prepare(Numerics::STEP_ARRIVALS, Warpgroups::CONSUMERS * 4);
    work.prepare(1 + Numerics::QUERY_ARRIVALS, Warpgroups::CONSUMERS * WARPGROUP_THREADS);  // the block, and its queries
  }
  __syncthreads();
  auto steps_of = [](const Block& block, int first, int queries) {
    int last = block.last_of(first, queries);
    return first <= last ? (block.visible(last) + Warpgroups::KEYS - 1) / Warpgroups::KEYS : 0;
  };
  int warpgroup = ptx::uniform(threadIdx.x / WARPGROUP_THREADS);
  int before = 0;  // steps of earlier work

  if (warpgroup == Warpgroups::CONSUMERS) {
    ptx::setmaxnreg<Warpgroups::PRODUCER_REGISTERS, Warpgroups::THREADS>();
    int thread = ptx::opaque(threadIdx.x) - Warpgroups::CONSUMERS * WARPGROUP_THREADS;
    if (thread >= Numerics::PRODUCER_THREADS) return;
    for (int item = 0;; ++item) {
      work.wait_empty(item);
      Block& block = blocks[item % 2];
      if (thread == 0) {
        block = next_work<Block, Warpgroups::QUERIES>(p, item == 0);
        ptx::mbarrier_arrive(work.full(item));
      }
      ptx::named_barrier_sync(PRODUCERS, Numerics::PRODUCER_THREADS);
      if (block.head < 0) {
        if (thread < Numerics::QUERY_ARRIVALS) ptx::mbarrier_arrive(work.full(item));
        break;
      }
      Numerics numerics(p, block, shared);
      numerics.load_queries(item % 2, thread, work.full(item));
      int steps = steps_of(block, block.first, Warpgroups::QUERIES);
      int pieces = Numerics::VALUES_FIRST ? steps : 2 * steps;
#pragma unroll 1
      for (int piece = 0; piece < pieces; ++piece) {
        int n = before + piece;
        kv.wait_empty(n);
        if constexpr (Numerics::VALUES_FIRST) {
          numerics.load(block.template number<Warpgroups::TILES>(piece), kv.stage(n), thread, kv.full(n));
        } else {
          bool values = piece + 1 == pieces || (piece > 0 && piece % 2 == 0);
          int step = piece + 1 == pieces ? steps - 1 : values ? piece / 2 - 1 : (piece + 1) / 2;
          numerics.load(values, block.template number<Warpgroups::TILES>(step), kv.stage(n), thread, kv.full(n));
        }
      }
      before += pieces;
    }
    ptx::cp_async_wait_all();
    return;
  }

  ptx::setmaxnreg<Warpgroups::CONSUMER_REGISTERS, Warpgroups::THREADS>();
  if (!Numerics::VALUES_FIRST && warpgroup == Warpgroups::CONSUMERS - 1) ptx::named_barrier_arrive(MMA_ORDER, 2 * WARPGROUP_THREADS);  // warpgroup 0 begins
  for (int item = 0;; ++item) {
    work.wait(item);
    const Block& block = blocks[item % 2];
    if (block.head < 0) break;
    const Segment& segment = block.segment;
    Numerics numerics(p, block, shared);
    int first = block.first + warpgroup * 64;
    typename Numerics::Consumer consumer(numerics, item % 2, warpgroup);
    int steps = steps_of(block, first, 64), whole_steps = block.visible(first) / Warpgroups::KEYS;
    const int skipped_steps = block.skipped / Warpgroups::KEYS;
    constexpr bool VALUES_FIRST = Numerics::VALUES_FIRST;
    int all_steps = steps_of(block, block.first, Warpgroups::QUERIES);
    // Where a step's keys and values are in the kv.
    auto keys_of = [&](int step) { return before + (VALUES_FIRST ? step : max(2 * step - 1, 0)); };
    auto values_of = [&](int step) { return before + (VALUES_FIRST ? step : min(2 * step + 2, 2 * all_steps - 1)); };
    auto start = [&](int step) {
      kv.wait(keys_of(step));
      consumer.start(kv.stage(keys_of(step)));
    };
    auto add = [&](int step) {
      if constexpr (!VALUES_FIRST) kv.wait(values_of(step));
      consumer.add(kv.stage(values_of(step)));
    };
    auto online_softmax = [&](int step, auto pending) {
      constexpr int PENDING = decltype(pending)::value;
      if constexpr (!VALUES_FIRST) {
        consumer.template scored<PENDING>();
        kv.release(keys_of(step));
      }
      int stage = kv.stage(keys_of(step));
      if (__builtin_expect(step < whole_steps, true))
        consumer.template online_softmax<false, PENDING>(step + skipped_steps, stage, segment, first);
      else
        consumer.template online_softmax<true, PENDING>(step + skipped_steps, stage, segment, first);
    };
    // Groups take work in asking for products, so that one's run under another's softmax.
    auto acquire_order = [&] { ptx::named_barrier_sync(MMA_ORDER + warpgroup, 2 * WARPGROUP_THREADS); };
    auto release_order = [&] { ptx::named_barrier_arrive(MMA_ORDER + (warpgroup + 1) % Warpgroups::CONSUMERS, 2 * WARPGROUP_THREADS); };
    if (steps > 0) {
      if constexpr (!VALUES_FIRST) acquire_order();
      start(0);
      if constexpr (!VALUES_FIRST) release_order();
      online_softmax(0, std::integral_constant<int, 0>());
      if constexpr (!VALUES_FIRST) consumer.take();
      for (int step = 1; step < steps; ++step) {
        if constexpr (VALUES_FIRST) {
          add(step - 1);
          start(step);
          consumer.template added<1>();
          kv.release(values_of(step - 1));
          online_softmax(step, std::integral_constant<int, 0>());
        } else {
          acquire_order();
          start(step);
          add(step - 1);
          release_order();
          online_softmax(step, std::integral_constant<int, 1>());
          consumer.template added<0>();
          kv.release(values_of(step - 1));
          consumer.take();
        }
      }
      if constexpr (!VALUES_FIRST) kv.wait(values_of(steps - 1));
      consumer.add_last(kv.stage(values_of(steps - 1)));
      consumer.template added<0>();
      kv.release(values_of(steps - 1));
    }
    // KvPipeline that only later queries of the block see.
    for (int step = steps; step < all_steps; ++step) {
      kv.wait(keys_of(step));
      kv.release(keys_of(step));
      if constexpr (!VALUES_FIRST) {
        acquire_order();
        release_order();
        kv.wait(values_of(step));
        kv.release(values_of(step));
      }
    }
    before += VALUES_FIRST ? all_steps : 2 * all_steps;
    ptx::named_barrier_sync(QUERIES_READ + warpgroup, WARPGROUP_THREADS);
    store<T, Numerics::STAGING>(p, block, consumer.softmax, consumer.staging());
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(work.empty(item));  // each thread for itself: all have read of the block
  }
}

}  // namespace sage::attention
