// Shared by dense16_backward_sm90*.cuh: the layout of shared memory, the copies into it, and the computation of P from
// the accumulators of S.
#pragma once

#include <sage/attention/mainloop/backward_sm90.cuh>
#include <sage/attention/numerics/score_mod.cuh>
#include <sage/attention/numerics/scores_sm90.cuh>

namespace sage::attention {

// Issues dQ = dS K over all SM90_KEYS keys, for 8 * N channels. dS^T and K are in shared memory; k_rows is the address
// of K at the first of these channels.
template <class T, int N>
__device__ __forceinline__ void multiply_keys(float (&dq)[N][4], uint32_t ds_rows, uint32_t k_rows) {
  ptx::discard_operand(dq);
  ptx::wgmma_fence();
  uint64_t ds = ptx::column_descriptor(ds_rows), keys = ptx::column_descriptor(k_rows);
  ptx::wgmma_16<T, false, true, true>(dq, ds, keys);
#pragma unroll
  for (int step = 1; step < SM90_KEYS / 16; ++step)
    ptx::wgmma_16<T, true, true, true>(dq, ds + step * ptx::COLUMN_STEP, keys + step * ptx::COLUMN_STEP);
  ptx::wgmma_commit();
}

// The layout of shared memory: K, V, and the keys' INT8 values if S needs them; the stages; two slots of dS^T; staging
// memory of dQ if head_dim is at most 128; each warp's scales of P, if P is quantized. A stage has Q, dO, the queries'
// INT8 values if S needs them, and the row state: log-sum-exp, delta, the row sum if P needs it, and the scale of the
// queries' INT8 values.
template <class T, int HEAD_DIM, params::Plan PLAN, class P, class Source, int VALUE_DIM = HEAD_DIM>
struct Dense16TilesSm90 {
  using Type = T;
  using S = WarpgroupScores<Source>;
  static constexpr int D = HEAD_DIM, V = VALUE_DIM, STAGES = PLAN.stages;
  // The number of channels of K and Q that are loaded in 16 bit: all D, unless D > 128 and S is computed from INT8
  // values. Then these are only the channels whose dQ and dK the thread block computes.
  static constexpr int CHANNELS = D > 128 && S::KEY_BYTES > 0 ? 128 : D;
  static constexpr int K_BYTES = SM90_KEYS * CHANNELS * 2, V_BYTES = SM90_KEYS * V * 2;
  static constexpr int Q_BYTES = TILE * CHANNELS * 2, DOUT_BYTES = TILE * V * 2;
  static constexpr int K_CODES_AT = K_BYTES + V_BYTES, STAGES_AT = K_CODES_AT + SM90_KEYS * S::KEY_BYTES;
  static constexpr int Q_CODES_AT = Q_BYTES + DOUT_BYTES, STATE_AT = Q_CODES_AT + S::TILE_BYTES;
  static constexpr int STAGE_BYTES = STATE_AT + 1024, STATE_VALUES = P::QUERY_VALUES * TILE;
  static constexpr int DS_AT = STAGES_AT + STAGES * STAGE_BYTES;
  static constexpr int DS_BYTES = SM90_KEYS * TILE * 2;
  static constexpr int DQ_AT = DS_AT + 2 * DS_BYTES, DQ_BYTES = D > 128 ? 0 : TILE * D * 4;
  static constexpr int WARPS_AT = DQ_AT + DQ_BYTES;
  static constexpr int SHARED_BYTES = WARPS_AT + SM90_KEYS / 16 * P::WARP_BYTES;
  static_assert((STATE_VALUES + 1) * 4 <= 1024);
  static_assert(PLAN.rows == SM90_KEYS && PLAN.threads == SM90_THREADS && PLAN.row_bytes == D * 2 && PLAN.shared_bytes == SHARED_BYTES);

  const params::Backward& p;
  const BackwardBlock& block;
  unsigned char* memory;
  uint32_t shared;

  __device__ __forceinline__ Dense16TilesSm90(const params::Backward& p, const BackwardBlock& b, unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)) {}

  static __device__ __forceinline__ int stage_at(int stage) { return STAGES_AT + stage * STAGE_BYTES; }
  __device__ __forceinline__ uint32_t ds_rows(int slot, int warpgroup) const {
    return shared + DS_AT + slot * DS_BYTES + warpgroup * CONSUMER_KEYS * TILE * 2;
  }
  // The row state of a stage: the negated log-sum-exps of the tile's queries, then their negated deltas, then their row
  // sums if P::QUERY_VALUES is 3, then the scale of their INT8 values if S is computed from INT8 values.
  __device__ __forceinline__ const float* state(int stage) const {
    return reinterpret_cast<const float*>(memory + stage_at(stage) + STATE_AT);
  }
  // Where P::make_scales writes this warp's scales.
  __device__ __forceinline__ void* scales() const { return memory + WARPS_AT + threadIdx.x / 32 * P::WARP_BYTES; }

  __device__ __forceinline__ void load_keys() {
    const Segment& s = block.segment;
    Rows<T> k(p.k, s.batch, s.key_start, block.key_head, s.key_len, p.shape.head_dim);
    Rows<T> v(p.v, s.batch, s.key_start, block.key_head, s.key_len, p.shape.value_dim);
    if constexpr (CHANNELS < D) k.skip_channels(first_channel());
    copy_panels<SM90_KEYS, CHANNELS, CONSUMER_THREADS>(shared, k, block.first_key, threadIdx.x);
    copy_panels<SM90_KEYS, V, CONSUMER_THREADS>(shared + K_BYTES, v, block.first_key, threadIdx.x);
    S::template load_keys<SM90_KEYS, CONSUMER_THREADS>(shared + K_CODES_AT, p, block);
  }
  __device__ __forceinline__ void keys_arrived() {
    subtract_key_mean<T, SM90_KEYS, D, CONSUMER_THREADS, CHANNELS>(
        memory, p, block,
        [](int row, int chunk) { return chunk / 8 * SM90_KEYS * 128 + layout::swizzled<128>(row, chunk % 8); }, first_channel());
  }
  __device__ __forceinline__ int first_channel() const { return CHANNELS < D ? block.channel_part * CHANNELS : 0; }

  __device__ __forceinline__ uint32_t gradient_staging(int warp) const { return shared + K_BYTES + warp * GRADIENT_STAGING; }

  // Called by one thread. Issues the bulk copies of a tile's INT8 values and row state. If `mapped`, also copies Q and
  // dO through tensor maps.
  template <OverEnd OVER_END>
  __device__ __forceinline__ void load_by_bulk(const QueryTile& tile, int stage, bool mapped, uint32_t mbarrier) {
    uint32_t at = shared + stage_at(stage);
    ptx::mbarrier_arrive_expect_tx(mbarrier, (mapped ? Q_BYTES + DOUT_BYTES : 0) + S::BULK_BYTES + STATE_VALUES * 4);
    if (mapped) {
      const Segment& s = block.segment;
      int first = s.query_start + tile.tile * TILE;
      copy_tile_panels<PLAN.mainloop, OVER_END, D>(at, p.q_map, s.batch, tile.head, first, mbarrier);
      copy_tile_panels<PLAN.mainloop, OVER_END, V>(at + Q_BYTES, p.dout_map, s.batch, tile.head, first, mbarrier);
    }
    S::load_by_bulk(at + Q_CODES_AT, at + STATE_AT + STATE_VALUES * 4, p, tile, mbarrier);
    int64_t rows = int64_t(tile.padded) * TILE;
    ptx::cp_async_bulk(at + STATE_AT, p.minus_lse2 + rows, TILE * 4, mbarrier);
    ptx::cp_async_bulk(at + STATE_AT + TILE * 4, p.minus_delta + rows, TILE * 4, mbarrier);
    if (P::QUERY_VALUES == 3) ptx::cp_async_bulk(at + STATE_AT + 2 * TILE * 4, p.row_sums + rows, TILE * 4, mbarrier);
  }

  // Computes P^T of a consumer's 64 keys from the accumulators of S^T; `factor` turns these into logits.
  template <Hidden HIDDEN, class Mod>
  __device__ __forceinline__ void make_probabilities(Scores& s, const typename S::Sums& sums, const ColumnValues& minus_lse2,
                                                     float factor, int tile, int warpgroup, Masked<HIDDEN> masked, Mod& score_mod) const {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = float(sums[n][e]);
    float offset = 0.0f;
    score_mod.apply(s, factor, offset, block.segment, tile * TILE, block.first_key + warpgroup * CONSUMER_KEYS + row, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 l = minus_lse2.values[n];
      if constexpr (Mod::MODIFIES) l.x += offset, l.y += offset;
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = fmaf(s[n][e], factor, e & 1 ? l.y : l.x);
    }
    take_exponentials(s, masked, Sight<HIDDEN>(block.segment, p), tile * TILE, block.first_key + warpgroup * CONSUMER_KEYS + row, lane);
  }
};

}  // namespace sage::attention
