// The forward mainloop for family 10 (sm_100, sm_103): warp-specialized, with matmuls in tensor memory (tcgen05). A
// thread block computes the output and the log-sum-exp of 128 queries of one head, one query per thread of four warps;
// tiles have 64 keys. Two thread blocks share a multiprocessor and its tensor memory, so that the MMAs of one thread
// block run during the softmax of the other.
//
//   softmax        Warps 0 to 3. Thread i has query i: it reads row i of S from tensor memory, computes P, rescales O,
//                  and writes the output.
//   producer       Warp 4: its elected lane copies Q, and tiles of K and V.
//   products       Warp 5: its elected lane issues S = Q K^T and O += P V. The warp allocates the tensor memory.
//   keys, values   Pipelines from the producer to the products warp.
//   scores         Pipeline of one stage, for S in tensor memory, from the products warp to the softmax. A thread keeps
//                  its row in registers, so that the next S is computed during the softmax of the current S.
//   probabilities  Pipeline of two stages, for P in shared memory, from the softmax to the products warp. An empty
//                  stage also means that O += P V of its step is complete.
//
//   producer   Q K0 V0|K1 V1|K2 V2|..
//   products          |S0|      S1|          |PV0|S2      |PV1 ..
//   softmax              |read S0|softmax 0, P0  |read S1|softmax 1, P1 ..
#pragma once

#include <concepts>

#include <sage/attention/mainloop/forward_sm80.cuh>
#include <sage/tile/pipeline.cuh>
#include <sage/params/plans.cuh>
#include <sage/ptx/tcgen05.cuh>

namespace sage::attention {

using tile::Pipeline;

struct ForwardSm100Warps {
  static constexpr int SOFTMAX = 4, PRODUCER = 4, PRODUCTS = 5, ALL = 6;
};

// The columns of tensor memory that a thread block allocates: half of the multiprocessor's columns. A third thread
// block would wait until another frees its columns, even if registers and shared memory had room for it.
constexpr int FORWARD_SM100_COLUMNS = 256;

template <int STAGES>
struct ForwardSm100Barriers {
  typename Pipeline<STAGES>::Barriers keys, values;
  Pipeline<1>::Barriers scores;
  Pipeline<2>::Barriers probabilities;
  uint64_t queries;  // completes when Q and its scales are in shared memory
};

template <int STAGES>
struct ForwardSm100Pipelines {
  Pipeline<STAGES> keys, values;
  Pipeline<1> scores;
  Pipeline<2> probabilities;
  uint32_t queries;

  __device__ __forceinline__ explicit ForwardSm100Pipelines(const ForwardSm100Barriers<STAGES>& at)
      : keys(at.keys), values(at.values), scores(at.scores), probabilities(at.probabilities), queries(ptx::shared_address(&at.queries)) {}

  // Initializes all mbarriers; one thread calls it.
  __device__ __forceinline__ void prepare(int query_arrivals) const {
    keys.prepare(1, 1), values.prepare(1, 1);
    scores.prepare(1, ForwardSm100Warps::SOFTMAX), probabilities.prepare(ForwardSm100Warps::SOFTMAX, 1);
    ptx::mbarrier_init(queries, query_arrivals);
  }
};

// What the mainloop requires of its numerics. `tensor` is the tensor memory address of the first allocated column. Its
// lane is 0 for MMAs, and the first of the calling warp's 32 lanes for `Row::read`.
template <class N>
concept ForwardSm100Numerics = requires(N numerics, const params::Forward& p, const ForwardBlock& block, unsigned char* shared,
                                        uint32_t mbarrier, uint32_t tensor, typename N::Row row) {
  typename N::Type;
  requires N::D % 64 == 0;  // the padded head_dim
  requires N::THREADS == ForwardSm100Warps::ALL * 32 && N::STAGES >= 2;
  requires N::OUTPUT_AT % 32 == 0 && N::OUTPUT_AT + N::D <= FORWARD_SM100_COLUMNS;  // O's first tensor memory column
  requires N::QUERY_ARRIVALS >= 1;  // arrivals at the queries' mbarrier in load_queries and all calls of store_queries
  N(p, block, shared);
  // load_queries (producer): copies Q's values. store_queries (each softmax thread): copies its query's scales.
  numerics.load_queries(mbarrier);
  numerics.store_queries(mbarrier);
  // Issue the copies of a tile into a stage.
  numerics.load_keys(0, 0, mbarrier);
  numerics.load_values(0, 0, mbarrier);
  // start: prepares for the first MMA. multiply: issues S of a stage's keys. add: issues O += P V (O = P V in step 0),
  // from a stage's values and a step's P.
  numerics.start(tensor);
  numerics.multiply(tensor, 0);
  numerics.add(tensor, 0, 0);
  // A Row has the softmax state of a thread's query. read: reads the query's row of S. follow: lets row.reference
  // follow the running maximum, and returns whether O must be rescaled by row.decay. make_probabilities: computes P.
  row.read(tensor);
  { row.template follow<OUTER_KEYS>(p, 0, 0) } -> std::same_as<bool>;
  row.make_probabilities();
  numerics.store_probabilities(row, 0);
  { row.sum + row.reference + row.decay } -> std::same_as<float>;
};

template <class Numerics, class Block, class Pipelines>
__device__ __forceinline__ void produce_sm100(Numerics& numerics, const Block& block, const Pipelines& pipelines, int steps) {
  if (ptx::elect()) numerics.load_queries(pipelines.queries);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    int tile = block.template number<1>(step), stage = pipelines.keys.stage(step);
    pipelines.keys.wait_empty(step);
    if (ptx::elect()) numerics.load_keys(tile, stage, pipelines.keys.full(step));
    pipelines.values.wait_empty(step);
    if (ptx::elect()) numerics.load_values(tile, stage, pipelines.values.full(step));
  }
  // Arrivals after this thread block's end would write to the shared memory of another thread block.
  pipelines.keys.drain(steps);
  pipelines.values.drain(steps);
}

// The products warp. `multiply` may overwrite the previous step's S and key scales in tensor memory, because
// scores.wait_empty waits until all softmax threads have read that S. So the MMA that used these scales is complete.
template <class Numerics, class Pipelines>
__device__ __forceinline__ void issue_products(Numerics& numerics, const Pipelines& pipelines, uint32_t tensor, int steps) {
  auto add = [&](int step) {
    pipelines.values.wait(step);
    pipelines.probabilities.wait(step);
    ptx::tcgen05_fence_after();
    if (ptx::elect()) {
      numerics.add(tensor, pipelines.values.stage(step), step);
      ptx::tcgen05_commit(pipelines.values.empty(step));
      ptx::tcgen05_commit(pipelines.probabilities.empty(step));
    }
  };
  ptx::mbarrier_wait(pipelines.queries, 0);
  ptx::tcgen05_fence_after();
  if (ptx::elect()) numerics.start(tensor);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    pipelines.keys.wait(step);
    pipelines.scores.wait_empty(step);
    ptx::tcgen05_fence_after();
    if (ptx::elect()) {
      numerics.multiply(tensor, pipelines.keys.stage(step));
      ptx::tcgen05_commit(pipelines.keys.empty(step));
      ptx::tcgen05_commit(pipelines.scores.full(step));
    }
    if (step > 0) add(step - 1);
  }
  add(steps - 1);
}

// Multiplies the calling warp's rows of O by the threads' `decay`.
template <class Numerics>
__device__ __forceinline__ void rescale_output(uint32_t warp_tensor, float decay) {
#pragma unroll 1
  for (int column = 0; column < Numerics::D; column += 32) {
    float x[32];
    ptx::tcgen05_load(x, warp_tensor + Numerics::OUTPUT_AT + column);
#pragma unroll
    for (float& value : x) value *= decay;
    ptx::tcgen05_store(warp_tensor + Numerics::OUTPUT_AT + column, x);
  }
}

// The loop of a softmax thread, which processes one `query`. `warp_tensor` is the address of the first tensor memory
// lane that the thread's warp can access.
template <class Numerics, class Block, class Pipelines>
__device__ __forceinline__ void online_softmax(Numerics& numerics, typename Numerics::Row& row, const params::Forward& p,
                                               const Block& block, const Pipelines& pipelines, uint32_t warp_tensor, int query, int steps) {
  numerics.store_queries(pipelines.queries);
  // In steps `hidden` to `whole - 1` all queries of the warp see the tile completely.
  int visible = block.visible(query), first = 0, whole = __shfl_sync(~0u, visible, 0) / TILE;
  int hidden = 0;  // number of steps with keys before the window of a query of the warp
  if constexpr (Block::HIDDEN == OUTER_KEYS)
    first = block.hidden(query), hidden = hidden_steps(block, query - int(threadIdx.x % 32), 32, TILE);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    pipelines.scores.wait(step);
    ptx::tcgen05_fence_after();
    row.read(warp_tensor);
    ptx::tcgen05_fence_before();
    pipelines.scores.release(step);
    bool behind = hidden <= step && step < whole ? row.template follow<NO_KEYS>(p, 0, 0)
                                                  : row.template follow<Block::HIDDEN>(p, first - step * TILE, visible - step * TILE);
    if (__any_sync(~0u, behind) && step > 0) {
      pipelines.probabilities.wait_empty(step + 1);  // waits until O += P V of step - 1 is complete
      ptx::tcgen05_fence_after();
      rescale_output<Numerics>(warp_tensor, row.decay);
    }
    row.make_probabilities();
    pipelines.probabilities.wait_empty(step);
    numerics.store_probabilities(row, step);
    ptx::fence_proxy_async();
    ptx::tcgen05_fence_before();
    pipelines.probabilities.publish(step);
  }
}

// The epilogue of a softmax thread: writes its query's output and log-sum-exp.
template <class Numerics, class Block>
__device__ __forceinline__ void store_sm100(const params::Forward& p, const Block& block, const typename Numerics::Row& row,
                                            uint32_t warp_tensor, int query, int steps) {
  using T = typename Numerics::Type;
  const params::Shape& shape = p.shape;
  const Segment& segment = block.segment;
  bool sees = Sight<Block::HIDDEN>(segment, p).visible_keys(query) > 0;
  // Only a query that sees no key gets an output of zeros. A sum that is 0 for any other reason gives NaN.
  float inverse = sees ? 1.0f / row.sum : 0.0f, with_sink = 0.0f;
  if (p.sinks && sees) {
    with_sink = log2_with_sink(__ldg(p.sinks + block.head) * ptx::LOG2_E, row.reference + log2f(row.sum));
    inverse *= ptx::exp2(-with_sink);
  }
  Rows<T> out(p.out, segment.batch, segment.query_start, block.head, min(segment.query_len, block.end), shape.value_dim);
#pragma unroll 1
  for (int column = 0; column < Numerics::D; column += 32) {
    float x[32] = {};
    if (steps > 0) ptx::tcgen05_load(x, warp_tensor + Numerics::OUTPUT_AT + column);
#pragma unroll
    for (int i = 0; i < 32; i += 8) {
      float eight[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) eight[c] = sees ? x[i + c] * inverse : 0.0f;
      out.store_8(query, column + i, pack_8<T>(eight));
    }
  }
  if (query < block.end && p.minus_lse2) {
    int64_t padded = (int64_t(block.head) * shape.query_tiles + segment.query_tile) * TILE;
    p.minus_lse2[padded + query] = query < segment.query_len && sees ? -(row.reference + log2f(row.sum) + with_sink) : -CUDART_INF_F;
  }
}

template <ForwardSm100Numerics Numerics, class Block = EveryKey>
__device__ __forceinline__ void forward_sm100(const params::Forward& p) {
  static_assert(!params::facts(params::FORWARD_SM100).persistent);
  using Warps = ForwardSm100Warps;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Block block;
  __shared__ ForwardSm100Barriers<Numerics::STAGES> barriers;
  __shared__ uint32_t allocated;
  int warp = ptx::uniform(threadIdx.x / 32);
  ForwardSm100Pipelines<Numerics::STAGES> pipelines(barriers);
  if (threadIdx.x == 0) {
    block = Block(p, blockIdx.x, FORWARD_QUERIES);
    pipelines.prepare(Numerics::QUERY_ARRIVALS);
  }
  __syncthreads();
  if (block.first >= block.end) return;
  if (warp == Warps::PRODUCTS) ptx::tcgen05_alloc<FORWARD_SM100_COLUMNS>(ptx::shared_address(&allocated));
  ptx::tcgen05_fence_before();
  __syncthreads();
  ptx::tcgen05_fence_after();
  uint32_t tensor = allocated;
  int steps = (block.visible(block.last_of(block.first, FORWARD_QUERIES)) + TILE - 1) / TILE;

  Numerics numerics(p, block, shared);
  if (warp < Warps::SOFTMAX) {
    typename Numerics::Row row;
    int query = block.first + threadIdx.x;
    uint32_t warp_tensor = tensor + (uint32_t(warp * 32) << 16);
    if (steps > 0) {
      online_softmax(numerics, row, p, block, pipelines, warp_tensor, query, steps);
      pipelines.probabilities.drain(steps);
      ptx::tcgen05_fence_after();
    }
    store_sm100<Numerics>(p, block, row, warp_tensor, query, steps);
    ptx::tcgen05_fence_before();
  } else if (steps > 0) {
    if (warp == Warps::PRODUCER) produce_sm100(numerics, block, pipelines, steps);
    else issue_products(numerics, pipelines, tensor, steps);
  }
  __syncthreads();
  ptx::tcgen05_fence_after();
  if (warp == Warps::PRODUCTS) ptx::tcgen05_dealloc<FORWARD_SM100_COLUMNS>(tensor);
}

}  // namespace sage::attention
