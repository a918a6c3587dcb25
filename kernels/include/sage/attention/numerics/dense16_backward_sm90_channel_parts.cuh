// The backward with 16-bit operands and f32 accumulators on Hopper, for head_dim above 128. The channels are divided
// into two parts; a thread block computes dQ, dK and dV of one part. Values may have fewer channels than keys. S may be
// an INT8 matmul. In that case a thread block loads only its part's channels of K and Q in 16 bit.
#pragma once

#include <sage/attention/mainloop/backward_sm90_channel_parts.cuh>
#include <sage/attention/numerics/dense16_tiles_sm90.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, params::Plan PLAN, class Source = ScoresOfRows<T, HEAD_DIM>, int VALUE_DIM = HEAD_DIM,
          class Mod = NoScoreMod>
struct Dense16BackwardSm90ChannelParts : Dense16TilesSm90<T, HEAD_DIM, PLAN, PlainProbabilities, Source, VALUE_DIM> {
  using Tiles = Dense16TilesSm90<T, HEAD_DIM, PLAN, PlainProbabilities, Source, VALUE_DIM>;
  using Tiles::D, Tiles::V, Tiles::CHANNELS, Tiles::K_BYTES, Tiles::Q_BYTES, Tiles::K_CODES_AT, Tiles::Q_CODES_AT, Tiles::STATE_AT;
  using Tiles::p, Tiles::block, Tiles::shared, Tiles::ds_rows, Tiles::stage_at;
  using typename Tiles::S;
  using Parts = ChannelParts<D, V>;
  using Pieces = Pipeline<2 * Tiles::STAGES>;
  static_assert(PLAN.mainloop == params::BACKWARD_SM90_CHANNEL_PARTS);
  using Tiles::Tiles;

  static constexpr int ARRIVALS = S::ARRIVALS;

  // Called by the producer warp. load_queries issues the copies of a tile's 16-bit Q, of its INT8 Q if S needs
  // it, and of its row state. load_gradients issues the copies of the tile's dO (see load_rows).
  __device__ __forceinline__ void load_queries(const QueryTile& tile, int stage, uint32_t mbarrier) {
    constexpr int STATE_BYTES = TILE * 4;
    uint32_t at = shared + stage_at(stage), state = at + STATE_AT;
    int64_t rows = int64_t(tile.padded) * TILE;
    if (load_rows<CHANNELS>(p.q, p.q_map, p.shape.head_dim, this->first_channel(), tile, at, S::BULK_BYTES + 2 * STATE_BYTES, mbarrier)) {
      S::load_by_bulk(at + Q_CODES_AT, state + Tiles::STATE_VALUES * 4, p, tile, mbarrier);
      ptx::cp_async_bulk(state, p.minus_lse2 + rows, STATE_BYTES, mbarrier);
      ptx::cp_async_bulk(state + STATE_BYTES, p.minus_delta + rows, STATE_BYTES, mbarrier);
    }
  }
  __device__ __forceinline__ void load_gradients(const QueryTile& tile, int stage, uint32_t mbarrier) {
    if (load_rows<V>(p.dout, p.dout_map, p.shape.value_dim, 0, tile, shared + stage_at(stage) + Q_BYTES, 0, mbarrier) && ARRIVALS > 1)
      ptx::mbarrier_arrive(mbarrier);  // the second of ARRIVALS; for Q, S::load_by_bulk arrives
  }
  // Copies COUNT channels of a tile, from `channel` on. If a tensor map exists and no document ends inside the tile,
  // lane 0 copies through the map. Otherwise all lanes copy: at a document's end, a map would copy the next document's
  // rows instead of zeros. Lane 0 arrives at `mbarrier`, which then expects `more` bytes in addition to those copied
  // through the map. Returns whether the calling thread is lane 0.
  template <int COUNT>
  __device__ __forceinline__ bool load_rows(const params::View& view, const params::TensorMap& map, int head_dim, int channel,
                                            const QueryTile& tile, uint32_t to, int more, uint32_t mbarrier) {
    const Segment& s = block.segment;
    int first = tile.tile * TILE, lane = threadIdx.x % 32;
    bool mapped = p.dout.mapped && (!p.shape.segments || first + TILE <= s.query_len);
    if (!mapped) {
      Rows<T> rows(view, s.batch, s.query_start, tile.head, s.query_len, head_dim);
      rows.skip_channels(channel);
      copy_panels_by_warp<COUNT>(to, rows, first, lane);
      ptx::cp_async_wait_all();
      ptx::fence_proxy_async();
      __syncwarp();
    }
    if (lane != 0) return false;
    ptx::mbarrier_arrive_expect_tx(mbarrier, (mapped ? TILE * COUNT * 2 : 0) + more);
    if (mapped) copy_tile_panels<PLAN.mainloop, OverEnd::HARMLESS, COUNT>(to, map, s.batch, tile.head, s.query_start + first, mbarrier, channel);
    return true;
  }

  // A consumer. Its thread block computes K_PANELS panels of dK and dQ, and V_PANELS panels of dV.
  template <int K_PANELS, int V_PANELS>
  struct Consumer {
    static constexpr int K_CHANNELS = K_PANELS * 64, V_CHANNELS = V_PANELS * 64, DQ_CHANNELS = K_CHANNELS / CONSUMERS;
    const Dense16BackwardSm90ChannelParts& of;
    int warpgroup, k_panel, v_panel;  // the consumer's number; the thread block's first panels of dK and dV
    float k_factor;
    [[no_unique_address]] Mod score_mod;
    float dk[K_CHANNELS / 8][4] = {}, dv[V_PANELS > 0 ? V_CHANNELS / 8 : 1][4] = {};

    __device__ __forceinline__ Consumer(const Dense16BackwardSm90ChannelParts& numerics, int warpgroup, int k_panel, int v_panel)
        : of(numerics), warpgroup(warpgroup), k_panel(k_panel), v_panel(v_panel),
          k_factor(S::k_factor(numerics.p, numerics.block, warpgroup)),
          score_mod(numerics.p, first_query_head(numerics.p, numerics.block)) {}

    // The index of panel k_panel among the panels of K and Q in shared memory, which may hold only this thread block's
    // channels.
    __device__ __forceinline__ int loaded_panel() const { return CHANNELS < D ? 0 : k_panel; }

    template <Hidden HIDDEN>
    __device__ __forceinline__ void visit(const Pieces& pieces, int i, int tile, int padded, Masked<HIDDEN> masked,
                                          const DqAccumulator& dq_sums) {
      int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, slot = i & 1;
      int stage = Pieces::stage(2 * i) / 2;
      uint32_t queries = of.shared + stage_at(stage), gradients = queries + Q_BYTES;
      const float* state = of.state(stage);
      pieces.wait(2 * i);
      // Log-sum-exps and deltas are read before any wgmma is issued: while wgmmas read shared memory, a load from it
      // takes hundreds of clocks.
      Scores s, dp;
      typename S::Sums sums;
      ColumnValues(state + TILE, lane).set(dp);
      ColumnValues minus_lse2(state, lane);
      float factor = S::factor_at(k_factor, state + Tiles::STATE_VALUES);
      ptx::fence_operand(dp);
      S::template start<SM90_KEYS>(sums, of.shared, queries, of.shared + K_CODES_AT, queries + Q_CODES_AT, warpgroup);
      pieces.wait(2 * i + 1);
      // dP^T - delta = V dO^T - delta
      multiply_rows<T, V, SM90_KEYS, true>(dp, of.shared + K_BYTES + warpgroup * CONSUMER_KEYS * 128, gradients);
      ptx::wgmma_wait<1>(sums);
      of.make_probabilities(s, sums, minus_lse2, factor, tile, warpgroup, masked, score_mod);
      uint32_t probabilities[4][4], ds[4][4];
      pack_scores<T>(probabilities, s);
      score_mod.chain(s);
      // dS = P o (dP - delta)
      ptx::wgmma_wait<0>(dp);
      if (V_PANELS == 0) pieces.release(2 * i + 1);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e];
      pack_scores<T>(ds, s);
      // dS^T is stored before more wgmmas are issued, because their shared memory reads would delay the store.
      store_packed(of.ds_rows(slot, warpgroup) + warp * 16 * TILE * 2, ds, lane);
      // dK += dS^T Q, dV += P^T dO
      add_product<T, K_CHANNELS>(dk, ds, queries + loaded_panel() * (TILE * 128));
      if constexpr (V_PANELS > 0) add_product<T, V_CHANNELS>(dv, probabilities, gradients + v_panel * (TILE * 128));
      ptx::fence_proxy_async();
      ptx::named_barrier_sync(ALL_CONSUMERS, CONSUMER_THREADS);
      float dq[DQ_CHANNELS / 8][4];
      multiply_keys<T>(dq, of.ds_rows(slot, 0), k_rows());
      ptx::wgmma_wait<(V_PANELS > 0 ? 2 : 1)>(dk);
      pieces.release(2 * i);
      if constexpr (V_PANELS > 0) {
        ptx::wgmma_wait<1>(dv);
        pieces.release(2 * i + 1);
      }
      ptx::wgmma_wait<0>(dq);
      dq_sums.acquire(padded);
      dq_sums.template add<D>(padded, warp, k_panel * 8 + warpgroup * (DQ_CHANNELS / 8), lane, dq);
      dq_sums.release(padded);
    }

    // The address of K at the first channel for which this consumer computes dQ. If each consumer has only 32
    // channels, those of the second consumer start in the middle of a panel's rows.
    __device__ __forceinline__ uint32_t k_rows() const {
      int channel = warpgroup * DQ_CHANNELS;
      return of.shared + (loaded_panel() + channel / 64) * SM90_KEYS * 128 + channel % 64 * 2;
    }

    // The epilogue: writes dV and dK of the warp's keys. dK is staged in the last panel of V, so that staging dK
    // need not wait until the warp has read the staged dV back.
    template <class Queries>
    __device__ __forceinline__ void store_gradients(int first_key) {
      constexpr int LAST_PANEL = (V / 64 - 1) * SM90_KEYS * 128;
      uint32_t staging = of.gradient_staging(threadIdx.x / 32);
      if constexpr (V_PANELS > 0)
        store_gradient<DV, Queries, T, GRADIENT_STAGING, Parts::COUNT>(of.p, of.block, first_key, dv, staging, v_panel * 64);
      store_gradient<DK, Queries, T, GRADIENT_STAGING, Parts::COUNT>(of.p, of.block, first_key, dk, staging + LAST_PANEL, k_panel * 64);
    }
  };
};

}  // namespace sage::attention
