// The backward of SageBwd with INT8 matmuls (arXiv 2603.02170, algorithm 2): S, dV, dQ and dK are s8 x s8 -> s32, dP
// has 16-bit operands.
#pragma once

#include <sage/attention/numerics/query_mean.cuh>
#include <sage/attention/numerics/score_codes_sm80.cuh>

namespace sage::attention {

// GENERAL kernels also support ablations: scales of P and dS that groups of tokens share, and Q smoothing. Q smoothing
// adds one vector to every row of a tile's logits, and a rank-one term to dK.
template <class T, int HEAD_DIM, params::Plan PLAN, bool GENERAL = false>
struct SageBwdBackwardSm80 {
  using Type = T;
  using Plan = BackwardPlan<PLAN>;
  static constexpr int D = HEAD_DIM;
  static constexpr int KEYS = Plan::KEYS;
  // Shared memory: INT8 K and K^T, 16-bit V; stages, each with INT8 Q, INT8 Q^T, INT8 dO^T, 16-bit dO, log-sum-exp,
  // delta, and the scales of dO^T; two slots of 16-bit dS^T; with PARTS = 2, two slots of INT8 dS; each warp's
  // largest |P| or |dS|, for scales that warps share; in GENERAL kernels, each key's logit with the mean of Q.
  static constexpr int CODES = TILE * D;
  static constexpr int KT_AT = KEYS * D, V_AT = 2 * KEYS * D, STAGES_AT = 4 * KEYS * D;
  static constexpr int DOUT_AT = 3 * CODES, STATE_AT = 5 * CODES, DOUT_SCALE_AT = STATE_AT + 2 * TILE * 4;
  static constexpr int STAGE_BYTES = (DOUT_SCALE_AT + D * 4 + 1023) / 1024 * 1024;
  static constexpr int DS_AT = STAGES_AT + Plan::STAGES * STAGE_BYTES;
  static constexpr int DS_BYTES = KEYS * TILE * 2;
  static constexpr int CODES_AT = DS_AT + 2 * DS_BYTES;
  // A slot of INT8 dS has, for each warp, dS of 16 queries x 64 keys, and the scales of two queries per lane.
  static constexpr int CODES_BYTES = Plan::PARTS > 1 ? Plan::WARPS * (1024 + 256) : 0;
  static constexpr int MAXIMA_AT = CODES_AT + 2 * CODES_BYTES;
  static constexpr int MEAN_AT = MAXIMA_AT + Plan::WARPS * 4;
  static constexpr int SHARED_BYTES = MEAN_AT + (GENERAL ? KEYS * 4 : 0);
  static_assert(PLAN.row_bytes == D && PLAN.shared_bytes == SHARED_BYTES);
  // add_dq() runs LAG iterations after scores(). With PARTS = 1 each warp quantizes its dS in add_dq(). With PARTS = 2
  // the warps that share a strip of queries quantize the strip's dS together, one iteration before add_dq().
  static constexpr int LAG = Plan::PARTS;
  static constexpr int CHANNEL_PARTS = 1;
  static constexpr bool COOPERATES = GENERAL;

  const params::Backward& p;
  const BackwardBlock& block;
  unsigned char* memory;
  uint32_t shared;
  int warp;
  float k_dequant;  // of the warp's keys
  float dk[D / 8][4] = {}, dv[D / 8][4] = {};
  float magic_part[2] = {0.0f, 0.0f};  // MAGIC * magic_part[i] is still to be subtracted from row i of the thread's dk
  int magic_tiles = 0;                 // query tiles added to dk since the last flush_magic()

  __device__ __forceinline__ SageBwdBackwardSm80(const params::Backward& p, const BackwardBlock& b, unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)), warp(threadIdx.x / 32) {
    k_dequant = k_dequant_of(p, block, warp / 4);
  }

  static __device__ __forceinline__ int stage_at(int stage) { return STAGES_AT + stage * STAGE_BYTES; }

  __device__ __forceinline__ void load_keys() {
    const Segment& s = block.segment;
    Rows<T> v(p.v, s.batch, s.key_start, block.key_head, s.key_len, p.shape.value_dim);
    copy_rows<KEYS, D, Plan::THREADS>(shared + V_AT, v, block.first_key, threadIdx.x);
    copy_key_tiles<Plan::PARTS, D, Plan::THREADS>(shared, p, block);
  }

  __device__ __forceinline__ void keys_arrived() { transpose_keys<KEYS, D, Plan::THREADS>(memory + KT_AT, memory); }

  __device__ __forceinline__ void load(const QueryTile& tile, int stage) {
    const Segment& s = block.segment;
    int thread = ptx::opaque(threadIdx.x);
    uint32_t at = shared + stage_at(stage);
    int64_t codes = int64_t(tile.padded) * CODES;
    copy_tile<TILE * D, Plan::THREADS>(at, p.codes.q + codes, thread);
    copy_tile<TILE * D, Plan::THREADS>(at + CODES, p.q_transposed + codes, thread);
    copy_tile<TILE * D, Plan::THREADS>(at + 2 * CODES, p.dout_transposed + codes, thread);
    Rows<T> dout(p.dout, s.batch, s.query_start, tile.head, s.query_len, p.shape.value_dim);
    copy_rows<TILE, D, Plan::THREADS>(at + DOUT_AT, dout, tile.tile * TILE, thread);
    copy_row_state(at + STATE_AT, p, tile, thread);
    if (thread < D / 4) ptx::cp_async_16(at + DOUT_SCALE_AT + thread * 16, p.dout_dequant_scale + int64_t(tile.padded) * D + thread * 4, true);
  }

  template <Hidden HIDDEN>
  __device__ __forceinline__ void scores(const QueryTile& tile, int stage, int slot, TileVisibility<HIDDEN> visibility) {
    int lane = threadIdx.x % 32;
    uint32_t at = shared + stage_at(stage);
    const float* minus_lse2 = reinterpret_cast<const float*>(memory + stage_at(stage) + STATE_AT);
    uint32_t ds_rows = shared + DS_AT + slot * DS_BYTES + warp * 16 * TILE * 2;
    float q_dequant = __ldg(p.codes.q_dequant_scale + tile.padded);
    float* mean_logits = reinterpret_cast<float*>(memory + MEAN_AT);
    bool smooth_q = GENERAL && p.codes.q_mean;
    if (smooth_q) {
      query_mean_logits<T, D>(p.k, p.codes, p.shape, block.segment, block.segment_index, block.key_head, tile.padded, 1,
                              block.first_key, KEYS, mean_logits);
      __syncthreads();
    }
    // A warp may skip the tile only if the warp shares no scales with other warps.
    if (!visibility.seen && (!GENERAL || p.group <= 16)) {
      store_zeros(ds_rows, lane);
      return;
    }

    Scores s;
    Scores dp;
    compute_probabilities(s, dp, at, minus_lse2, q_dequant, mean_logits, smooth_q, lane);
    if (visibility.masked) mask_scores(s, Sight<HIDDEN>(block.segment, p), tile.tile * TILE, block.first_key + warp * 16, lane);

    auto share = [&](float(&largest)[2]) { share_maxima(largest, lane); };
    ScoreCodes codes;
    float dequant[2];
    const float* dout_dequant = reinterpret_cast<const float*>(memory + stage_at(stage) + DOUT_SCALE_AT);
    quantize_scores<true>(s, codes, dequant, share);
    auto add_dv = [&](int n, const int(&y)[4]) {
      float2 d = *reinterpret_cast<const float2*>(dout_dequant + n * 8 + 2 * (lane & 3));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dv[n][e] = fmaf(scaled(y[e], dequant[e >> 1]), e & 1 ? d.y : d.x, dv[n][e]);
    };
    multiply_codes(codes, at + 2 * CODES, lane, add_dv);

    // dS = P o (dP - delta)
    if constexpr (D > 64) multiply_dp<T, D>(dp, shared + V_AT + warp * 16 * 2 * D, at + DOUT_AT, minus_lse2 + TILE, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e];
    // dS^T is stored in bf16 even for f16 inputs: typical dS is about 1e-7, too small for f16.
    store_scores<__nv_bfloat16>(ds_rows, s, lane);
    if (smooth_q) add_mean_term(s, tile, lane);
    ScoreCodes ds_codes;
    float ds_dequant[2];
    quantize_scores<false>(s, ds_codes, ds_dequant, share);
    ds_dequant[0] *= q_dequant, ds_dequant[1] *= q_dequant;
    auto add_dk = [&](int n, const int(&y)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] = fmaf(__int_as_float(y[e]), ds_dequant[e >> 1], dk[n][e]);
    };
    multiply_codes(ds_codes, at + CODES, lane, add_dk);
    // add_dk added (MAGIC + sum) * ds_dequant to dk. flush_magic later subtracts MAGIC * magic_part.
    magic_part[0] += ds_dequant[0], magic_part[1] += ds_dequant[1];
    if (++magic_tiles == quant::MAGIC_TILES) flush_magic();
  }

  // Subtracts from dk the multiples of MAGIC that were added since the last call.
  __device__ __forceinline__ void flush_magic() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] = fmaf(-quant::MAGIC, magic_part[e >> 1], dk[n][e]);
    magic_part[0] = magic_part[1] = 0.0f;
    magic_tiles = 0;
  }

  // For dQ: quantizes the 16-bit dS^T in slot `slot`, and writes it to the INT8 slot of the same number. Each warp
  // quantizes the dS of 16 queries and one tile of keys.
  __device__ __forceinline__ void prepare_dq(int slot) {
    int lane = threadIdx.x % 32;
    ScoreCodes codes;
    float2 dequant;
    quantize_queries(codes, dequant, k_dequant, ds_rows_of(slot, warp / 4), warp % 4, lane,
                     [&](float(&largest)[2]) { share_maxima(largest, lane); });
    uint4* words = reinterpret_cast<uint4*>(memory + CODES_AT + slot * CODES_BYTES);  // [warp][half of the keys][lane]
    float2* scales = reinterpret_cast<float2*>(words + Plan::WARPS * 64);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      words[warp * 64 + i * 32 + lane] = make_uint4(codes[i][0], codes[i][1], codes[i][2], codes[i][3]);
    scales[warp * 32 + lane] = dequant;
  }

  // Adds dQ = dS K for the warp's strip of 16 queries and its part of the channels.
  __device__ __forceinline__ void add_dq(int padded_tile, int slot, const DqAccumulator& sums) {
    constexpr int CHANNELS = D / Plan::PARTS;
    int lane = threadIdx.x % 32, strip = warp % 4, part = warp / 4;
    ScoreCodes codes[Plan::PARTS];  // one for each key tile of the thread block
    float2 dequant[Plan::PARTS];    // for each key tile: scales of the strip's queries lane / 4 and lane / 4 + 8
    if constexpr (Plan::PARTS == 1) {
      quantize_queries(codes[0], dequant[0], k_dequant, ds_rows_of(slot ^ 1, part), strip, lane,
                       [&](float(&largest)[2]) { share_maxima(largest, lane); });
    } else {
      const uint4* words = reinterpret_cast<const uint4*>(memory + CODES_AT + slot * CODES_BYTES);
      const float2* scales = reinterpret_cast<const float2*>(words + Plan::WARPS * 64);
#pragma unroll
      for (int i = 0; i < Plan::PARTS; ++i) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint4 word = words[(strip + 4 * i) * 64 + step * 32 + lane];
          codes[i][step][0] = word.x, codes[i][step][1] = word.y, codes[i][step][2] = word.z, codes[i][step][3] = word.w;
        }
        dequant[i] = scales[(strip + 4 * i) * 32 + lane];
      }
    }
    float2 magic = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < Plan::PARTS; ++i) magic.x -= quant::MAGIC * dequant[i].x, magic.y -= quant::MAGIC * dequant[i].y;
    float dq[CHANNELS / 8][4];
#pragma unroll
    for (int n = 0; n < CHANNELS / 8; ++n) dq[n][0] = dq[n][1] = magic.x, dq[n][2] = dq[n][3] = magic.y;
    layout::ReaderB<KEYS> k_reader(shared + KT_AT, lane);
#pragma unroll
    for (int n = 0; n < CHANNELS / 8; n += 2) {
#pragma unroll
      for (int keys = 0; keys < Plan::PARTS; ++keys) {
        int y[2][4];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          uint32_t b[4];
          k_reader.load(b, part * CHANNELS + n * 8, keys * 2 + step);
          quant::multiply(y[0], codes[keys][step], b[0], b[1], step == 0);
          quant::multiply(y[1], codes[keys][step], b[2], b[3], step == 0);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            dq[n + i][e] = fmaf(__int_as_float(y[i][e]), e < 2 ? dequant[keys].x : dequant[keys].y, dq[n + i][e]);
      }
    }
    sums.template add<D>(padded_tile, strip, part * (CHANNELS / 8), lane, dq);
  }

 private:
  // Computes P^T = 2^(logit - LSE) of the tile in the stage `at`, without applying a mask. At head_dim 64 also computes
  // dP^T - delta. With Q smoothing the logits include mean_logits.
  __device__ __forceinline__ void compute_probabilities(Scores& s, Scores& dp, uint32_t at, const float* minus_lse2, float q_dequant,
                                                        const float* mean_logits, bool smooth_q, int lane) const {
    int x[8][4];
    multiply_score_codes<D>(x, shared + warp * 16 * D, at, lane);
    // At head_dim 64 a thread has enough registers to start dP here: the tensor cores work on dP while P is computed.
    if constexpr (D == 64) multiply_dp<T, D>(dp, shared + V_AT + warp * 16 * 2 * D, at + DOUT_AT, minus_lse2 + TILE, lane);
    float factor = q_dequant * k_dequant * (p.shape.softmax_scale * ptx::LOG2_E);
    // x is MAGIC + dot product. `offset` below subtracts MAGIC * factor and the log-sum-exp as one number. The rounding
    // of `offset` changes a logit by at most 1.5 * factor, much less than the quantization of Q and K (about
    // 100 * factor).
    float magic = -quant::MAGIC * factor;
    if (__builtin_expect(factor > quant::MAGIC_FACTOR, false)) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] = __float_as_int(__int_as_float(x[n][e]) - quant::MAGIC);
      magic = 0.0f;
    }
    float add[2] = {0.0f, 0.0f};
    if (smooth_q) add[0] = mean_logits[warp * 16 + lane / 4], add[1] = mean_logits[warp * 16 + lane / 4 + 8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float2 l = *reinterpret_cast<const float2*>(minus_lse2 + n * 8 + 2 * (lane & 3));
      float2 offset = make_float2(magic + l.x, magic + l.y);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float logit = fmaf(__int_as_float(x[n][e]), factor, e & 1 ? offset.y : offset.x);
        s[n][e] = ptx::exp2(smooth_q ? logit + add[e >> 1] : logit);
      }
    }
  }

  // dK = dS^T (Q - mean) + rowsum(dS^T) mean, with Q's mean over the tile. Adds the second term, from unquantized dS.
  __device__ __forceinline__ void add_mean_term(const Scores& s, const QueryTile& tile, int lane) {
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[e >> 1] += s[n][e];
    sums[0] = quad_sum(sums[0]), sums[1] = quad_sum(sums[1]);
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dk[n][e] = fmaf(sums[e >> 1], __ldg(p.codes.q_mean + int64_t(tile.padded) * D + n * 8 + 2 * (lane & 3) + (e & 1)), dk[n][e]);
  }

  // factor * (x - MAGIC) with one rounding; `factor` is a quant::short_factor.
  static __device__ __forceinline__ float scaled(int x, float factor) {
    return fmaf(__int_as_float(x), factor, -quant::MAGIC * factor);
  }

  // The address of a key tile's dS^T in a slot. `part`: the key tile's index in the slot.
  __device__ __forceinline__ uint32_t ds_rows_of(int slot, int part) const {
    return shared + DS_AT + slot * DS_BYTES + part * TILE * TILE * 2;
  }

  // Replaces the maximum of row g, and that of row g + 8, by the maximum of the p.group rows that share its scale.
  __device__ __forceinline__ void share_maxima(float (&largest)[2], int lane) const {
    if (!GENERAL || p.group == 1) return;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      for (int lanes = 4; lanes < 4 * min(p.group, 8); lanes *= 2)
        largest[h] = ptx::max_abs(largest[h], __shfl_xor_sync(~0u, largest[h], lanes));
    if (p.group < 16) return;
    largest[0] = largest[1] = ptx::max_abs(largest[0], largest[1]);
    if (p.group == 16) return;
    float* maxima = reinterpret_cast<float*>(memory + MAXIMA_AT);
    __syncthreads();
    if (lane == 0) maxima[warp] = largest[0];
    __syncthreads();
    int warps = p.group / 16;
    for (int i = 0; i < warps; ++i) largest[0] = ptx::max_abs(largest[0], maxima[warp / warps * warps + i]);
    largest[1] = largest[0];
  }

  // Computes P^T dO from INT8 P^T and a tile of dO^T, or dS^T Q from INT8 dS^T and a tile of Q^T. The tile is [D][64].
  // Calls use(n, results) for channels 8 * n to 8 * n + 7. Each result is the bits of the float MAGIC + dot product.
  template <class Use>
  __device__ __forceinline__ void multiply_codes(const ScoreCodes& codes, uint32_t rows, int lane, Use use) const {
    layout::ReaderB<TILE> reader(rows, lane);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      int y[2][4];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t b[4];
        reader.load(b, n * 8, step);
        quant::multiply(y[0], codes[step], b[0], b[1], step == 0);
        quant::multiply(y[1], codes[step], b[2], b[3], step == 0);
      }
      use(n, y[0]);
      use(n + 1, y[1]);
    }
  }
};

}  // namespace sage::attention
