// The backward of dense16_backward_sm80.cuh on Hopper, with 16-bit operands, for head_dim above 64 and up to 128. K, Q,
// dO and dS^T are in shared memory once each: a matmul that sums over the rows of an operand reads this operand through
// a transposed descriptor.
#pragma once

#include <sage/attention/numerics/dense16_tiles_sm90.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, params::Plan PLAN, class P = PlainProbabilities, class Source = ScoresOfRows<T, HEAD_DIM>,
          class Mod = NoScoreMod>
struct Dense16BackwardSm90 : Dense16TilesSm90<T, HEAD_DIM, PLAN, P, Source> {
  using Tiles = Dense16TilesSm90<T, HEAD_DIM, PLAN, P, Source>;
  using Tiles::D, Tiles::K_BYTES, Tiles::Q_BYTES, Tiles::K_CODES_AT, Tiles::Q_CODES_AT, Tiles::STATE_AT, Tiles::DQ_AT;
  using Tiles::p, Tiles::block, Tiles::shared, Tiles::stage_at, Tiles::ds_rows;
  using typename Tiles::S;
  static_assert(PLAN.mainloop == params::BACKWARD_SM90);
  using Tiles::Tiles;
  static constexpr int DQ_PART_BYTES = Tiles::DQ_BYTES / CONSUMERS;
  static constexpr int ARRIVALS = S::ARRIVALS;

  // Issues the copies of a tile, by the producer warp. One lane copies through the tensor maps. If no maps exist, or if
  // a document ends inside the tile (zeros must follow, but a map reads the next document), all lanes copy Q and dO.
  __device__ __forceinline__ void load(const QueryTile& tile, int stage, uint32_t mbarrier) {
    const Segment& s = block.segment;
    int first = tile.tile * TILE, lane = threadIdx.x % 32;
    bool mapped = p.dout.mapped && (!p.shape.segments || first + TILE <= s.query_len);
    if (!mapped) {
      // A loop over Q and dO that is not unrolled, because the producer has few registers.
#pragma unroll 1
      for (int i = 0; i < 2; ++i)
        copy_panels_by_warp<D>(shared + stage_at(stage) + i * Q_BYTES,
                               Rows<T>(i == 0 ? p.q : p.dout, s.batch, s.query_start, tile.head, s.query_len,
                                       i == 0 ? p.shape.head_dim : p.shape.value_dim),
                               first, lane);
      ptx::cp_async_wait_all();
      ptx::fence_proxy_async();
      __syncwarp();
    }
    if (lane == 0) this->template load_by_bulk<OverEnd::HARMLESS>(tile, stage, mapped, mbarrier);
  }

  struct Consumer {
    const Dense16BackwardSm90& of;
    int warpgroup;
    float k_factor;
    [[no_unique_address]] Mod score_mod;
    float dv[D / 8][4] = {}, dk[D / 8][4] = {};

    __device__ __forceinline__ Consumer(const Dense16BackwardSm90& numerics, int warpgroup)
        : of(numerics), warpgroup(warpgroup), k_factor(S::k_factor(numerics.p, numerics.block, warpgroup)),
          score_mod(numerics.p, first_query_head(numerics.p, numerics.block)) {}

    template <Hidden HIDDEN>
    __device__ __forceinline__ void visit(int tile, int stage, int slot, Masked<HIDDEN> masked) {
      int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
      uint32_t at = of.shared + stage_at(stage);
      const float* state = of.state(stage);
      // Log-sum-exps and deltas are read before any wgmma is issued: while wgmmas read shared memory, a load from it
      // takes hundreds of clocks. The accumulator of dP^T - delta is set to -delta before the wgmmas of S^T are issued:
      // otherwise ptxas would insert a wait for these wgmmas.
      typename S::Sums sums;
      Scores s, dp;
      ColumnValues(state + TILE, lane).set(dp);
      ColumnValues minus_lse2(state, lane);
      float factor = S::factor_at(k_factor, state + Tiles::STATE_VALUES);
      ptx::fence_operand(dp);
      S::template start<SM90_KEYS>(sums, of.shared, at, of.shared + K_CODES_AT, at + Q_CODES_AT, warpgroup);
      multiply_rows<T, D, SM90_KEYS, true>(dp, of.shared + K_BYTES + warpgroup * CONSUMER_KEYS * 128, at + Q_BYTES);
      ptx::wgmma_wait<1>(sums);
      of.make_probabilities(s, sums, minus_lse2, factor, tile, warpgroup, masked, score_mod);
      uint32_t probabilities[4][4], ds[4][4];
      P::make_scales(s, state + 2 * TILE, of.scales(), lane);
      P::template pack_transposed<T>(probabilities, s, of.scales(), lane);
      score_mod.chain(s);
      // dS = P o (dP - delta)
      ptx::wgmma_wait<0>(dp);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e];
      pack_scores<T>(ds, s);
      // dS^T is stored before the wgmmas of dV are issued, because their reads of shared memory would delay the store.
      store_packed(of.ds_rows(slot, warpgroup) + warp * 16 * TILE * 2, ds, lane);
      // dV += P^T dO
      add_product<T, D>(dv, probabilities, at + Q_BYTES);
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);
      float dq[D / 8 / CONSUMERS][4];
      static_assert(D / CONSUMERS == 64, "a panel for each warpgroup");
      multiply_keys<T>(dq, of.ds_rows(slot, 0), of.shared + warpgroup * SM90_KEYS * 128);
      // dK += dS^T Q
      add_product<T, D>(dk, ds, at);
      ptx::wgmma_wait<1>(dq);
      ptx::fence_operand(dv);
      hand_over(dq, lane, warp);
      ptx::wgmma_wait<0>(dk);
    }

    // Stages this consumer's channels of dQ in shared memory, from where the storer warp adds them to global memory.
    __device__ __forceinline__ void hand_over(const float (&dq)[D / 8 / CONSUMERS][4], int lane, int warp) {
      constexpr int N = D / 8 / CONSUMERS;
      ptx::named_barrier_sync(DQ_EMPTY + warpgroup, DQ_THREADS);
      uint32_t to = of.shared + DQ_AT + warpgroup * DQ_PART_BYTES + warp * (N * 512) + lane * 16;
#pragma unroll
      for (int n = 0; n < N; ++n)
        ptx::store_16(to + n * 512, make_uint4(__float_as_uint(dq[n][0]), __float_as_uint(dq[n][1]), __float_as_uint(dq[n][2]),
                                               __float_as_uint(dq[n][3])));
      ptx::fence_proxy_async();
      ptx::named_barrier_arrive(DQ_FULL + warpgroup, DQ_THREADS);
    }
  };
};

}  // namespace sage::attention
