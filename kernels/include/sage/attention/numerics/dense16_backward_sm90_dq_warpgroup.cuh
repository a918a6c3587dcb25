// The backward of dense16_backward_sm80.cuh on Hopper, with 16-bit operands, for head_dim up to 64. Q, dO and dS^T are
// in shared memory once each: a matmul that sums over the rows of an operand reads this operand through a transposed
// descriptor. K and V are A operands in registers: a 64 x 64 wgmma with both operands in shared memory would be limited
// by reading them.
#pragma once

#include <sage/attention/mainloop/backward_sm90_dq_warpgroup.cuh>
#include <sage/attention/numerics/dense16_tiles_sm90.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, params::Plan PLAN, class P = PlainProbabilities, class Source = ScoresOfRows<T, HEAD_DIM>,
          class Mod = NoScoreMod>
struct Dense16BackwardSm90DqWarpgroup : Dense16TilesSm90<T, HEAD_DIM, PLAN, P, Source> {
  using Tiles = Dense16TilesSm90<T, HEAD_DIM, PLAN, P, Source>;
  using Tiles::D, Tiles::K_BYTES, Tiles::Q_BYTES, Tiles::K_CODES_AT, Tiles::Q_CODES_AT, Tiles::STATE_AT;
  using Tiles::p, Tiles::block, Tiles::shared, Tiles::stage_at, Tiles::ds_rows;
  using typename Tiles::S;
  static_assert(PLAN.mainloop == params::BACKWARD_SM90_DQ_WARPGROUP);
  using Tiles::Tiles;
  static constexpr int STAGING_AT = Tiles::DQ_AT, CONSUMER_REGISTERS = 208;
  static_assert(CONSUMERS_KEEP_DK<D> && STAGING_BYTES<D> == Tiles::DQ_BYTES);

  // Number of arrivals at a tile's mbarrier: S::ARRIVALS by the thread that issues bulk copies, and, without tensor
  // maps, one by each thread that copies rows of Q and dO.
  static __device__ __forceinline__ int fetching(const params::Backward& p) {
    return S::ARRIVALS + (p.dout.mapped ? 0 : WARPGROUP_THREADS);
  }
  __device__ __forceinline__ void load(const QueryTile& tile, int stage, int thread, uint32_t mbarrier) {
    const Segment& s = block.segment;
    uint32_t at = shared + stage_at(stage);
    int first = tile.tile * TILE;
    if (thread == 0) this->template load_by_bulk<OverEnd::WRONG>(tile, stage, p.dout.mapped, mbarrier);
    if (p.dout.mapped) return;
    Rows<T> q(p.q, s.batch, s.query_start, tile.head, s.query_len, p.shape.head_dim);
    Rows<T> dout(p.dout, s.batch, s.query_start, tile.head, s.query_len, p.shape.value_dim);
    copy_panels<TILE, D, WARPGROUP_THREADS>(at, q, first, thread);
    copy_panels<TILE, D, WARPGROUP_THREADS>(at + Q_BYTES, dout, first, thread);
    ptx::mbarrier_arrive_on_copies(mbarrier, q.vector && dout.vector);
  }

  struct KeyConsumer {
    const Dense16BackwardSm90DqWarpgroup& of;
    int warpgroup;
    float k_factor;
    [[no_unique_address]] Mod score_mod;
    float dv[D / 8][4] = {}, dk[D / 8][4] = {};
    typename S::KeyFragments k;
    uint32_t v[D / 16][4];
    typename S::Sums sums;  // accumulators of S^T, which is issued one tile ahead

    __device__ __forceinline__ KeyConsumer(const Dense16BackwardSm90DqWarpgroup& numerics, int warpgroup)
        : of(numerics), warpgroup(warpgroup), k_factor(S::k_factor(numerics.p, numerics.block, warpgroup)),
          score_mod(numerics.p, first_query_head(numerics.p, numerics.block)) {
      int first = warpgroup * CONSUMER_KEYS + threadIdx.x / 32 % 4 * 16;
      S::read_keys(k, of.shared, of.shared + K_CODES_AT, first);
      read_rows<128>(v, of.shared + K_BYTES, first);
    }

    __device__ __forceinline__ void start(int stage) {
      uint32_t at = of.shared + stage_at(stage);
      S::start(sums, k, at, at + Q_CODES_AT);
    }
    __device__ __forceinline__ void end() { ptx::wgmma_wait<0>(sums); }

    template <Hidden HIDDEN, class Handover>
    __device__ __forceinline__ void scores(int tile, int stage, int slot, Masked<HIDDEN> masked, const Handover& handover) {
      int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16;
      uint32_t at = of.shared + stage_at(stage);
      const float* state = of.state(stage);
      // dP^T - delta = V dO^T - delta. -delta is read while S^T is in flight, but the accumulator is set to -delta only
      // after the wait: otherwise ptxas would insert a wait for the wgmma in flight.
      ColumnValues minus_delta(state + TILE, lane);
      ptx::wgmma_wait<0>(sums);
      Scores s, dp;
      minus_delta.set(dp);
      multiply_rows<T, true>(dp, v, at + Q_BYTES);
      ColumnValues minus_lse2(state, lane);
      of.make_probabilities(s, sums, minus_lse2, S::factor_at(k_factor, state + Tiles::STATE_VALUES), tile, warpgroup, masked, score_mod);
      // Quantizing P takes long, so it comes after dS, for which the dQ warpgroup waits.
      constexpr bool QUANTIZES = P::WARP_BYTES > 0;
      uint32_t probabilities[4][4], ds[4][4];
      auto pack = [&] { P::template pack_transposed<T>(probabilities, s, of.scales(), lane); };
      // dV += P^T dO
      auto add_dv = [&] { add_product<T, D>(dv, probabilities, at + Q_BYTES); };
      P::make_scales(s, state + 2 * TILE, of.scales(), lane);
      ptx::wgmma_wait<0>(dp);
      if constexpr (!QUANTIZES) pack();
      // dS = P o (dP - delta)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dp[n][e] *= s[n][e];
      score_mod.chain(dp);
      if constexpr (!QUANTIZES) add_dv();
      pack_scores<T>(ds, dp);
      handover.acquire_slot();
      store_packed(of.ds_rows(slot, warpgroup) + row * TILE * 2, ds, lane);
      ptx::fence_proxy_async();
      handover.publish_dq_operands();
      if constexpr (QUANTIZES) {
        pack();
        add_dv();
      }
      // dK += dS^T Q
      add_product<T, D>(dk, ds, at);
      handover.start_next();
      ptx::wgmma_wait<1>(dv);
      ptx::fence_operand(dk);
    }
  };

  struct DqConsumer {
    const Dense16BackwardSm90DqWarpgroup& of;
    float y[D / 8][4];

    __device__ __forceinline__ explicit DqConsumer(const Dense16BackwardSm90DqWarpgroup& numerics) : of(numerics) {}

    // Issues dQ = dS K.
    __device__ __forceinline__ void start(int slot) { multiply_keys<T>(y, of.ds_rows(slot, 0), of.shared); }
    template <class Sums, class Read>
    __device__ __forceinline__ void add_dq(int padded_tile, int, const Sums& sums, Read read) {
      ptx::wgmma_wait<0>(y);
      sums.template add<D>(padded_tile, threadIdx.x / 32 % 4, 0, threadIdx.x % 32, y);
      read();
    }
  };
};

}  // namespace sage::attention
