// The backward of SageBwd on Hopper. It computes the same as sagebwd_backward_sm80.cuh, but does not support the
// ablations that are listed there. A separate warpgroup computes dQ.
#pragma once

#include <sage/attention/mainloop/backward_sm90_dq_warpgroup.cuh>
#include <sage/attention/numerics/score_codes_sm90.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, params::Plan PLAN>
struct SageBwdBackwardSm90DqWarpgroup {
  using Type = T;
  static constexpr int D = HEAD_DIM, STAGES = PLAN.stages, CONSUMER_REGISTERS = CONSUMERS_KEEP_DK<D> ? 192 : 160;
  // Matmuls are computed CHUNK channels at a time: as many as registers allow.
  static constexpr int CHUNK = CONSUMERS_KEEP_DK<D> ? 64 : 32, CHUNKS = D / CHUNK;
  // Shared memory: INT8 K and K^T, 16-bit V, stages, f16 dS^T, two slots, staging memory of dQ, and the power of two by
  // which each consumer warp divides its dS^T (DsUnit). A stage has INT8 Q, Q^T and dO^T, 16-bit dO, log-sum-exp,
  // delta, and the scales of dO^T and Q. A slot has the INT8 dS for dQ, the INT8 dS for dK (if the dQ warpgroup
  // computes dK), and the scales of dS.
  static constexpr int CODES = TILE * D;
  static constexpr int KT_AT = SM90_KEYS * D, V_AT = 2 * SM90_KEYS * D, STAGES_AT = 4 * SM90_KEYS * D;
  static constexpr int DOUT_AT = 3 * CODES, STATE_AT = 5 * CODES, DOUT_SCALE_AT = STATE_AT + 2 * TILE * 4;
  static constexpr int Q_SCALE_AT = DOUT_SCALE_AT + D * 4;
  static constexpr int STAGE_BYTES = (Q_SCALE_AT + 4 + 1023) / 1024 * 1024;
  static constexpr int DS_AT = STAGES_AT + STAGES * STAGE_BYTES, DS_BYTES = SM90_KEYS * TILE * 2;
  static constexpr int SLOTS_AT = DS_AT + DS_BYTES, DS_CODES_BYTES = SM90_KEYS * TILE;
  static constexpr int DK_CODES_AT = DS_CODES_BYTES, DK_CODES_BYTES = CONSUMERS_KEEP_DK<D> ? 0 : DS_CODES_BYTES;
  static constexpr int SCALES_AT = DK_CODES_AT + DK_CODES_BYTES;
  static constexpr int SLOT_BYTES = SCALES_AT + 1024;
  static constexpr int STAGING_AT = SLOTS_AT + 2 * SLOT_BYTES;
  static constexpr int UNITS_AT = STAGING_AT + STAGING_BYTES<D>;
  static constexpr int SHARED_BYTES = UNITS_AT + CONSUMERS * 4 * 4;
  static_assert(PLAN.mainloop == params::BACKWARD_SM90_DQ_WARPGROUP);
  static_assert(CONSUMERS_KEEP_DK<D> || 4 * GRADIENT_STAGING <= DK_CODES_BYTES);
  static_assert(PLAN.rows == SM90_KEYS && PLAN.threads == SM90_THREADS && PLAN.row_bytes == D && PLAN.shared_bytes == SHARED_BYTES);

  const params::Backward& p;
  const BackwardBlock& block;
  unsigned char* memory;
  uint32_t shared;

  __device__ __forceinline__ SageBwdBackwardSm90DqWarpgroup(const params::Backward& p, const BackwardBlock& b, unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)) {}

  static __device__ __forceinline__ int stage_at(int stage) { return STAGES_AT + stage * STAGE_BYTES; }
  // The dS^T of a consumer, which no other warpgroup reads. The consumer's warps write dS^T and `units` between the
  // barriers SLOT_EMPTY and WITHIN_CONSUMER, and read them between WITHIN_CONSUMER and the next SLOT_EMPTY. All warps
  // of the consumer meet at both barriers.
  __device__ __forceinline__ uint32_t ds_rows(int warpgroup) const { return shared + DS_AT + warpgroup * CONSUMER_KEYS * TILE * 2; }
  // For each warp of a consumer: the power of two by which the warp's dS^T is divided (see DsUnit).
  __device__ __forceinline__ float4* units(int warpgroup) const { return reinterpret_cast<float4*>(memory + UNITS_AT) + warpgroup; }
  static __device__ __forceinline__ int slot_at(int slot) { return SLOTS_AT + slot * SLOT_BYTES; }
  __device__ __forceinline__ uint32_t dq_codes(int slot, int warpgroup) const {
    return shared + slot_at(slot) + warpgroup * CONSUMER_KEYS * TILE;
  }
  __device__ __forceinline__ uint32_t dk_codes(int slot, int warpgroup) const { return dq_codes(slot, warpgroup) + DK_CODES_AT; }
  // For each query: the dequant_scale of its INT8 dS for one consumer's keys, times the dequant_scale of K.
  __device__ __forceinline__ float* dq_dequant(int slot, int warpgroup) const {
    return reinterpret_cast<float*>(memory + slot_at(slot) + SCALES_AT) + warpgroup * TILE;
  }
  // For each key: the dequant_scale of its INT8 dS, times the dequant_scale of Q.
  __device__ __forceinline__ float* dk_dequant(int slot, int warpgroup) const { return dq_dequant(slot, warpgroup) + CONSUMERS * TILE; }
  // Stores 16 rows of 64 INT8 values, from `row` on, and their scales. `low` is the scale of row `row` + lane / 4,
  // and `high` the scale of row `row` + lane / 4 + 8.
  static __device__ __forceinline__ void store_codes(uint32_t rows, float* scales, int row, int lane, const ScoreCodes& codes,
                                                     float low, float high) {
    layout::ReaderA<TILE> writer(rows + row * TILE, lane);
#pragma unroll
    for (int step = 0; step < 2; ++step) writer.store(codes[step], 0, step, lane);
    if (lane % 4 == 0) scales[row + lane / 4] = low, scales[row + lane / 4 + 8] = high;
  }

  __device__ __forceinline__ void load_keys() {
    const Segment& s = block.segment;
    Rows<T> v(p.v, s.batch, s.key_start, block.key_head, s.key_len, p.shape.value_dim);
    copy_panels<SM90_KEYS, D, CONSUMER_THREADS>(shared + V_AT, v, block.first_key, threadIdx.x);
    copy_key_tiles<CONSUMERS, D, CONSUMER_THREADS>(shared, p, block);
  }
  __device__ __forceinline__ void keys_arrived() { transpose_keys<SM90_KEYS, D, CONSUMER_THREADS>(memory + KT_AT, memory); }

  __device__ __forceinline__ uint32_t gradient_staging(int warp) const { return shared + V_AT + warp * GRADIENT_STAGING; }

  // Arrivals at the mbarrier for each tile: one for the bulk copies of INT8 values and row state, and one per thread
  // that copies dO. If dO has a tensor map, one thread copies it, otherwise all threads of the warpgroup.
  static __device__ __forceinline__ int fetching(const params::Backward& p) { return p.dout.mapped ? 2 : WARPGROUP_THREADS + 1; }
  __device__ __forceinline__ void load(const QueryTile& tile, int stage, int thread, uint32_t mbarrier) {
    const Segment& s = block.segment;
    uint32_t at = shared + stage_at(stage);
    if (thread == 0) {
      int64_t codes = int64_t(tile.padded) * CODES, rows = int64_t(tile.padded) * TILE;
      ptx::mbarrier_arrive_expect_tx(mbarrier, 3 * CODES + 2 * TILE * 4 + D * 4 + (p.dout.mapped ? 2 * CODES : 0));
      ptx::cp_async_bulk(at, p.codes.q + codes, CODES, mbarrier);
      ptx::cp_async_bulk(at + CODES, p.q_transposed + codes, CODES, mbarrier);
      ptx::cp_async_bulk(at + 2 * CODES, p.dout_transposed + codes, CODES, mbarrier);
      ptx::cp_async_bulk(at + STATE_AT, p.minus_lse2 + rows, TILE * 4, mbarrier);
      ptx::cp_async_bulk(at + STATE_AT + TILE * 4, p.minus_delta + rows, TILE * 4, mbarrier);
      ptx::cp_async_bulk(at + DOUT_SCALE_AT, p.dout_dequant_scale + int64_t(tile.padded) * D, D * 4, mbarrier);
      ptx::cp_async_4(at + Q_SCALE_AT, p.codes.q_dequant_scale + tile.padded);
    }
    if (p.dout.mapped) {
      copy_tile_panels<PLAN.mainloop, OverEnd::WRONG, D>(at + DOUT_AT, p.dout_map, s.batch, tile.head, tile.tile * TILE, mbarrier);
      ptx::mbarrier_arrive_on_copies(mbarrier, true);
    } else {
      Rows<T> dout(p.dout, s.batch, s.query_start, tile.head, s.query_len, p.shape.value_dim);
      copy_panels<TILE, D, WARPGROUP_THREADS>(at + DOUT_AT, dout, tile.tile * TILE, thread);
      ptx::mbarrier_arrive_on_copies(mbarrier, dout.vector);
    }
  }

  struct KeyConsumer {
    const SageBwdBackwardSm90DqWarpgroup& of;
    int warpgroup;
    float k_dequant;
    float dv[D / 8][4] = {}, dk[CONSUMERS_KEEP_DK<D> ? D / 8 : 1][4] = {};
    int x[8][4];  // S^T
    DsUnit ds_unit;
    [[no_unique_address]] NoScoreMod score_mod;

    __device__ __forceinline__ KeyConsumer(const SageBwdBackwardSm90DqWarpgroup& numerics, int warpgroup)
        : of(numerics), warpgroup(warpgroup), k_dequant(k_dequant_of(numerics.p, numerics.block, warpgroup)) {}

    // Whether S^T of the next tile is issued concurrently with the last wgmmas of this tile. At head_dim 128 a thread
    // has too few registers for this.
    static constexpr bool AHEAD = D == 64;

    __device__ __forceinline__ void start(int stage) {
      if constexpr (AHEAD) multiply(stage);
    }
    __device__ __forceinline__ void multiply(int stage) {
      multiply_codes<D / 32>(x, ptx::row_descriptor<D>(of.shared + warpgroup * CONSUMER_KEYS * D),
                             ptx::row_descriptor<D>(of.shared + stage_at(stage)));
    }
    __device__ __forceinline__ void end() {
      if constexpr (AHEAD) ptx::wgmma_wait<0>(x);
    }

    template <Hidden HIDDEN, class Handover>
    __device__ __forceinline__ void scores(int tile, int stage, int slot, Masked<HIDDEN> masked, const Handover& handover) {
      // Opaque at head_dim 128, so that values computed from the thread index are recomputed: stored values would use
      // registers that the wgmmas need.
      int thread = CONSUMERS_KEEP_DK<D> ? int(threadIdx.x) : ptx::opaque(threadIdx.x);
      int lane = thread % 32, row = thread / 32 % 4 * 16;
      uint32_t at = of.shared + stage_at(stage), ds = of.ds_rows(warpgroup) + row * TILE * 2;
      const float* minus_lse2 = reinterpret_cast<const float*>(of.memory + stage_at(stage) + STATE_AT);
      const float* dout_dequant = reinterpret_cast<const float*>(of.memory + stage_at(stage) + DOUT_SCALE_AT);
      float q_dequant = *reinterpret_cast<const float*>(of.memory + stage_at(stage) + Q_SCALE_AT);

      if constexpr (!AHEAD) multiply(stage);
      Scores s, dp;
      compute_probabilities(s, dp, tile, masked, q_dequant, at, minus_lse2, row, lane);
      // dS = P o (dP - delta). It is computed before P is quantized, so that the shuffles for the maxima of P and of dS
      // overlap.
      ptx::wgmma_wait<0>(dp);
      PackedScores p, w;
      pack<__nv_bfloat16>(p, s);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= dp[n][e];
      pack<__half>(w, s);
      uint32_t p_largest = largest_of(p, MaxPositive()), largest = largest_of(w, MaxAbs());
#pragma unroll
      for (int distance = 1; distance <= 2; distance *= 2) {
        p_largest = MaxPositive()(p_largest, __shfl_xor_sync(~0u, p_largest, distance));
        largest = MaxAbs()(largest, __shfl_xor_sync(~0u, largest, distance));
      }
      ScoreCodes codes;
      float dequant[2];
      quantize_probabilities(p, p_largest, codes, dequant);
      dequant[0] *= ds_unit.unit, dequant[1] *= ds_unit.unit;
      int y[2][CHUNK / 8][4];  // accumulators of two wgmmas in flight, one chunk each
      start_values(y[0], codes, at, 0);
      float unit = ds_unit.keep(w, largest, s);
      handover.acquire_slot();
      store(ds, w, lane);
      if (lane == 0) reinterpret_cast<float*>(of.units(warpgroup))[row / 16] = unit;
      ScoreCodes ds_codes;
      float ds_dequant[2];
      quantize_keys(w, largest, ds_codes, ds_dequant);
      ds_dequant[0] *= q_dequant * ds_unit.unit, ds_dequant[1] *= q_dequant * ds_unit.unit;
      if constexpr (!CONSUMERS_KEEP_DK<D>) {
        store_codes(of.dk_codes(slot, warpgroup), of.dk_dequant(slot, warpgroup), row, lane, ds_codes, ds_dequant[0], ds_dequant[1]);
        ptx::fence_proxy_async();
        handover.publish_dk_operands();
      }
      make_dq_codes(slot, row, lane);
      ptx::fence_proxy_async();
      handover.publish_dq_operands();
      if constexpr (AHEAD) handover.start_next();

      add_products(y, codes, ds_codes, dequant, ds_dequant, at, dout_dequant, lane);
      if constexpr (!AHEAD) handover.start_next();
    }

   private:
    // Waits for S^T, issues the matmul for dP^T - delta, and computes P divided by DsUnit::unit.
    template <Hidden HIDDEN>
    __device__ __forceinline__ void compute_probabilities(Scores& s, Scores& dp, int tile, Masked<HIDDEN> masked, float q_dequant,
                                                          uint32_t at, const float* minus_lse2, int row, int lane) {
      // Adding DsUnit::exponent to -LSE divides P = 2^(logit - LSE) by DsUnit::unit.
      float2 lse[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        lse[n] = *reinterpret_cast<const float2*>(minus_lse2 + n * 8 + 2 * (lane & 3));
        lse[n].x += ds_unit.exponent, lse[n].y += ds_unit.exponent;
      }
      // dP^T - delta. -delta is read while S^T is in flight, but the accumulator is set to -delta only after the wait:
      // otherwise ptxas would insert a wait for the wgmma in flight.
      ColumnValues minus_delta(minus_lse2 + TILE, lane);
      ptx::wgmma_wait<0>(x);
      minus_delta.set(dp);
      multiply_rows<T, D, SM90_KEYS, true>(dp, of.shared + V_AT + warpgroup * CONSUMER_KEYS * 128, at + DOUT_AT);
      float factor = q_dequant * k_dequant * (of.p.shape.softmax_scale * ptx::LOG2_E);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = fmaf(float(x[n][e]), factor, e & 1 ? lse[n].y : lse[n].x);
      take_exponentials(s, masked, Sight<HIDDEN>(of.block.segment, of.p), tile * TILE, of.block.first_key + warpgroup * CONSUMER_KEYS + row, lane);
    }

    // Quantizes dS for dQ. Each warp quantizes 16 queries x all keys of the consumer.
    __device__ __forceinline__ void make_dq_codes(int slot, int row, int lane) {
      ptx::named_barrier_sync(WITHIN_CONSUMER + warpgroup, WARPGROUP_THREADS);
      ScoreCodes dq_codes;
      float2 dq_dequant;
      ds_unit.follow(quantize_queries(dq_codes, dq_dequant, of.ds_rows(warpgroup), of.units(warpgroup), row / 16, lane));
      store_codes(of.dq_codes(slot, warpgroup), of.dq_dequant(slot, warpgroup), row, lane, dq_codes, dq_dequant.x * k_dequant,
                  dq_dequant.y * k_dequant);
    }

    // Adds P^T dO to dV and then, if consumers keep dK, dS^T Q to dK, CHUNK channels at a time. The next chunk's wgmma
    // is in flight while the current chunk is added. The first chunk's wgmma was already issued, into y[0].
    __device__ __forceinline__ void add_products(int (&y)[2][CHUNK / 8][4], const ScoreCodes& codes, const ScoreCodes& ds_codes,
                                                 const float (&dequant)[2], const float (&ds_dequant)[2], uint32_t at,
                                                 const float* dout_dequant, int lane) {
      constexpr int PRODUCTS = CONSUMERS_KEEP_DK<D> ? 2 * CHUNKS : CHUNKS;
#pragma unroll
      for (int i = 0; i < PRODUCTS; ++i) {
        if (i + 1 < PRODUCTS) {
          if (i + 1 < CHUNKS) start_values(y[i + 1 & 1], codes, at, i + 1);
          else
            multiply_codes<2>(y[i + 1 & 1], ds_codes,
                              ptx::row_descriptor<TILE>(at + CODES + (i + 1 - CHUNKS) * CHUNK * TILE));
          if (AHEAD && i == 0) ptx::wgmma_wait<2>(y[0]);  // S^T of the next tile and y[1] stay in flight
          else ptx::wgmma_wait<1>(y[i & 1]);
        } else {
          ptx::wgmma_wait<0>(y[i & 1]);
        }
#pragma unroll
        for (int j = 0; j < CHUNK / 8; ++j) {
          int n = i % CHUNKS * (CHUNK / 8) + j;
          float2 d = *reinterpret_cast<const float2*>(dout_dequant + n * 8 + 2 * (lane & 3));
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float sum = float(y[i & 1][j][e]);
            if (i < CHUNKS) dv[n][e] = fmaf(sum * dequant[e >> 1], e & 1 ? d.y : d.x, dv[n][e]);
            else dk[n][e] = fmaf(sum, ds_dequant[e >> 1], dk[n][e]);
          }
        }
      }
    }

    // Issues P^T dO for a chunk of the channels.
    static __device__ __forceinline__ void start_values(int (&y)[CHUNK / 8][4], const ScoreCodes& codes, uint32_t stage, int chunk) {
      multiply_codes<2>(y, codes, ptx::row_descriptor<TILE>(stage + 2 * CODES + chunk * CHUNK * TILE));
    }
  };

  struct DqConsumer {
    const SageBwdBackwardSm90DqWarpgroup& of;
    float dk[CONSUMERS_KEEP_DK<D> ? 1 : CONSUMERS][D / 8][4] = {};

    __device__ __forceinline__ explicit DqConsumer(const SageBwdBackwardSm90DqWarpgroup& numerics) : of(numerics) {}

    // Adds dS^T Q of a consumer's keys to dK, CHUNK channels at a time. The next chunk's wgmma is in flight while the
    // current chunk is added.
    __device__ __forceinline__ void add_keys(int warpgroup, int stage, int slot) {
      int thread = ptx::opaque(threadIdx.x), lane = thread % 32, strip = thread / 32 % 4;
      const float* scales = of.dk_dequant(slot, warpgroup) + strip * 16 + lane / 4;
      float of_keys[2] = {scales[0], scales[8]};
      int y[2][CHUNK / 8][4];
      auto multiply = [&](int chunk) {
        multiply_codes<2>(y[chunk & 1], ptx::row_descriptor<TILE>(of.dk_codes(slot, warpgroup)),
                          ptx::row_descriptor<TILE>(of.shared + stage_at(stage) + CODES + chunk * CHUNK * TILE));
      };
      multiply(0);
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        if (chunk + 1 < CHUNKS) {
          multiply(chunk + 1);
          ptx::wgmma_wait<1>(y[chunk & 1]);
        } else {
          ptx::wgmma_wait<0>(y[chunk & 1]);
        }
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& sum = dk[warpgroup][chunk * (CHUNK / 8) + n][e];
            sum = fmaf(float(y[chunk & 1][n][e]), of_keys[e >> 1], sum);
          }
      }
    }
    __device__ __forceinline__ void added() {}
    // dK is staged in the memory of INT8 dS. The memory of V would not be safe: if no query tile exists,
    // this warpgroup does not wait until the consumers' copies of V have arrived.
    __device__ __forceinline__ uint32_t gradient_staging() const {
      return of.shared + slot_at(0) + DK_CODES_AT + threadIdx.x / 32 % 4 * GRADIENT_STAGING;
    }

    // dQ = dS K, with one matmul for each consumer's keys, because INT8 dS of the two consumers has different
    // scales. `start` issues no matmul, because that would need too many registers.
    __device__ __forceinline__ void start(int) {}
    template <class Sums, class Read>
    __device__ __forceinline__ void add_dq(int padded_tile, int slot, const Sums& sums, Read read) {
      int thread = ptx::opaque(threadIdx.x), lane = thread % 32, strip = thread / 32 % 4;
      float2 dequant[CONSUMERS];  // scales of queries g and g + 8
#pragma unroll
      for (int g = 0; g < CONSUMERS; ++g) {
        const float* scales = of.dq_dequant(slot, g) + strip * 16 + lane / 4;
        dequant[g] = make_float2(scales[0], scales[8]);
      }
      // Not unrolled, because interleaved chunks would need too many registers.
#pragma unroll 1
      for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        int y[CONSUMERS][CHUNK / 8][4];
        uint64_t channels = ptx::row_descriptor<SM90_KEYS>(of.shared + KT_AT + chunk * CHUNK * SM90_KEYS);
#pragma unroll
        for (int g = 0; g < CONSUMERS; ++g)
          multiply_codes<2>(y[g], ptx::row_descriptor<TILE>(of.dq_codes(slot, g)), channels + 4 * g);
        ptx::wgmma_wait<0>(y[0]);
        ptx::fence_operand(y[1]);
        if (chunk + 1 == CHUNKS) read();
        float dq[CHUNK / 8][4];
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            dq[n][e] = fmaf(float(y[0][n][e]), e < 2 ? dequant[0].x : dequant[0].y,
                            float(y[1][n][e]) * (e < 2 ? dequant[1].x : dequant[1].y));
        sums.template add<D>(padded_tile, strip, chunk * (CHUNK / 8), lane, dq);
      }
    }
  };
};

}  // namespace sage::attention
