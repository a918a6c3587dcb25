// The backward mainloop for Hopper at head_dim above 128. S is in 16 bit or INT8, all other matmuls in 16 bit. A thread
// block has 128 keys of one key head, and one of two parts of the channels, because the registers of a warpgroup can
// store dK and dV of only 64 keys and 128 channels. The thread block computes dK and dV of the keys, and the keys'
// contribution to dQ for each tile of 64 queries that sees the keys. S and dP are sums over all channels. The thread
// blocks of both parts compute S and dP, so there are seven matmuls instead of five. The warpgroups have different
// tasks.
//
//   consumers     Two warpgroups have 64 keys each, whose dV and dK stay in registers. They compute S, dP, P, dS, dV
//                 and dK of these keys. dQ sums over all 128 keys; each consumer computes half of the part's
//                 channels of dQ, and adds them to the sums in global memory.
//   producer      Warp 0 of the third warpgroup copies Q and the row state (log-sum-exp, delta) of each tile into a
//                 stage of a pipeline, and dO into the next stage, so that Q and dO are released separately: at
//                 head_dim 256 shared memory has no room for two tiles of queries in addition to K and V.
//   ALL_CONSUMERS Named barrier: dS^T of a tile is in shared memory.
//   DQ_ORDERED    Named barrier, at which in deterministic mode the consumers wait for their thread block's turn to add
//                 to dQ of each tile of queries.
//
// dK is the last matmul that reads Q, dV the last that reads dO. dK comes first: Q of the next tile is copied while dV
// and dQ are computed, dO of the next tile while dQ and the next S are computed. wgmmas are asynchronous: they run
// while later instructions execute. Timeline with one tile in shared memory:
//
//   producer    |Q of tile i, dO of i ..                                                |Q of i + 1    |dO of i + 1
//   consumer 0  |S issued|dP issued|P|dS|dS stored|dK issued|dV issued|barrier|dQ issued|dK ends       |dV ends    |dQ added|S of i + 1 ..
//   consumer 1  |S issued|dP issued|P|dS|dS stored|dK issued|dV issued|barrier|dQ issued|dK ends       |dV ends    |dQ added|S of i + 1 ..
#pragma once

#include <sage/attention/mainloop/backward_sm90.cuh>

namespace sage::attention {

constexpr int DQ_ORDERED = 2;  // the id of a named barrier (ALL_CONSUMERS has id 1)

// How the channels of K and V, in panels of 64, are divided into two parts. Q and K have D channels, and values have V.
// The first part has two panels of K, and the second part has the rest of K. The second part has two panels of V, and
// the first part has the rest of V. Both parts then have about the same number of matmuls. A part has at most two
// panels of dK and at most two of dV.
template <int D, int V>
struct ChannelParts {
  static constexpr int COUNT = 2, LEFT_OF_K = D / 64 - 2, LEFT_OF_V = V / 64 - 2;
  static_assert(COUNT == params::channel_parts(params::BACKWARD_SM90_CHANNEL_PARTS, D));
  static_assert(0 < LEFT_OF_K && LEFT_OF_K <= 2 && 0 <= LEFT_OF_V && LEFT_OF_V <= 2);
};

// What this mainloop requires of its numerics N, and of N::Consumer<K_PANELS, V_PANELS>. N defines the layout of shared
// memory. A Consumer is the state that a consumer keeps in registers: dK of K_PANELS consecutive panels of 64 channels,
// and dV of V_PANELS panels. A tile has two pieces, Q and dO; piece n of the pipeline belongs to tile n / 2.
template <class N, class Consumer = typename N::template Consumer<2, N::Parts::LEFT_OF_V>>
concept BackwardSm90ChannelPartsNumerics =
    BackwardTilesSm90<N> &&
    requires(N numerics, const QueryTile& tile, const typename N::Pieces& pieces, Consumer consumer, const DqAccumulator& sums) {
      requires std::is_same_v<typename N::Pieces, Pipeline<2 * N::STAGES>>;
      requires N::ARRIVALS >= 1;  // how often the producer arrives at a piece's mbarrier
      // load_queries(tile, stage, mbarrier) issues the copies of a tile's Q and row state (log-sum-exp, delta, ..).
      // load_gradients issues the copies of the tile's dO. The producer calls both.
      numerics.load_queries(tile, 0, 0u);
      numerics.load_gradients(tile, 0, 0u);
      (Consumer(numerics, 0, 0, 0));  // numerics, the consumer's number, its first panel of dK, its first panel of dV
      // visit(pieces, index among the visited tiles, the tile's number in the segment, its number in the padded
      // buffers, masked, sums): waits for a tile's pieces (Q and dO), computes all matmuls, and releases the pieces.
      consumer.visit(pieces, 0, 0, 0, Masked<OUTER_KEYS>{}, sums);
      consumer.score_mod.next_head();  // score_mod: a policy of numerics/score_mod.cuh
      // store_gradients<Queries>(the warp's first key): writes dK and dV.
      consumer.template store_gradients<EveryQuery>(0);
    };

template <class Consumer, class Numerics, class Queries>
__device__ __forceinline__ void visit_tiles(const params::Backward& p, const Numerics& numerics, const BackwardBlock& block,
                                            const Queries& queries, const typename Numerics::Pieces& pieces,
                                            const MaskedTiles<Queries::HIDDEN>& masked, int warpgroup, int k_panel, int v_panel) {
  constexpr int PARTS = Numerics::Parts::COUNT;
  Consumer consumer(numerics, warpgroup, k_panel, v_panel);
  DqAccumulator sums{p.dq_accum, p.dq_semaphore, block.first_key / SM90_KEYS * PARTS + block.channel_part, 0, CONSUMER_THREADS,
                     DQ_ORDERED};
  typename Queries::Tile tile = queries.start();
  int number = queries.first;  // the query tile's index in the segment (with a selection: see ListedQueries)
#pragma unroll 1
  for (int i = 0; i < queries.count; ++i) {
    int padded = sums.set_order(queries.added(tile), PARTS);
    consumer.visit(pieces, i, number, padded, masked.of(number, warpgroup), sums);
    queries.advance(tile);
    if (++number == queries.end) number = queries.first, consumer.score_mod.next_head();
  }
  consumer.template store_gradients<Queries>(block.first_key + threadIdx.x / 32 * 16);
}

template <BackwardSm90ChannelPartsNumerics Numerics, class Queries = EveryQuery>
__device__ __forceinline__ void backward_sm90_channel_parts(const params::Backward& p) {
  using Parts = typename Numerics::Parts;
  using Pieces = typename Numerics::Pieces;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ BackwardBlock block;
  int index = backward_index<params::BACKWARD_SM90_CHANNEL_PARTS>(p);
  __shared__ MaskedTiles<Queries::HIDDEN> masked;
  __shared__ typename Pieces::Barriers barriers;
  Pieces pieces(barriers);
  prepare_keys<Queries, Parts::COUNT>(p, index, pieces, Numerics::ARRIVALS, CONSUMER_THREADS / 32, block, masked);
  if (block.first_key >= block.segment.key_len) return;
  Queries queries(p, block, SM90_KEYS);
  Numerics numerics(p, block, shared);
  int warpgroup = ptx::uniform(threadIdx.x / WARPGROUP_THREADS);

  if (warpgroup == CONSUMERS) {
    ptx::setmaxnreg<PRODUCER_REGISTERS, SM90_THREADS>();
    if (ptx::uniform(threadIdx.x / 32 % 4) > 0) return;
    typename Queries::Tile tile = queries.start();
#pragma unroll 1
    for (int i = 0; i < queries.count; ++i) {
      int stage = Pieces::stage(2 * i) / 2;
      __syncwarp();  // if Numerics::STAGES is 1, no lane may be two tiles ahead of another
      pieces.wait_empty(2 * i);
      numerics.load_queries(tile, stage, pieces.full(2 * i));
      pieces.wait_empty(2 * i + 1);
      numerics.load_gradients(tile, stage, pieces.full(2 * i + 1));
      queries.advance(tile);
    }
  } else {
    ptx::setmaxnreg<KV_CONSUMER_REGISTERS, SM90_THREADS>();
    fetch_keys<ALL_CONSUMERS>(numerics);
    // If both parts have two panels of K and two of V, they use the same Consumer.
    using First = typename Numerics::template Consumer<2, Parts::LEFT_OF_V>;
    using Second = typename Numerics::template Consumer<Parts::LEFT_OF_K, 2>;
    int part = block.channel_part;
    auto visit = [&]<class Consumer>() {
      visit_tiles<Consumer>(p, numerics, block, queries, pieces, masked, warpgroup, part * 2, part * Parts::LEFT_OF_V);
    };
    if (std::is_same_v<First, Second> || part == 0) visit.template operator()<First>();
    else visit.template operator()<Second>();
  }
}

}  // namespace sage::attention
