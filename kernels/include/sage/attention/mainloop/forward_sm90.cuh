// The forward mainloop for Hopper: persistent and warp-specialized. One thread block runs on each multiprocessor, and
// gets work items (tiles of queries of one head) from the tile scheduler until none is left. For each item it computes
// the output and the log-sum-exp of 64 queries per consumer; there are two or three consumers.
//
//   producer      One warp of the last warpgroup gets the items, and copies their queries, keys and values: TILES tiles
//                 of keys and of values per step. The other three warps of this warpgroup exit.
//   consumers     Each of the other warpgroups has 64 queries, and computes S = Q K^T, the online softmax, O += P V,
//                 and the epilogue.
//   work          Pipeline of QUERY_SLOTS stages for items and their queries. With two stages, the queries and first
//                 keys of the next item are copied during the epilogue of the current item.
//   kv            Pipeline for keys and values. With VALUES_FIRST (see ForwardSm90Numerics) a step's keys and values
//                 share a stage; otherwise they have separate stages.
//   MMA_ORDER     Named barriers (without VALUES_FIRST): consumers issue wgmmas in turn, so that one consumer's wgmmas
//                 execute during another consumer's softmax.
//   QUERIES_READ  Named barriers: a consumer's warps have read its queries, whose memory its epilogue may overwrite.
//
// Timeline of an item of three steps, without VALUES_FIRST, for two consumers and four stages. "S1 PV0": the
// consumer issues S of step 1 and P V of step 0. S1 runs during the other consumer's softmax, PV0 during this
// consumer's softmax 1.
//
//   producer    Q K0|K1|V0|K2      |V1               |V2   |Q of the next item|K0 ..
//   consumer 0      |S0|softmax 0     |S1 PV0|softmax 1      |S2 PV1|softmax 2      |PV2|epilogue
//   consumer 1         |S0|softmax 0         |S1 PV0|softmax 1      |S2 PV1|softmax 2      |PV2|epilogue
//
// With VALUES_FIRST consumers do not take turns, and P V of a step is issued before S of the next step:
//
//   producer    Q K0 V0|K1 V1|K2 V2|Q of the next item ..
//   consumers          |S0|softmax 0|PV0 S1|O += PV0|softmax 1|PV1 S2|O += PV1|softmax 2|PV2|O += PV2|epilogue
#pragma once

#include <type_traits>

#include <sage/attention/mainloop/forward_sm80.cuh>
#include <sage/attention/panels.cuh>
#include <sage/tile/pipeline.cuh>
#include <sage/params/plans.cuh>

namespace sage::attention {

template <int TILES_, int PRODUCER_REGISTERS_, params::Plan PLAN>
struct ForwardWarpgroups {
  static constexpr int CONSUMERS = PLAN.rows / 64, TILES = TILES_;  // TILES: tiles of keys per step
  static constexpr int QUERIES = 64 * CONSUMERS, KEYS = TILE * TILES;
  static constexpr int STAGES = PLAN.stages;
  static constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP_THREADS;
  static_assert(PLAN.mainloop == params::FORWARD_SM90);
  static_assert(PLAN.rows == QUERIES && PLAN.threads == THREADS);
  // The warpgroups' registers must sum to at most the thread block's allocation at launch; otherwise setmaxnreg.inc
  // would wait forever.
  static constexpr int PRODUCER_REGISTERS = PRODUCER_REGISTERS_, ALL_REGISTERS = ptx::LAUNCH_REGISTERS<THREADS> * (CONSUMERS + 1);
  static constexpr int CONSUMER_REGISTERS = (ALL_REGISTERS - PRODUCER_REGISTERS) / CONSUMERS / 8 * 8;
};

// The threads of the producer: a whole warp, because elect.sync waits for all of its lanes.
constexpr int PRODUCER_THREADS = 32;

// Named barriers; 0 is __syncthreads.
enum ForwardBarrier : int {
  PRODUCERS = 1,     // among the producer's threads: the first thread has written the next work item
  MMA_ORDER = 2,     // one for each consumer: this consumer may issue its wgmmas
  QUERIES_READ = 5,  // one for each consumer: all its warps have read its queries
};

// The tile scheduler: returns the next work item, or an item with head -1 if none is left. The first item's index is
// blockIdx.x; later indices come from an atomic counter.
template <class Block, int QUERIES>
__device__ __forceinline__ Block next_work(const params::Forward& p, bool first) {
  static_assert(params::facts(params::FORWARD_SM90).persistent);
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

// What the mainloop requires of its numerics N. N defines the layout of shared memory; N::Consumer is the state that a
// consumer keeps in registers. Stage indices refer to the kv pipeline.
//
// VALUES_FIRST is the order in which the matmuls of a step are issued.
// - If true, P V of the previous step is issued before S, and the consumer waits for P V while S is in flight:
// registers cannot store the results of both matmuls during the softmax. The softmax of the other consumers hides the
// wait. Keys and values share a stage.
// - If false, S is issued before P V of the previous step, which is in flight during the softmax of S. Keys and values
// have separate stages in the kv pipeline, in the order in which consumers need them: keys 0, keys 1, values 0, keys 2,
// values 1, .. A stage of keys is then released long before the values of its step are needed.
//
// MASKS_APART: whether the steps that need a mask have a separate loop. A step without a mask is then one basic block
// except for the rescaling, so that ptxas can move the wait for P V, and the code after it, between the exponentials.
template <class N>
concept ForwardSm90Numerics = requires(N numerics, const params::Forward& p, const ForwardBlock& block, unsigned char* shared,
                                       typename N::Consumer consumer, uint32_t mbarrier) {
  typename N::Type;
  requires N::D % 64 == 0;                      // the padded head_dim
  requires N::Warpgroups::CONSUMERS >= 2;       // a ForwardWarpgroups
  requires N::QUERY_SLOTS == 1 || N::QUERY_SLOTS == 2;  // items whose queries are in shared memory at a time
  requires N::QUERY_ARRIVALS >= 1 && N::STEP_ARRIVALS >= 1;  // the producer's arrivals for an item's queries, and for a stage
  N::template MASKS_APART<OUTER_KEYS>;          // a bool that depends on Hidden: see above
  N::SMOOTHS_VALUES;                            // whether smoothing of V is supported
  requires N::STAGING >= 0 && N::SHARED_BYTES > 0;           // bytes of shared memory: per warp in the epilogue, and in total
  N(p, block, shared);
  // Issues the asynchronous copies of an item's queries into a slot: (slot, thread, mbarrier).
  numerics.load_queries(0, 0, mbarrier);
  (typename N::Consumer(numerics, 0, 0));  // (numerics, slot of the queries, index of the consumer warpgroup)
  // Issues S of a step whose keys have arrived.
  consumer.start(0);
  // online_softmax<HIDDEN, PENDING>(step, stage, segment, the consumer's first query): computes P from S. With
  // VALUES_FIRST it first waits for S, while PENDING later wgmmas may stay in flight.
  consumer.template online_softmax<OUTER_KEYS, 0>(0, 0, block.segment, 0);
  consumer.template online_softmax<NO_KEYS, 0>(0, 0, block.segment, 0);
  // Issues P V of a step: `add_last` for an item's last step, `add` for earlier steps.
  consumer.add(0);
  consumer.add_last(0);
  // added<PENDING>(): waits for P V of a step, while PENDING later wgmma groups may stay in flight. Afterwards no wgmma
  // reads that step's values. With VALUES_FIRST it then adds the result to O.
  consumer.template added<0>();
  consumer.softmax;    // the Softmax of the consumer's queries; contains O
  consumer.staging();  // the address of the calling warp's STAGING bytes
} && (N::VALUES_FIRST ? requires(N numerics, uint32_t mbarrier) {
  // Issues the asynchronous copies of a step's keys and values: (step, stage, thread, mbarrier).
  numerics.load(0, 0, 0, mbarrier);
} : requires(N numerics, typename N::Consumer consumer, uint32_t mbarrier) {
  // Issues the copies of a step's values, or of its keys: (true for values, step, stage, thread, mbarrier).
  numerics.load(true, 0, 0, 0, mbarrier);
  // scored<PENDING>(stage): waits for S, while P V of PENDING steps may stay in flight. Afterwards no wgmma reads the
  // keys.
  consumer.template scored<0>(0);
  // Rescales O, and packs P as the operand of the next P V; no wgmma may be in flight.
  consumer.take();
});

// The number of steps up to the last key that the block's queries `first` to `first + queries - 1` see.
template <class Warpgroups, class Block>
__device__ __forceinline__ int steps_of(const Block& block, int first, int queries) {
  int last = block.last_of(first, queries);
  return first <= last ? (block.visible(last) + Warpgroups::KEYS - 1) / Warpgroups::KEYS : 0;
}

// The order of a work item's keys and values in the kv pipeline. A step is one iteration over tiles of keys. With
// VALUES_FIRST (see ForwardSm90Numerics) a step's keys and values share a stage. Otherwise they have separate
// stages, in this order: K of step 0, K of step 1, V of step 0, K of step 2, V of step 1, ..
template <bool VALUES_FIRST>
struct KvOrder {
  int before;  // stages that earlier items used
  int steps;   // the item's number of steps

  __device__ __forceinline__ int pieces() const { return VALUES_FIRST ? steps : 2 * steps; }
  // The positions in the kv pipeline, counted over all items, of a step's keys and of its values.
  __device__ __forceinline__ int keys_of(int step) const { return before + (VALUES_FIRST ? step : max(2 * step - 1, 0)); }
  __device__ __forceinline__ int values_of(int step) const {
    return before + (VALUES_FIRST ? step : min(2 * step + 2, 2 * steps - 1));
  }
};

// The producer's work for an item: copies the item's keys and values, each when a stage of the pipeline is empty.
template <class Numerics, class Block, class KvPipeline>
__device__ __forceinline__ void produce_keys_and_values(Numerics& numerics, const Block& block, const KvPipeline& kv,
                                                        const KvOrder<Numerics::VALUES_FIRST>& order, int thread) {
  constexpr int TILES = Numerics::Warpgroups::TILES;
  int pieces = order.pieces();
#pragma unroll 1
  for (int piece = 0; piece < pieces; ++piece) {
    int n = order.before + piece;
    kv.wait_empty(n);
    if constexpr (Numerics::VALUES_FIRST) {
      numerics.load(block.template number<TILES>(piece), kv.stage(n), thread, kv.full(n));
    } else {
      bool values = piece + 1 == pieces || (piece > 0 && piece % 2 == 0);
      int step = piece + 1 == pieces ? order.steps - 1 : values ? piece / 2 - 1 : (piece + 1) / 2;
      numerics.load(values, block.template number<TILES>(step), kv.stage(n), thread, kv.full(n));
    }
  }
}

// The producer's loop: gets items from the tile scheduler, and copies their queries, keys and values. An item with head
// -1 ends this loop and the consumers' loops.
template <class Numerics, class Block, class KvPipeline, class WorkPipeline>
__device__ __forceinline__ void produce(const params::Forward& p, unsigned char* shared, Block* blocks, const KvPipeline& kv,
                                        const WorkPipeline& work) {
  using Warpgroups = typename Numerics::Warpgroups;
  int thread = ptx::opaque(threadIdx.x) - Warpgroups::CONSUMERS * WARPGROUP_THREADS;
  if (thread >= PRODUCER_THREADS) return;
  int before = 0;
  for (int item = 0;; ++item) {
    work.wait_empty(item);
    // With one slot, lane 0 must wait until the other lanes have read the previous item.
    if constexpr (Numerics::QUERY_SLOTS == 1) __syncwarp();
    Block& block = blocks[WorkPipeline::stage(item)];
    if (thread == 0) {
      block = next_work<Block, Warpgroups::QUERIES>(p, item == 0);
      ptx::mbarrier_arrive(work.full(item));
    }
    ptx::named_barrier_sync(PRODUCERS, PRODUCER_THREADS);
    if (block.head < 0) {
      if (thread < Numerics::QUERY_ARRIVALS) ptx::mbarrier_arrive(work.full(item));
      break;
    }
    Numerics numerics(p, block, shared);
    numerics.load_queries(WorkPipeline::stage(item), thread, work.full(item));
    KvOrder<Numerics::VALUES_FIRST> order{before, steps_of<Warpgroups>(block, block.first, Warpgroups::QUERIES)};
    produce_keys_and_values(numerics, block, kv, order, thread);
    before += order.pieces();
  }
  ptx::cp_async_wait_all();
}

// Whether the code of a step masks logits.
enum Mask { NO_MASK, MASK_ALWAYS, MASK_IF_NEEDED };

// A consumer's work on an item. Each step computes S, the online softmax, and O += P V.
template <class Numerics, Hidden HIDDEN, class KvPipeline>
struct ItemConsumer {
  using Warpgroups = typename Numerics::Warpgroups;
  static constexpr bool VALUES_FIRST = Numerics::VALUES_FIRST;

  typename Numerics::Consumer& consumer;
  const KvPipeline& kv;
  KvOrder<VALUES_FIRST> order;
  const Segment& segment;
  int warpgroup, first;            // the consumer's number, and its first query
  int whole_steps, skipped_steps;  // the number of steps that need no mask; block.skipped / Warpgroups::KEYS

  __device__ __forceinline__ void acquire_order() const { ptx::named_barrier_sync(MMA_ORDER + warpgroup, 2 * WARPGROUP_THREADS); }
  __device__ __forceinline__ void release_order() const {
    ptx::named_barrier_arrive(MMA_ORDER + (warpgroup + 1) % Warpgroups::CONSUMERS, 2 * WARPGROUP_THREADS);
  }

  __device__ __forceinline__ void wait_for_keys(int step) const { kv.wait(order.keys_of(step)); }
  // Issues S of a step, after wait_for_keys.
  __device__ __forceinline__ void start(int step) const { consumer.start(kv.stage(order.keys_of(step))); }
  __device__ __forceinline__ void add(int step) const {
    if constexpr (!VALUES_FIRST) kv.wait(order.values_of(step));
    consumer.add(kv.stage(order.values_of(step)));
  }
  // Computes P of a step from S, while P V of PENDING steps may stay in flight.
  template <Mask MASK, int PENDING>
  __device__ __forceinline__ void online_softmax(int step) const {
    if constexpr (!VALUES_FIRST) {
      consumer.template scored<PENDING>(kv.stage(order.keys_of(step)));
      kv.release(order.keys_of(step));
    }
    int stage = kv.stage(order.keys_of(step));
    if (MASK == NO_MASK || (MASK == MASK_IF_NEEDED && __builtin_expect(step < whole_steps, true)))
      consumer.template online_softmax<NO_KEYS, PENDING>(step + skipped_steps, stage, segment, first);
    else
      consumer.template online_softmax<HIDDEN, PENDING>(step + skipped_steps, stage, segment, first);
  }

  // Computes S and the softmax of the first step.
  __device__ __forceinline__ void begin() const {
    if constexpr (!VALUES_FIRST) acquire_order();
    wait_for_keys(0);
    start(0);
    if constexpr (!VALUES_FIRST) release_order();
    online_softmax<MASK_IF_NEEDED, 0>(0);
    if constexpr (!VALUES_FIRST) consumer.take();
  }
  // Computes S and the softmax of `step`, which is not the first step, and P V of the step before it.
  template <Mask MASK>
  __device__ __forceinline__ void advance(int step) const {
    if constexpr (VALUES_FIRST) {
      add(step - 1);
      wait_for_keys(step);
      start(step);
      consumer.template added<1>();
      kv.release(order.values_of(step - 1));
      online_softmax<MASK, 0>(step);
    } else {
      wait_for_keys(step);
      acquire_order();
      start(step);
      add(step - 1);
      release_order();
      online_softmax<MASK, 1>(step);
      consumer.template added<0>();
      kv.release(order.values_of(step - 1));
      consumer.take();
    }
  }
  // Computes P V of the last step.
  __device__ __forceinline__ void end(int steps) const {
    if constexpr (!VALUES_FIRST) kv.wait(order.values_of(steps - 1));
    consumer.add_last(kv.stage(order.values_of(steps - 1)));
    consumer.template added<0>();
    kv.release(order.values_of(steps - 1));
  }
  // For a step whose keys are hidden from this consumer's queries, but not from other consumers' queries: releases the
  // step's stages, and lets the next consumer issue its wgmmas.
  __device__ __forceinline__ void skip(int step) const {
    wait_for_keys(step);
    kv.release(order.keys_of(step));
    if constexpr (!VALUES_FIRST) {
      acquire_order();
      release_order();
      kv.wait(order.values_of(step));
      kv.release(order.values_of(step));
    }
  }
};

// A consumer's loop: its work on each item, and the epilogue.
template <class Numerics, class Block, class KvPipeline, class WorkPipeline>
__device__ __forceinline__ void consume(const params::Forward& p, unsigned char* shared, const Block* blocks,
                                        const KvPipeline& kv, const WorkPipeline& work, int warpgroup) {
  using T = typename Numerics::Type;
  using Warpgroups = typename Numerics::Warpgroups;
  int before = 0;
  // The last consumer passes its turn on, so that consumer 0 begins.
  if (!Numerics::VALUES_FIRST && warpgroup == Warpgroups::CONSUMERS - 1) ptx::named_barrier_arrive(MMA_ORDER, 2 * WARPGROUP_THREADS);
  for (int item = 0;; ++item) {
    work.wait(item);
    const Block& block = blocks[WorkPipeline::stage(item)];
    if (block.head < 0) break;
    Numerics numerics(p, block, shared);
    int first = block.first + warpgroup * 64;
    typename Numerics::Consumer consumer(numerics, WorkPipeline::stage(item), warpgroup);
    int steps = steps_of<Warpgroups>(block, first, 64), whole_steps = block.visible(first) / Warpgroups::KEYS;
    const int skipped_steps = block.skipped / Warpgroups::KEYS;
    KvOrder<Numerics::VALUES_FIRST> order{before, steps_of<Warpgroups>(block, block.first, Warpgroups::QUERIES)};
    ItemConsumer<Numerics, Block::HIDDEN, KvPipeline> part{consumer, kv, order, block.segment, warpgroup, first, whole_steps, skipped_steps};
    if (steps > 0) {
      // The last steps need a mask. With a window, the first steps need one too.
      auto mask_hidden_keys = [&](int step) {
        if constexpr (Block::HIDDEN == OUTER_KEYS)
          part.whole_steps = step < hidden_steps(block, first, 64, Warpgroups::KEYS) ? 0 : whole_steps;
      };
      mask_hidden_keys(0);
      part.begin();
      int step = 1;
      constexpr bool MASKS_APART = Numerics::template MASKS_APART<Block::HIDDEN>;
      if constexpr (MASKS_APART) {
        int unmasked = whole_steps;
        // If a window's first steps need a mask, all steps run in the second loop.
        if constexpr (Block::HIDDEN == OUTER_KEYS) unmasked = hidden_steps(block, first, 64, Warpgroups::KEYS) > 0 ? 0 : whole_steps;
#pragma unroll 1
        for (; step < min(steps, unmasked); ++step) part.template advance<NO_MASK>(step);
      }
      constexpr Mask MASK = MASKS_APART && Block::HIDDEN != OUTER_KEYS ? MASK_ALWAYS : MASK_IF_NEEDED;
#pragma unroll 1
      for (; step < steps; ++step) {
        mask_hidden_keys(step);
        part.template advance<MASK>(step);
      }
      part.end(steps);
    }
    for (int step = steps; step < order.steps; ++step) part.skip(step);
    before += order.pieces();
    ptx::named_barrier_sync(QUERIES_READ + warpgroup, WARPGROUP_THREADS);
    store<T, Block::HIDDEN, Numerics::SMOOTHS_VALUES, Numerics::STAGING>(p, block, consumer.softmax, consumer.staging());
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(work.empty(item));  // by every thread, because every thread has read the item
  }
}

template <ForwardSm90Numerics Numerics, class Block = EveryKey>
__device__ __forceinline__ void forward_sm90(const params::Forward& p) {
  using Warpgroups = typename Numerics::Warpgroups;
  using KvPipeline = Pipeline<Warpgroups::STAGES>;
  using WorkPipeline = Pipeline<Numerics::QUERY_SLOTS>;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Block blocks[Numerics::QUERY_SLOTS];  // the current item; with two slots also the next item
  __shared__ typename KvPipeline::Barriers kv_barriers;
  __shared__ typename WorkPipeline::Barriers work_barriers;
  KvPipeline kv(kv_barriers);
  WorkPipeline work(work_barriers);
  if (threadIdx.x == 0) {
    kv.prepare(Numerics::STEP_ARRIVALS, Warpgroups::CONSUMERS * 4);
    // The producer arrives once for the work item, and QUERY_ARRIVALS times for its queries.
    work.prepare(1 + Numerics::QUERY_ARRIVALS, Warpgroups::CONSUMERS * WARPGROUP_THREADS);
  }
  __syncthreads();
  int warpgroup = ptx::uniform(threadIdx.x / WARPGROUP_THREADS);
  if (warpgroup == Warpgroups::CONSUMERS) {
    ptx::setmaxnreg<Warpgroups::PRODUCER_REGISTERS, Warpgroups::THREADS>();
    produce<Numerics>(p, shared, blocks, kv, work);
  } else {
    ptx::setmaxnreg<Warpgroups::CONSUMER_REGISTERS, Warpgroups::THREADS>();
    consume<Numerics>(p, shared, blocks, kv, work, warpgroup);
  }
}

}  // namespace sage::attention
