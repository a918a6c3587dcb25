// What the two backwards of 16-bit operands on Hopper share: what lies in shared memory, and P out of the sums of S.
#pragma once

#include <sage/attention/mainloop/backward_sm90.cuh>
#include <sage/attention/numerics/scores_sm90.cuh>

namespace sage::attention {

// A block's shared memory: K, V, and what S is made from besides; stages of Q, dO, what S is made from, log-sum-exp, delta, ..;
// slots of dS^T; dQ on its way; what P needs.
template <class T, int HEAD_DIM, params::Plan PLAN, class P, class Source>
struct FullPrecisionTilesSm90 {
  using Type = T;
  using S = WarpgroupScores<Source>;
  static constexpr int D = HEAD_DIM, STAGES = PLAN.stages;
  static constexpr int K_BYTES = SM90_KEYS * D * 2, Q_BYTES = TILE * D * 2;
  static constexpr int K_CODES_AT = 2 * K_BYTES, STAGES_AT = K_CODES_AT + SM90_KEYS * S::KEY_BYTES;
  static constexpr int Q_CODES_AT = 2 * Q_BYTES, STATE_AT = Q_CODES_AT + S::TILE_BYTES;
  static constexpr int STAGE_BYTES = STATE_AT + 1024, STATE_VALUES = P::QUERY_VALUES * TILE;
  static constexpr int DS_AT = STAGES_AT + STAGES * STAGE_BYTES;
  static constexpr int DS_BYTES = SM90_KEYS * TILE * 2;
  static constexpr int DQ_AT = DS_AT + 2 * DS_BYTES, DQ_BYTES = TILE * D * 4;
  static constexpr int WARPS_AT = DQ_AT + DQ_BYTES;
  static constexpr int SHARED_BYTES = WARPS_AT + SM90_KEYS / 16 * P::WARP_BYTES;
  static_assert((STATE_VALUES + 1) * 4 <= 1024);
  static_assert(PLAN.rows == SM90_KEYS && PLAN.threads == SM90_THREADS && PLAN.row_bytes == D * 2 && PLAN.shared_bytes == SHARED_BYTES);

  const params::Backward& p;
  const BackwardBlock& block;
  unsigned char* memory;
  uint32_t shared;

  __device__ __forceinline__ FullPrecisionTilesSm90(const params::Backward& p, const BackwardBlock& b, unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)) {}

  static __device__ __forceinline__ int stage_at(int stage) { return STAGES_AT + stage * STAGE_BYTES; }
  __device__ __forceinline__ uint32_t ds_rows(int slot, int warpgroup) const {
    return shared + DS_AT + slot * DS_BYTES + warpgroup * CONSUMER_KEYS * TILE * 2;
  }
  // Minus the log-sum-exps of a tile's queries; minus delta and the others follow.
  __device__ __forceinline__ const float* state(int stage) const {
    return reinterpret_cast<const float*>(memory + stage_at(stage) + STATE_AT);
  }
  // What P::make_scales keeps for this warp.
  __device__ __forceinline__ void* scales() const { return memory + WARPS_AT + threadIdx.x / 32 * P::WARP_BYTES; }

  __device__ __forceinline__ void load_keys() {
    const Segment& s = block.segment;
    Rows<T> k(p.k, s.batch, s.key_start, block.key_head, s.key_len, p.shape.head_dim);
    Rows<T> v(p.v, s.batch, s.key_start, block.key_head, s.key_len, p.shape.head_dim);
    copy_panels<SM90_KEYS, D, CONSUMER_THREADS>(shared, k, block.first_key, threadIdx.x);
    copy_panels<SM90_KEYS, D, CONSUMER_THREADS>(shared + K_BYTES, v, block.first_key, threadIdx.x);
    S::template load_keys<SM90_KEYS, CONSUMER_THREADS>(shared + K_CODES_AT, p, block);
  }
  __device__ __forceinline__ void keys_arrived() {
    subtract_key_mean<T, SM90_KEYS, D, CONSUMER_THREADS>(memory, p, block, [](int row, int chunk) {
      return chunk / 8 * SM90_KEYS * 128 + layout::swizzled<128>(row, chunk % 8);
    });
  }

  // One thread's part of fetching a tile: what lies in one piece, and rows where `mapped`.
  __device__ __forceinline__ void load_by_bulk(const QueryTile& tile, int stage, bool mapped, uint32_t mbarrier) {
    uint32_t at = shared + stage_at(stage);
    ptx::mbarrier_arrive_expect_tx(mbarrier, (mapped ? 2 * Q_BYTES : 0) + S::BULK_BYTES + STATE_VALUES * 4);
    if (mapped) {
      const Segment& s = block.segment;
      int first = s.query_start + tile.tile * TILE;
      copy_tile_panels<D>(at, p.q_map, s.batch, tile.head, first, mbarrier);
      copy_tile_panels<D>(at + Q_BYTES, p.dout_map, s.batch, tile.head, first, mbarrier);
    }
    S::load_by_bulk(at + Q_CODES_AT, at + STATE_AT + STATE_VALUES * 4, p, tile, mbarrier);
    int64_t rows = int64_t(tile.padded) * TILE;
    ptx::cp_async_bulk(at + STATE_AT, p.minus_lse2 + rows, TILE * 4, mbarrier);
    ptx::cp_async_bulk(at + STATE_AT + TILE * 4, p.minus_delta + rows, TILE * 4, mbarrier);
    if (P::QUERY_VALUES == 3) ptx::cp_async_bulk(at + STATE_AT + 2 * TILE * 4, p.row_sums + rows, TILE * 4, mbarrier);
  }

  // P^T of a warpgroup's 64 keys, out of the sums of S^T.
  __device__ __forceinline__ void make_probabilities(Scores& s, const typename S::Sums& sums, float k_factor, int tile, int stage,
                                                     int warpgroup, bool masked) const {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16;
    const float* minus_lse2 = state(stage);
    float factor = S::factor_at(k_factor, minus_lse2 + STATE_VALUES);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 l = *reinterpret_cast<const float2*>(minus_lse2 + n * 8 + 2 * (lane & 3));
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = fmaf(float(sums[n][e]), factor, e & 1 ? l.y : l.x);
    }
    take_exponentials(s, masked, block.segment, tile * TILE, block.first_key + warpgroup * CONSUMER_KEYS + row, lane);
  }
};

}  // namespace sage::attention
