// SageBwd backward on INT8 codes (arXiv 2603.02170, algorithm 2): S, dV, dQ and dK as s8 x s8 -> s32, dP in 16 bit.
#pragma once

#include <sage/attention/backward.cuh>
#include <sage/attention/query_mean.cuh>
#include <sage/attention/softmax.cuh>
#include <sage/layout/permutation.cuh>
#include <sage/quant/codes.cuh>

namespace sage::attention {

// GENERAL: takes the ablations too. Scales may be shared by groups of vectors, and Q may be smoothed, which adds a row
// to the logits and a rank-one term to dK.
template <class T, int HEAD_DIM, class Plan_, bool GENERAL>
struct SageBwdBackward {
  using Type = T;
  using Plan = Plan_;
  static constexpr int D = HEAD_DIM;
  static constexpr int KEYS = Plan::KEYS;
  // Hopper's products, where there are: a warpgroup's 64 keys at once.
  static constexpr bool WGMMA = ptx::HAS_WGMMA && !GENERAL && Plan::KEYS == 128;
  static constexpr int UNIT = WGMMA ? 64 : 16;
  // 16-bit rows lie in panels of 64 channels: what one swizzled line holds.
  static constexpr int PANELS = WGMMA ? D / 64 : 1;
  // A part for each warpgroup, where the registers allow it: see backward_roles.cuh.
  static constexpr bool ROLES = WGMMA && D == 64;
  static constexpr int LOADERS = ROLES ? 128 : Plan::THREADS;
  // Shared memory: K, K^T, V; stages of Q, Q^T, dO^T, dO, log-sum-exp, delta, scales of dO; slots of dS^T; slots of
  // its codes; the largest of each warp; logits of Q's mean.
  static constexpr int CODES = TILE * D;
  static constexpr int KT_AT = KEYS * D, V_AT = 2 * KEYS * D, STAGES_AT = 4 * KEYS * D;
  static constexpr int DOUT_AT = 3 * CODES, STATE_AT = 5 * CODES, DOUT_SCALE_AT = STATE_AT + 2 * TILE * 4;
  static constexpr int STAGE_BYTES = (DOUT_SCALE_AT + D * 4 + 1023) / 1024 * 1024;
  static constexpr int DS_AT = STAGES_AT + Plan::STAGES * STAGE_BYTES;
  static constexpr int DS_BYTES = KEYS * TILE * 2;
  static constexpr int CODES_AT = DS_AT + 2 * DS_BYTES;
  // A warp's codes of dS, 16 queries x 64 keys, and their two scales a lane.
  static constexpr int CODES_BYTES = Plan::PARTS > 1 && !ROLES ? Plan::WARPS * (1024 + 256) : 0;
  static constexpr int MAXIMA_AT = CODES_AT + 2 * CODES_BYTES;
  static constexpr int MEAN_AT = MAXIMA_AT + Plan::WARPS * 4;
  static constexpr int SHARED_BYTES = MEAN_AT + (GENERAL ? KEYS * 4 : 0);
  // With one part a warp makes the codes it needs on the spot.
  static constexpr int LAG = Plan::PARTS;
  static constexpr bool COOPERATES = GENERAL;

  const params::Backward& p;
  const BackwardBlock& block;
  unsigned char* memory;
  uint32_t shared;
  int warp;
  float k_dequant;  // of the warp's keys
  float dk[D / 8][4] = {}, dv[D / 8][4] = {};
  float magic_part[2] = {0.0f, 0.0f};  // of dK's rows, in units of MAGIC
  int magic_tiles = 0;                 // since it was taken out

  __device__ __forceinline__ SageBwdBackward(const params::Backward& p, const BackwardBlock& b, unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)), warp(threadIdx.x / 32) {
    k_dequant = k_dequant_of(warp / 4);
  }

  __device__ __forceinline__ float k_dequant_of(int part) const {
    return part < Plan::PARTS && key_tile_exists(part) ? __ldg(p.codes.k_scale + key_tile() + part) : 0.0f;
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
    copy_panels<KEYS, Plan::THREADS>(shared + V_AT, v, block.first_key, threadIdx.x);
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
      *reinterpret_cast<uint4*>(memory + KT_AT + layout::swizzled<KEYS>(channel, group)) =
          layout::gather_tokens([&](int key) {
            return memory[layout::swizzled<D>(group * 16 + key, channel / 16) + channel % 16];
          });
    }
  }

  __device__ __forceinline__ void load(const QueryTile& tile, int stage) { load(tile, stage, ptx::opaque(threadIdx.x)); }
  __device__ __forceinline__ void load(const QueryTile& tile, int stage, int thread) {
    const Segment& s = block.segment;
    uint32_t at = shared + stage_at(stage);
    int64_t codes = int64_t(tile.padded) * CODES;
    copy_tile<TILE, D, LOADERS>(at, p.codes.q + codes, thread);
    copy_tile<D, TILE, LOADERS>(at + CODES, p.q_transposed + codes, thread);
    copy_tile<D, TILE, LOADERS>(at + 2 * CODES, p.dout_transposed + codes, thread);
    Rows<T> dout(p.dout, s.batch, s.query_start, tile.head, s.query_len, p.shape.head_dim);
    copy_panels<TILE, LOADERS>(at + DOUT_AT, dout, tile.tile * TILE, thread);
    copy_row_state(at + STATE_AT, p, tile, thread);
    if (thread < D / 4) ptx::copy_16(at + DOUT_SCALE_AT + thread * 16, p.dout_scale + int64_t(tile.padded) * D + thread * 4, true);
  }

  __device__ __forceinline__ void scores(const QueryTile& tile, int stage, int slot, bool hides, bool seen) {
    int lane = threadIdx.x % 32;
    uint32_t at = shared + stage_at(stage);
    const float* minus_lse2 = reinterpret_cast<const float*>(memory + stage_at(stage) + STATE_AT);
    uint32_t ds_rows = shared + DS_AT + slot * DS_BYTES + warp * 16 * TILE * 2;
    float q_dequant = __ldg(p.codes.q_scale + tile.padded);
    float* mean_logits = reinterpret_cast<float*>(memory + MEAN_AT);
    bool smooth_q = GENERAL && p.codes.q_mean;
    if (smooth_q) {
      query_mean_logits<T, D>(p.k, p.codes, p.shape, block.segment, block.segment_index, block.key_head, tile.padded, 1,
                              block.first_key, KEYS, mean_logits);
      __syncthreads();
    }
    Scores s;
    // Scales shared among warps need all of them.
    if (!seen && (!GENERAL || p.group <= 16)) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
      store_scores<T>(ds_rows, s, lane);
      return;
    }

    // P = 2^(logit - LSE)
    Scores dp;
    {
      int x[8][4];
      if constexpr (WGMMA) {
        start_scores(x, at);
        start_dp(dp, at + DOUT_AT, minus_lse2 + TILE, lane);
        ptx::wgmma_wait<1>(x);
      } else {
        multiply_scores(x, at, lane);
        // Asked for early, where registers allow it: the matrix units work on it while P is computed.
        if constexpr (D == 64) multiply_dp<T, D>(dp, shared + V_AT + warp * 16 * 2 * D, at + DOUT_AT, minus_lse2 + TILE, lane);
      }
      float factor = q_dequant * k_dequant * (p.shape.softmax_scale * ptx::LOG2_E);
      // MAGIC and the log-sum-exp in one addend. What that rounds off is at most half a unit of sums whose own error, from
      // the codes of Q and K, is about a hundred.
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
    if (hides) mask_scores(s, block.segment, tile.tile * TILE, block.first_key + warp * 16, lane);

    uint32_t codes[2][4];
    float dequant[2];
    const float* dout_dequant = reinterpret_cast<const float*>(memory + stage_at(stage) + DOUT_SCALE_AT);
    quantize_scores<true>(s, codes, dequant, lane);
    auto add_dv = [&](int n, const int(&y)[4]) {
      float2 d = *reinterpret_cast<const float2*>(dout_dequant + n * 8 + 2 * (lane & 3));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        dv[n][e] = fmaf(scaled(y[e], dequant[e >> 1]), e & 1 ? d.y : d.x, dv[n][e]);
    };
    int y[8][4];  // Hopper: a product under way, of 64 channels
    if constexpr (WGMMA) {
      start_codes(y, codes, at + 2 * CODES, 0);
      ptx::wgmma_wait<1>(dp);
    } else {
      multiply_codes(codes, at + 2 * CODES, lane, add_dv);
    }

    // dS = P o (dP - D)
    if constexpr (!WGMMA && D > 64) multiply_dp<T, D>(dp, shared + V_AT + warp * 16 * 2 * D, at + DOUT_AT, minus_lse2 + TILE, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e];
    // bf16 also for f16 inputs: real dS is about 1e-7, which f16 cannot hold.
    store_scores<__nv_bfloat16>(ds_rows, s, lane);
    if (smooth_q) {
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
          dk[n][e] = fmaf(sums[e >> 1], __ldg(p.codes.q_mean + int64_t(tile.padded) * D + n * 8 + 2 * (lane & 3) + (e & 1)), dk[n][e]);
    }
    uint32_t ds_codes[2][4];
    float ds_dequant[2];
    quantize_scores<false>(s, ds_codes, ds_dequant, lane);
    ds_dequant[0] *= q_dequant, ds_dequant[1] *= q_dequant;
    auto add_dk = [&](int n, const int(&y)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] = fmaf(__int_as_float(y[e]), ds_dequant[e >> 1], dk[n][e]);
    };
    if constexpr (WGMMA) {
#pragma unroll
      for (int panel = 0; panel < D / 64; ++panel) {
        if (panel > 0) start_codes(y, codes, at + 2 * CODES, panel);
        ptx::wgmma_wait<0>(y);
#pragma unroll
        for (int n = 0; n < 8; ++n) add_dv(panel * 8 + n, y[n]);
      }
#pragma unroll
      for (int panel = 0; panel < D / 64; ++panel) {
        start_codes(y, ds_codes, at + CODES, panel);
        ptx::wgmma_wait<0>(y);
#pragma unroll
        for (int n = 0; n < 8; ++n) add_dk(panel * 8 + n, y[n]);
      }
    } else {
      multiply_codes(ds_codes, at + CODES, lane, add_dk);
    }
    // The sums came as MAGIC + integer; what MAGIC added goes out again before it grows large.
    magic_part[0] += ds_dequant[0], magic_part[1] += ds_dequant[1];
    if (++magic_tiles == quant::MAGIC_TILES) settle();
  }

  // Takes out of dK what MAGIC added since the last time.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) dk[n][e] = fmaf(-quant::MAGIC, magic_part[e >> 1], dk[n][e]);
    magic_part[0] = magic_part[1] = 0.0f;
    magic_tiles = 0;
  }

  // Codes of dS for 16 queries over one tile of keys, out of a slot of dS and into the same slot of codes. The warps of
  // a strip of queries share the work: each makes the codes over one tile of keys.
  __device__ __forceinline__ void prepare_dq(int slot) {
    int lane = threadIdx.x % 32;
    uint4 codes[2];
    float2 dequant;
    quantize_queries(codes, dequant, k_dequant, slot, warp % 4, warp / 4, lane);
    uint4* words = reinterpret_cast<uint4*>(memory + CODES_AT + slot * CODES_BYTES);  // (warp, 32 keys, lane)
    float2* scales = reinterpret_cast<float2*>(words + Plan::WARPS * 64);
    words[warp * 64 + lane] = codes[0];
    words[warp * 64 + 32 + lane] = codes[1];
    scales[warp * 32 + lane] = dequant;
  }

  // dQ += dS K for 16 queries of a tile, and a part of the channels.
  __device__ __forceinline__ void add_dq(int padded_tile, int slot, const DqSums& sums) {
    constexpr int CHANNELS = D / Plan::PARTS;
    int lane = threadIdx.x % 32, strip = warp % 4, part = warp / 4;
    uint4 codes[Plan::PARTS][2];  // (tile of keys, 32 keys): an operand of 16 queries x 32 keys
    float2 dequant[Plan::PARTS];  // of queries g and g + 8
    if constexpr (Plan::PARTS == 1) {
      quantize_queries(codes[0], dequant[0], k_dequant, slot ^ 1, strip, part, lane);
    } else {
      const uint4* words = reinterpret_cast<const uint4*>(memory + CODES_AT + slot * CODES_BYTES);
      const float2* scales = reinterpret_cast<const float2*>(words + Plan::WARPS * 64);
#pragma unroll
      for (int i = 0; i < Plan::PARTS; ++i) {
        codes[i][0] = words[(strip + 4 * i) * 64 + lane];
        codes[i][1] = words[(strip + 4 * i) * 64 + 32 + lane];
        dequant[i] = scales[(strip + 4 * i) * 32 + lane];
      }
    }
    float2 magic = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < Plan::PARTS; ++i) magic.x -= quant::MAGIC * dequant[i].x, magic.y -= quant::MAGIC * dequant[i].y;
    float dq[CHANNELS / 8][4];
#pragma unroll
    for (int n = 0; n < CHANNELS / 8; ++n) dq[n][0] = dq[n][1] = magic.x, dq[n][2] = dq[n][3] = magic.y;
    if constexpr (WGMMA) {
      int y[Plan::PARTS][CHANNELS / 8][4];
      set_magic(y[0]), set_magic(y[1]);
      ptx::hold(y[0]), ptx::hold(y[1]);
      uint64_t keys_t = ptx::row_descriptor<KEYS>(shared + KT_AT + part * CHANNELS * KEYS);
      ptx::wgmma_fence();
#pragma unroll
      for (int keys = 0; keys < Plan::PARTS; ++keys)
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t a[4] = {codes[keys][step].x, codes[keys][step].y, codes[keys][step].z, codes[keys][step].w};
          ptx::wgmma_s8(y[keys], a, keys_t + 2 * (keys * 2 + step));
        }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>(y[0]);
      ptx::hold(y[1]);
#pragma unroll
      for (int keys = 0; keys < Plan::PARTS; ++keys)
#pragma unroll
        for (int n = 0; n < CHANNELS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            dq[n][e] = fmaf(__int_as_float(y[keys][n][e]), e < 2 ? dequant[keys].x : dequant[keys].y, dq[n][e]);
    } else {
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
            const uint32_t a[4] = {codes[keys][step].x, codes[keys][step].y, codes[keys][step].z, codes[keys][step].w};
            quant::multiply(y[0], a, b[0], b[1], step == 0);
            quant::multiply(y[1], a, b[2], b[3], step == 0);
          }
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              dq[n + i][e] = fmaf(__int_as_float(y[i][e]), e < 2 ? dequant[keys].x : dequant[keys].y, dq[n + i][e]);
        }
      }
    }
    sums.template add<D>(padded_tile, strip, part * (CHANNELS / 8), lane, dq);
  }

  // The same by one warpgroup, all channels, straight out of dS.
  __device__ __forceinline__ void add_dq_alone(int padded_tile, int slot, const DqSums& sums) {
    static_assert(D == 64, "one product");
    int lane = threadIdx.x % 32, strip = warp % 4;
    uint64_t keys_t = ptx::row_descriptor<KEYS>(shared + KT_AT);
    float dq[8][4];
    int y[8][4];
#pragma unroll
    for (int part = 0; part < Plan::PARTS; ++part) {
      uint4 codes[2];
      float2 dequant;
      quantize_queries(codes, dequant, k_dequant_of(part), slot, strip, part, lane);
      float2 magic = make_float2(-quant::MAGIC * dequant.x, -quant::MAGIC * dequant.y);
      set_magic(y);
      ptx::hold(y);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t a[4] = {codes[step].x, codes[step].y, codes[step].z, codes[step].w};
        ptx::wgmma_s8(y, a, keys_t + 2 * (part * 2 + step));
      }
      ptx::wgmma_commit();
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float add = e < 2 ? magic.x : magic.y;
          dq[n][e] = part == 0 ? add : dq[n][e] + add;
        }
      ptx::wgmma_wait<0>(y);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dq[n][e] = fmaf(__int_as_float(y[n][e]), e < 2 ? dequant.x : dequant.y, dq[n][e]);
    }
    sums.template add<D>(padded_tile, strip, 0, lane, dq);
  }

 private:
  template <int ROWS, int THREADS>
  static __device__ __forceinline__ void copy_panels(uint32_t to, Rows<T> rows, int first, int thread) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      copy_rows<ROWS, D / PANELS, THREADS>(to + panel * ROWS * 128, rows, first, thread);
      rows.skip_channels(64);
    }
  }

  // S^T = K Q^T, codes of 16 keys a warp.
  __device__ __forceinline__ void multiply_scores(int (&x)[8][4], uint32_t q_rows, int lane) const {
    layout::ReaderA<D> k_reader(shared + warp * 16 * D, lane);
    layout::ReaderB<D> q_reader(q_rows, lane);
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
  }

  template <int N>
  static __device__ __forceinline__ void set_magic(int (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = quant::MAGIC_BITS;
  }

  // The same for a warpgroup's 64 keys, on Hopper; its end is to be waited for.
  __device__ __forceinline__ void start_scores(int (&x)[8][4], uint32_t q_rows) const {
    uint64_t keys = ptx::row_descriptor<D>(shared + warp / 4 * 64 * D), queries = ptx::row_descriptor<D>(q_rows);
    set_magic(x);
    ptx::hold(x);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < D / 32; ++step) ptx::wgmma_s8(x, keys + 2 * step, queries + 2 * step);
    ptx::wgmma_commit();
  }

  // dP^T - D = V dO^T - D.
  __device__ __forceinline__ void start_dp(Scores& dp, uint32_t dout_rows, const float* minus_delta, int lane) const {
    set_columns(dp, minus_delta, lane);
    ptx::hold(dp);
    ptx::wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < D / 64; ++panel) {
      uint64_t values = ptx::row_descriptor<128>(shared + V_AT + panel * KEYS * 128 + warp / 4 * 64 * 128);
      uint64_t douts = ptx::row_descriptor<128>(dout_rows + panel * TILE * 128);
#pragma unroll
      for (int step = 0; step < 4; ++step) ptx::wgmma_16<T>(dp, values + 2 * step, douts + 2 * step);
    }
    ptx::wgmma_commit();
  }

  // Codes times 64 transposed queries, for 64 of the channels.
  static __device__ __forceinline__ void start_codes(int (&y)[8][4], const uint32_t (&codes)[2][4], uint32_t rows, int panel) {
    uint64_t channels = ptx::row_descriptor<TILE>(rows + panel * 64 * TILE);
    set_magic(y);
    ptx::hold(y);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 2; ++step) ptx::wgmma_s8(y, codes[step], channels + 2 * step);
    ptx::wgmma_commit();
  }

  // One scale a query or a group of them.
  __device__ __forceinline__ void quantize_queries(uint4 (&codes)[2], float2& dequant, float k_dequant, int slot,
                                                   int strip, int part, int lane) const {
    layout::TransposedReaderA<TILE * 2> reader(shared + DS_AT + slot * DS_BYTES, lane);
    uint32_t r[4][4];  // (16 keys, register): 0 and 2 are query g, 1 and 3 query g + 8, each of two keys in bf16
    uint32_t largest16[2] = {0, 0};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      reader.load(r[step], part * TILE + step * 16, strip);
#pragma unroll
      for (int i = 0; i < 4; ++i) largest16[i & 1] = __vmaxu2(largest16[i & 1], r[step][i] & 0x7fff7fffu);
    }
    float largest[2], scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      largest[h] = quad_max_abs(__uint_as_float(max(largest16[h] & 0xffff0000u, largest16[h] << 16)));
    share_maxima(largest, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = quant::quick_quant_scale(largest[h]);
    uint32_t words[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Four slots are two keys of the low eight and two of the high eight: layout/permutation.cuh.
        uint32_t low = r[2 * i + j / 2][j & 1], high = r[2 * i + j / 2][(j & 1) + 2];
        words[i][j] = quant::codes(__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
                                   __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u), scale[j & 1]);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i) codes[i] = make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
    dequant = make_float2(largest[0] * (1.0f / 127.0f) * k_dequant, largest[1] * (1.0f / 127.0f) * k_dequant);
  }

  // factor * (x - MAGIC) with one rounding; `factor` is short.
  static __device__ __forceinline__ float scaled(int x, float factor) {
    return fmaf(__int_as_float(x), factor, -quant::MAGIC * factor);
  }

  // Largest of the four lanes of a row; a NaN wins.
  static __device__ __forceinline__ float quad_max_abs(float x) {
    return __int_as_float(quad_max(__float_as_int(x)));
  }

  // Makes the maxima of rows g and g + 8 those of their groups.
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

  // Codes of a warp's scores, one scale a key or a group of them, as left operands of 16 keys x 32 queries.
  template <bool POSITIVE>
  __device__ __forceinline__ void quantize_scores(const Scores& s, uint32_t (&codes)[2][4], float (&dequant)[2],
                                                  int lane) const {
    float largest[2], scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (POSITIVE) {
        // The order of positive floats is that of the integers, with NaN on top.
        int bits = 0;
#pragma unroll
        for (int n = 0; n < 8; ++n) bits = max(max(bits, __float_as_int(s[n][2 * h])), __float_as_int(s[n][2 * h + 1]));
        largest[h] = __int_as_float(bits);
      } else {
        largest[h] = ptx::max_abs(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
        for (int n = 1; n < 8; ++n) largest[h] = ptx::max_abs(ptx::max_abs(largest[h], s[n][2 * h]), s[n][2 * h + 1]);
      }
    }
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
