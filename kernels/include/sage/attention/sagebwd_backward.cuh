// SageBwd backward on INT8 codes (arXiv 2603.02170, algorithm 2): S, dV, dQ and dK as s8 x s8 -> s32, dP in 16 bit.
#pragma once

#include <sage/attention/backward.cuh>
#include <sage/attention/query_mean.cuh>
#include <sage/attention/softmax.cuh>
#include <sage/layout/permutation.cuh>
#include <sage/quant/codes.cuh>

namespace sage::attention {

// QK: whether Q was smoothed, which adds a row to the logits and a rank-one term to dK.
template <class T, int HEAD_DIM, class Plan_, bool QK>
struct SageBwdBackward {
  using Type = T;
  using Plan = Plan_;
  static constexpr int D = HEAD_DIM;
  static constexpr int KEYS = Plan::KEYS;
  // Shared memory: K, K^T, V; stages of Q, Q^T, dO^T, dO, log-sum-exp, delta, scales of dO; dS^T; what the warps of one
  // strip of dQ tell each other; the largest of each warp; logits of Q's mean.
  static constexpr int CODES = TILE * D;
  static constexpr int KT_AT = KEYS * D, V_AT = 2 * KEYS * D, STAGES_AT = 4 * KEYS * D;
  static constexpr int DOUT_AT = 3 * CODES, STATE_AT = 5 * CODES, DOUT_SCALE_AT = STATE_AT + 2 * TILE * 4;
  static constexpr int STAGE_BYTES = DOUT_SCALE_AT + D * 4;
  static constexpr int DS_AT = STAGES_AT + Plan::STAGES * STAGE_BYTES;
  static constexpr int EXCHANGE_AT = DS_AT + KEYS * TILE * 2;
  static constexpr int EXCHANGE_WORDS = Plan::PARTS > 1 ? 10 * 32 : 0;  // a warp
  static constexpr int MAXIMA_AT = EXCHANGE_AT + Plan::WARPS * EXCHANGE_WORDS * 4;
  static constexpr int MEAN_AT = MAXIMA_AT + Plan::WARPS * 4;
  static constexpr int SHARED_BYTES = MEAN_AT + (QK ? KEYS * 4 : 0);

  const params::Backward& p;
  const BackwardBlock& block;
  unsigned char* memory;
  uint32_t shared;
  int warp;
  float k_dequant;  // of the warp's keys
  float dk[D / 8][4] = {}, dv[D / 8][4] = {};

  __device__ __forceinline__ SageBwdBackward(const params::Backward& p, const BackwardBlock& b, unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)), warp(threadIdx.x / 32) {
    k_dequant = key_tile_exists(warp / 4) ? p.codes.k_scale[key_tile() + warp / 4] : 0.0f;
  }

  static __device__ __forceinline__ int stage_at(int stage) { return STAGES_AT + stage * STAGE_BYTES; }

  // The block's first tile in the padded buffers.
  __device__ __forceinline__ int64_t key_tile() const {
    return int64_t(block.key_head) * p.shape.key_tiles + block.segment.key_tile + block.first_key / TILE;
  }
  __device__ __forceinline__ bool key_tile_exists(int part) const {
    return block.first_key + part * TILE < block.segment.key_len;
  }

  __device__ __forceinline__ void load_keys() {
    const Segment& s = block.segment;
    Rows<T> v(p.v, s.batch, s.key_start, block.key_head, s.key_len, p.shape.head_dim);
    copy_rows<KEYS, D, Plan::THREADS>(shared + V_AT, v, block.first_key, threadIdx.x);
#pragma unroll
    for (int part = 0; part < Plan::PARTS; ++part) {
      bool exists = key_tile_exists(part);
      copy_tile<TILE, D, Plan::THREADS>(shared + part * CODES, p.codes.k + (key_tile() + (exists ? part : 0)) * CODES,
                                        threadIdx.x, exists);
    }
  }

  // K^T, [D][KEYS] with permuted keys, out of K.
  __device__ __forceinline__ void keys_arrived() {
    for (int i = threadIdx.x; i < D * (KEYS / 16); i += Plan::THREADS) {
      int channel = i % D, group = i / D;
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words[w] = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          int key = group * 16 + layout::token_of_slot(4 * w + b);
          words[w] |= uint32_t(memory[layout::swizzled<D>(key, channel / 16) + channel % 16]) << (8 * b);
        }
      }
      *reinterpret_cast<uint4*>(memory + KT_AT + layout::swizzled<KEYS>(channel, group)) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ __forceinline__ void load(const QueryTile& tile, int stage) {
    const Segment& s = block.segment;
    int thread = ptx::opaque(threadIdx.x);
    uint32_t at = shared + stage_at(stage);
    int64_t codes = tile.padded * CODES;
    copy_tile<TILE, D, Plan::THREADS>(at, p.codes.q + codes, thread);
    copy_tile<D, TILE, Plan::THREADS>(at + CODES, p.q_transposed + codes, thread);
    copy_tile<D, TILE, Plan::THREADS>(at + 2 * CODES, p.dout_transposed + codes, thread);
    Rows<T> dout(p.dout, s.batch, s.query_start, tile.head, s.query_len, p.shape.head_dim);
    copy_rows<TILE, D, Plan::THREADS>(at + DOUT_AT, dout, tile.tile * TILE, thread);
    copy_row_state(at + STATE_AT, p, tile, thread);
    if (thread < D / 4) ptx::copy_16(at + DOUT_SCALE_AT + thread * 16, p.dout_scale + tile.padded * D + thread * 4, true);
  }

  __device__ __forceinline__ void scores(const QueryTile& tile, int stage, bool hides, bool seen) {
    int lane = ptx::opaque(threadIdx.x) % 32;
    uint32_t at = shared + stage_at(stage);
    const float* lse2 = reinterpret_cast<const float*>(memory + stage_at(stage) + STATE_AT);
    uint32_t ds_rows = shared + DS_AT + warp * 16 * TILE * 2;
    float q_dequant = __ldg(p.codes.q_scale + tile.padded);
    float* mean_logits = reinterpret_cast<float*>(memory + MEAN_AT);
    if constexpr (QK) {
      query_mean_logits<T, D>(p.k, p.codes, p.shape, block.segment, block.segment_index, block.key_head, tile.padded, 1,
                              block.first_key, KEYS, mean_logits);
      __syncthreads();
    }
    Scores s;
    // Scales shared among warps need all of them.
    if (!seen && p.group <= 16) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
      store_scores<T>(ds_rows, s, lane);
      return;
    }

    // P = 2^(logit - LSE)
    {
      int x[8][4];
      layout::ReaderA<D> k_reader(shared + warp * 16 * D, lane);
      layout::ReaderB<D> q_reader(at, lane);
#pragma unroll
      for (int step = 0; step < D / 32; ++step) {
        uint32_t a[4];
        k_reader.load(a, 0, step);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
          uint32_t b[4];
          q_reader.load(b, n * 8, step);
          quant::multiply(x[n], a, b[0], b[1], step == 0);
          quant::multiply(x[n + 1], a, b[2], b[3], step == 0);
        }
      }
      float factor = q_dequant * k_dequant * (p.shape.softmax_scale * 1.44269504f);
      float add[2] = {0.0f, 0.0f};
      if constexpr (QK) add[0] = mean_logits[warp * 16 + lane / 4], add[1] = mean_logits[warp * 16 + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float2 l = *reinterpret_cast<const float2*>(lse2 + n * 8 + 2 * (lane & 3));
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[n][e] = ptx::exp2(fmaf(__int_as_float(x[n][e]) - quant::MAGIC, factor, add[e >> 1] - (e & 1 ? l.y : l.x)));
      }
    }
    if (hides) mask_scores(s, block.segment, tile.tile * TILE, block.first_key + warp * 16, lane);

    uint32_t codes[2][4];
    float dequant[2];
    const float* dout_dequant = reinterpret_cast<const float*>(memory + stage_at(stage) + DOUT_SCALE_AT);
    quantize_scores(s, codes, dequant, lane);
    multiply_codes(codes, at + 2 * CODES, lane, [&](int n, const int(&y)[4]) {
      float2 d = *reinterpret_cast<const float2*>(dout_dequant + n * 8 + 2 * (lane & 3));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dv[n][e] = fmaf(scaled(y[e], dequant[e >> 1]), e & 1 ? d.y : d.x, dv[n][e]);
    });

    // dS = P o (dP - D)
    {
      Scores dp;
      multiply_dp<T, D>(dp, shared + V_AT + warp * 16 * 2 * D, at + DOUT_AT, lse2 + TILE, lane);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e];
    }
    // bf16 also for f16 inputs: real dS is about 1e-7, which f16 cannot hold.
    store_scores<__nv_bfloat16>(ds_rows, s, lane);
    if constexpr (QK) {
      // dK = dS^T (Q - mean) + (dS^T 1) mean: the second term, from unquantized dS.
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
          dk[n][e] = fmaf(sums[e >> 1], __ldg(p.codes.q_mean + tile.padded * D + n * 8 + 2 * (lane & 3) + (e & 1)), dk[n][e]);
    }
    quantize_scores(s, codes, dequant, lane);
    dequant[0] = quant::short_factor(dequant[0] * q_dequant), dequant[1] = quant::short_factor(dequant[1] * q_dequant);
    multiply_codes(codes, at + CODES, lane, [&](int n, const int(&y)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] += scaled(y[e], dequant[e >> 1]);
    });
  }

  // dQ += dS K for 16 queries of the tile. The warps of a strip share the work: each makes codes of dS over one tile of
  // keys, and takes a part of the channels over all of them.
  __device__ __forceinline__ void add_dq(const QueryTile& tile, int stage, const DqSums& sums) {
    constexpr int CHANNELS = D / Plan::PARTS;
    int lane = ptx::opaque(threadIdx.x) % 32, strip = warp % 4, part = warp / 4;
    uint32_t codes[Plan::PARTS][2][4];  // (tile of keys, 32 keys): an operand of 16 queries x 32 keys
    float dequant[Plan::PARTS][2];
    {
      layout::TransposedReaderA<TILE * 2> reader(shared + DS_AT, lane);
      uint32_t r[4][4];
      float2 x[4][4];
      float largest[2] = {0.0f, 0.0f};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        reader.load(r[step], part * TILE + step * 16, strip);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[step][i] = make_float2(__uint_as_float(r[step][i] << 16), __uint_as_float(r[step][i] & 0xffff0000u));
          largest[i & 1] = max_abs(largest[i & 1], max_abs(x[step][i].x, x[step][i].y));
        }
      }
      largest[0] = quad_max_abs(largest[0]), largest[1] = quad_max_abs(largest[1]);
      share_maxima(largest, lane);
      float scale[2] = {quant::quick_quant_scale(largest[0]), quant::quick_quant_scale(largest[1])};
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // Registers 0 and 2 of 16 keys are row g, 1 and 3 row g + 8; slots hold tokens as in permutation.cuh.
          float2 low = x[2 * i + j / 2][j & 1], high = x[2 * i + j / 2][(j & 1) + 2];
          codes[0][i][j] = quant::codes(low.x, low.y, high.x, high.y, scale[j & 1]);
        }
#pragma unroll
      for (int h = 0; h < 2; ++h) dequant[0][h] = quant::short_factor(largest[h] * (1.0f / 127.0f) * k_dequant);
    }
    if constexpr (Plan::PARTS == 2) {
      uint32_t* exchange = reinterpret_cast<uint32_t*>(memory + EXCHANGE_AT) + lane;
      uint32_t* mine = exchange + warp * EXCHANGE_WORDS;
#pragma unroll
      for (int i = 0; i < 8; ++i) mine[i * 32] = codes[0][i / 4][i % 4];
      mine[8 * 32] = __float_as_uint(dequant[0][0]), mine[9 * 32] = __float_as_uint(dequant[0][1]);
      ptx::barrier(1 + strip, 64);
      const uint32_t* other = exchange + (warp ^ 4) * EXCHANGE_WORDS;
      // In the order of the keys: sums must not depend on who computes them.
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t own = codes[0][i / 4][i % 4], theirs = other[i * 32];
        codes[0][i / 4][i % 4] = part == 0 ? own : theirs;
        codes[1][i / 4][i % 4] = part == 0 ? theirs : own;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float own = dequant[0][h], theirs = __uint_as_float(other[(8 + h) * 32]);
        dequant[0][h] = part == 0 ? own : theirs;
        dequant[1][h] = part == 0 ? theirs : own;
      }
    }
    layout::ReaderB<KEYS> k_reader(shared + KT_AT, lane);
#pragma unroll
    for (int n = 0; n < CHANNELS / 8; n += 2) {
      float dq[2][4] = {};
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
          for (int e = 0; e < 4; ++e) dq[i][e] += scaled(y[i][e], dequant[keys][e >> 1]);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) sums.template add<D>(tile.padded, strip, part * (CHANNELS / 8) + n + i, lane, dq[i]);
    }
  }

 private:
  // factor * (x - MAGIC) with one rounding; `factor` is short.
  static __device__ __forceinline__ float scaled(int x, float factor) {
    return fmaf(__int_as_float(x), factor, -quant::MAGIC * factor);
  }

  // |x| of which either is larger; a NaN wins.
  static __device__ __forceinline__ float max_abs(float a, float b) {
    return __uint_as_float(max(quant::abs_bits(a), quant::abs_bits(b)));
  }

  // Largest of the four lanes of a row; a NaN wins.
  static __device__ __forceinline__ float quad_max_abs(float x) {
    return __int_as_float(quad_max(__float_as_int(x)));
  }

  // Makes the maxima of rows g and g + 8 those of their groups.
  __device__ __forceinline__ void share_maxima(float (&largest)[2], int lane) const {
    if (p.group == 1) return;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      for (int lanes = 4; lanes < 4 * min(p.group, 8); lanes *= 2)
        largest[h] = max_abs(largest[h], __shfl_xor_sync(~0u, largest[h], lanes));
    if (p.group < 16) return;
    largest[0] = largest[1] = max_abs(largest[0], largest[1]);
    if (p.group == 16) return;
    float* maxima = reinterpret_cast<float*>(memory + MAXIMA_AT);
    __syncthreads();
    if (lane == 0) maxima[warp] = largest[0];
    __syncthreads();
    int warps = p.group / 16;
    for (int i = 0; i < warps; ++i) largest[0] = max_abs(largest[0], maxima[warp / warps * warps + i]);
    largest[1] = largest[0];
  }

  // Codes of a warp's scores, one scale a key or a group of them, as left operands of 16 keys x 32 queries.
  __device__ __forceinline__ void quantize_scores(const Scores& s, uint32_t (&codes)[2][4], float (&dequant)[2],
                                                  int lane) const {
    float largest[2] = {0.0f, 0.0f}, scale[2];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) largest[e >> 1] = max_abs(largest[e >> 1], s[n][e]);
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = quad_max_abs(largest[h]);
    share_maxima(largest, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[h] = quant::quick_quant_scale(largest[h]);
      dequant[h] = quant::short_factor(largest[h] * (1.0f / 127.0f));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int n = 4 * i + 2 * (j / 2), h = 2 * (j & 1);
        codes[i][j] = quant::codes(s[n][h], s[n][h + 1], s[n + 1][h], s[n + 1][h + 1], scale[j & 1]);
      }
  }

  // Codes times 64 transposed queries, [D][64]; hands on the sums, MAGIC and all, eight channels at a time.
  template <class Use>
  __device__ __forceinline__ void multiply_codes(const uint32_t (&codes)[2][4], uint32_t rows, int lane, Use use) const {
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
