// The backward with 16-bit operands and f32 accumulators (FlashAttention-2, arXiv 2307.08691, algorithm 2): for
// unquantized attention; for Attn-QAT, whose operands are NVFP4 values stored in 16 bit; and for SageBwd if none of
// the backward's matmuls, or only S, is an INT8 matmul.
#pragma once

#include <sage/attention/numerics/score_mod.cuh>
#include <sage/attention/numerics/scores_sm80.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, params::Plan PLAN, class P = PlainProbabilities, class S = ScoresOfRows<T, HEAD_DIM>,
          class Mod = NoScoreMod>
struct Dense16BackwardSm80 {
  using Type = T;
  using Plan = BackwardPlan<PLAN>;
  static constexpr int D = HEAD_DIM;
  // The registers of a warp can store dK and dV of 16 keys and 128 channels. Above 128 channels a thread block
  // computes dK and dV of 128 channels, but S and dP over all channels.
  static constexpr int CHANNELS = D < 128 ? D : 128, CHANNEL_PARTS = D / CHANNELS;
  static constexpr int ROW = 2 * D;
  static constexpr int K_BYTES = Plan::KEYS * ROW;
  static constexpr int Q_BYTES = TILE * ROW;
  // Shared memory: K, V, and the keys' INT8 values if S needs them; stages of Q, dO, the queries' INT8 values if S
  // needs them, and the row state (log-sum-exp, delta, and the row sum if P needs it); two slots of dS^T; each
  // warp's scales of P, if P is quantized.
  static constexpr int K_CODES_AT = 2 * K_BYTES, STAGES_AT = K_CODES_AT + Plan::KEYS * S::KEY_BYTES;
  static constexpr int Q_CODES_AT = 2 * Q_BYTES, STATE_AT = Q_CODES_AT + S::TILE_BYTES;
  static constexpr int STAGE_BYTES = STATE_AT + P::QUERY_VALUES * TILE * 4;
  static constexpr int DS_AT = STAGES_AT + Plan::STAGES * STAGE_BYTES;
  static constexpr int DS_BYTES = Plan::KEYS * TILE * 2;
  static constexpr int WARPS_AT = DS_AT + 2 * DS_BYTES;
  static constexpr int SHARED_BYTES = WARPS_AT + Plan::WARPS * P::WARP_BYTES;
  static_assert(PLAN.row_bytes == ROW && PLAN.shared_bytes == SHARED_BYTES);
  static constexpr int LAG = 1;
  static constexpr bool COOPERATES = false;

  const params::Backward& p;
  const BackwardBlock& block;
  unsigned char* memory;
  uint32_t shared;
  int warp;
  float dk[CHANNELS / 8][4] = {}, dv[CHANNELS / 8][4] = {};

  __device__ __forceinline__ Dense16BackwardSm80(const params::Backward& p, const BackwardBlock& b,
                                                   unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)), warp(threadIdx.x / 32) {}

  static __device__ __forceinline__ int stage_at(int stage) { return STAGES_AT + stage * STAGE_BYTES; }

  __device__ __forceinline__ void load_keys() {
    const Segment& s = block.segment;
    Rows<T> k(p.k, s.batch, s.key_start, block.key_head, s.key_len, p.shape.head_dim);
    Rows<T> v(p.v, s.batch, s.key_start, block.key_head, s.key_len, p.shape.value_dim);
    copy_rows<Plan::KEYS, D, Plan::THREADS>(shared, k, block.first_key, threadIdx.x);
    copy_rows<Plan::KEYS, D, Plan::THREADS>(shared + K_BYTES, v, block.first_key, threadIdx.x);
    S::template load_keys<Plan::KEYS, Plan::THREADS>(shared + K_CODES_AT, p, block);
  }
  __device__ __forceinline__ void keys_arrived() {
    subtract_key_mean<T, Plan::KEYS, D, Plan::THREADS>(memory, p, block, [](int row, int chunk) { return layout::swizzled<ROW>(row, chunk); });
  }

  __device__ __forceinline__ void load(const QueryTile& tile, int stage) {
    const Segment& s = block.segment;
    int thread = ptx::opaque(threadIdx.x);
    uint32_t at = shared + stage_at(stage);
    Rows<T> q(p.q, s.batch, s.query_start, tile.head, s.query_len, p.shape.head_dim);
    Rows<T> dout(p.dout, s.batch, s.query_start, tile.head, s.query_len, p.shape.value_dim);
    copy_rows<TILE, D, Plan::THREADS>(at, q, tile.tile * TILE, thread);
    copy_rows<TILE, D, Plan::THREADS>(at + Q_BYTES, dout, tile.tile * TILE, thread);
    S::template load<Plan::THREADS>(at + Q_CODES_AT, p, tile, thread);
    copy_row_state<P::QUERY_VALUES>(at + STATE_AT, p, tile, thread);
  }

  template <Hidden HIDDEN>
  __device__ __forceinline__ void scores(const QueryTile& tile, int stage, int slot, TileVisibility<HIDDEN> visibility) {
    int lane = threadIdx.x % 32;
    uint32_t q_rows = shared + stage_at(stage), dout_rows = q_rows + Q_BYTES;
    uint32_t ds_rows = shared + DS_AT + slot * DS_BYTES + warp * 16 * TILE * 2;
    const float* minus_lse2 = reinterpret_cast<const float*>(memory + stage_at(stage) + STATE_AT);
    if (!visibility.seen) {
      store_zeros(ds_rows, lane);
      return;
    }
    Scores s;
    S::multiply(s, shared + warp * 16 * ROW, q_rows, shared + K_CODES_AT, q_rows + Q_CODES_AT, warp, lane);
    Scores dp;
    multiply_dp<T, D>(dp, shared + K_BYTES + warp * 16 * ROW, dout_rows, minus_lse2 + TILE, lane);
    float scale = S::factor(p, block, tile, warp / 4), offset = 0.0f;
    Mod score_mod(p, tile.head);
    score_mod.apply(s, scale, offset, block.segment, tile.tile * TILE, block.first_key + warp * 16, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 l = *reinterpret_cast<const float2*>(minus_lse2 + n * 8 + 2 * (lane & 3));
      if constexpr (Mod::MODIFIES) l.x += offset, l.y += offset;
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = ptx::exp2(fmaf(s[n][e], scale, e & 1 ? l.y : l.x));
    }
    if (visibility.masked) mask_scores(s, Sight<HIDDEN>(block.segment, p), tile.tile * TILE, block.first_key + warp * 16, lane);
    uint32_t probabilities[4][4];
    void* scales = memory + WARPS_AT + warp * P::WARP_BYTES;
    P::make_scales(s, minus_lse2 + 2 * TILE, scales, lane);
    P::template pack_transposed<T>(probabilities, s, scales, lane);
    add_keys(dv, probabilities, dout_rows, lane);
    score_mod.chain(s);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e];
    uint32_t ds[4][4];
    pack_scores<T>(ds, s);
    store_packed(ds_rows, ds, lane);
    add_keys(dk, ds, q_rows, lane);
  }

  __device__ __forceinline__ void prepare_dq(int) {}

  // Adds dQ of the previous tile, whose dS is in the other slot.
  __device__ __forceinline__ void add_dq(int padded_tile, int slot, const DqAccumulator& sums) {
    constexpr int OWN = CHANNELS / Plan::PARTS;  // number of channels of dQ that a warp computes
    int lane = threadIdx.x % 32, strip = warp % 4, part = warp / 4;
    layout::TransposedReaderA<TILE * 2> ds_reader(shared + DS_AT + (slot ^ 1) * DS_BYTES, lane);
    layout::TransposedReaderB<ROW> k_reader(shared, lane);
    to_channels(k_reader);
    float dq[OWN / 8][4] = {};
#pragma unroll
    for (int step = 0; step < Plan::KEYS / 16; ++step) {
      uint32_t a[4];
      ds_reader.load(a, step * 16, strip);
#pragma unroll
      for (int n = 0; n < OWN / 8; n += 2) {
        uint32_t b[4];
        k_reader.load(b, step * 16, part * (OWN / 16) + n / 2);
        ptx::mma_16<T>(dq[n], a, b[0], b[1]);
        ptx::mma_16<T>(dq[n + 1], a, b[2], b[3]);
      }
    }
    int first = part * (OWN / 8);
    if constexpr (CHANNEL_PARTS > 1) first += block.channel_part * (CHANNELS / 8);
    sums.template add<D>(padded_tile, strip, first, lane, dq);
  }

  __device__ __forceinline__ void flush_magic() {}

 private:
  // Moves a reader to the first channel of the thread block's channel part. A part is 256 bytes of a row; the swizzle
  // does not move bytes out of a part.
  __device__ __forceinline__ void to_channels(layout::TransposedReaderB<ROW>& reader) const {
    static_assert(CHANNEL_PARTS == 1 || CHANNELS == 128);
    if constexpr (CHANNEL_PARTS > 1) reader.address ^= block.channel_part * 256;
  }

  // out += X^T B. X^T is P^T or dS^T of the warp's 16 keys, in registers; B is 64 rows of dO or Q, in shared memory.
  __device__ __forceinline__ void add_keys(float (&out)[CHANNELS / 8][4], const uint32_t (&a)[4][4], uint32_t rows, int lane) {
    layout::TransposedReaderB<ROW> reader(rows, lane);
    to_channels(reader);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int n = 0; n < CHANNELS / 8; n += 2) {
        uint32_t b[4];
        reader.load(b, step * 16, n / 2);
        ptx::mma_16<T>(out[n], a[step], b[0], b[1]);
        ptx::mma_16<T>(out[n + 1], a[step], b[2], b[3]);
      }
    }
  }
};

}  // namespace sage::attention
