// The forward of SageBwd (sagebwd_forward_sm80.cuh) on Hopper, without Q smoothing. A step has two tiles of keys.
//
// P has one scale for each query and the 128 keys of a step. V of these keys has two scales, one per tile. P of each
// tile is multiplied by (the tile's V scale / the larger V scale) before it is quantized, so that P V is one integer
// sum. P is quantized to u8, 0 to 254, which is twice as fine as s8.
#pragma once

#include <sage/attention/mainloop/forward_sm90.cuh>
#include <sage/quant/codes.cuh>

namespace sage::attention {

// The scales of a step's two tiles.
struct __align__(16) StepScales {
  float k[2];          // dequant_scale of K
  float log2_v[2];     // log2 of (dequant_scale of V / `v`), plus the tile's byte of `beyond`; clamped to [LEAST, 0]
  float inverse_v[2];  // 2^-log2_v
  float v;             // the larger dequant_scale of V
  float first_v;       // dequant_scale of V of the step's first tile, for queries that do not see its second tile
  int beyond;          // byte t: quantized P of tile t is divided by 2^byte (see LEAST)

  // A tile's ratio is its dequant_scale of V, divided by `v`. The sums of P are computed in f16, from exponentials that
  // are multiplied by 2^log2_v. If a tile's ratio is 2^LEAST, a P below 2^-13 of the row's largest P rounds to zero.
  // These P of a tile sum to less than 64 * 2^-13 of the row's sum. A ratio below 2^LEAST is applied as two factors:
  // 2^log2_v to the exponentials, and 2^-`beyond` only to quantized P. If a query attends almost only to the tile with
  // this ratio, the second factor removes low bits of quantized P. For each key this changes the query's output by at
  // most 2^-28 of the largest |V| in the step's other tile.
  static constexpr float LEAST = -20.0f;

  __device__ __forceinline__ StepScales(float k0, float k1, float v0, float v1)
      : k{k0, k1}, v(ptx::max_abs(v0, v1)), first_v(v0), beyond(0) {
    float tile[2] = {v0, v1}, inverse = ptx::reciprocal(v);
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      // If v0 and v1 are zero, ratio is NaN, which fmaxf and fminf ignore.
      float ratio = __log2f(tile[t] * inverse), power = fminf(fmaxf(ceilf(LEAST - ratio), 0.0f), 9.0f);
      log2_v[t] = fminf(fmaxf(ratio + power, LEAST), 0.0f);
      inverse_v[t] = ptx::exp2(-log2_v[t]);
      beyond |= int(power) << 8 * t;
    }
  }
};

template <class T, int HEAD_DIM, params::Plan PLAN>
struct SageBwdForwardSm90 {
  using Type = T;
  static constexpr int D = HEAD_DIM;
  using Warpgroups = ForwardWarpgroups<2, PLAN.rows == 192 ? 32 : 40, PLAN>;
  // STEP_ARRIVALS: one for a step's bulk copies, one for its scales.
  static constexpr int QUERY_SLOTS = 2, QUERY_ARRIVALS = 1, STEP_ARRIVALS = 2;
  static constexpr bool VALUES_FIRST = true, SMOOTHS_VALUES = true;
  // At D = 64 a separate loop for masked steps would make ptxas spill.
  template <Hidden HIDDEN>
  static constexpr bool MASKS_APART = D == 128 && HIDDEN != OUTER_KEYS;
  // Shared memory: two slots, each with a tile of Q per consumer; the stages, each with two tiles of K and two of V^T;
  // the StepScales of each stage.
  static constexpr int TILE_BYTES = TILE * D, Q_BYTES = Warpgroups::CONSUMERS * TILE_BYTES;
  static constexpr int SCALES_AT = 2 * Q_BYTES + Warpgroups::STAGES * 4 * TILE_BYTES;
  static constexpr int SHARED_BYTES = SCALES_AT + Warpgroups::STAGES * int(sizeof(StepScales));
  static_assert(PLAN.row_bytes == D && PLAN.shared_bytes == SHARED_BYTES);

  static constexpr int STAGING = TILE_BYTES / 4;  // bytes per warp; a warp stages its output where its INT8 Q was

  const params::Forward& p;
  const ForwardBlock& block;
  unsigned char* memory;
  uint32_t shared;
  int64_t first_key_tile;

  __device__ __forceinline__ SageBwdForwardSm90(const params::Forward& p, const ForwardBlock& b, unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)),
        first_key_tile(int64_t(b.key_head) * p.shape.key_tiles + b.segment.key_tile) {}

  __device__ __forceinline__ uint32_t keys(int stage) const { return shared + 2 * Q_BYTES + stage * 4 * TILE_BYTES; }
  __device__ __forceinline__ uint32_t values(int stage) const { return keys(stage) + 2 * TILE_BYTES; }
  __device__ __forceinline__ StepScales& scales(int stage) const {
    return reinterpret_cast<StepScales*>(memory + SCALES_AT)[stage];
  }

  // The index of a consumer's query tile in the padded buffers. A consumer beyond the segment's end reads the last
  // tile, and does not store its output.
  __device__ __forceinline__ int64_t query_tile(int warpgroup) const {
    int tile = min(block.first / TILE + warpgroup, block.segment.query_tiles() - 1);
    return int64_t(block.head) * p.shape.query_tiles + block.segment.query_tile + tile;
  }
  __device__ __forceinline__ uint32_t queries(int slot, int warpgroup) const {
    return shared + slot * Q_BYTES + warpgroup * TILE_BYTES;
  }

  __device__ __forceinline__ void load_queries(int slot, int, uint32_t mbarrier) {
    if (!ptx::elect()) return;
    ptx::mbarrier_arrive_expect_tx(mbarrier, Q_BYTES);
#pragma unroll 1
    for (int warpgroup = 0; warpgroup < Warpgroups::CONSUMERS; ++warpgroup)
      ptx::cp_async_bulk(queries(slot, warpgroup), p.codes.q + query_tile(warpgroup) * TILE_BYTES, TILE_BYTES, mbarrier);
  }

  // Issues the copies of a step, by one lane of the producer. A second tile beyond the segment's end is not copied: the
  // stage keeps its old contents, and the mask hides its keys.
  __device__ __forceinline__ void load(int step, int stage, int, uint32_t mbarrier) {
    if (!ptx::elect()) return;
    int both = min(block.segment.key_tiles() - 2 * step, 2), bytes = both * TILE_BYTES;
    int64_t at = first_key_tile + 2 * step;
    ptx::mbarrier_arrive_expect_tx(mbarrier, 2 * bytes);
    ptx::cp_async_bulk(keys(stage), p.codes.k + at * TILE_BYTES, bytes, mbarrier);
    ptx::cp_async_bulk(values(stage), p.codes.v_transposed + at * TILE_BYTES, bytes, mbarrier);
    const float *k = p.codes.k_dequant_scale + at, *v = p.codes.v_dequant_scale + at;
    scales(stage) = StepScales(__ldg(k), __ldg(k + both - 1), __ldg(v), __ldg(v + both - 1));
    ptx::mbarrier_arrive(mbarrier);
  }

  struct Consumer {
    const SageBwdForwardSm90& of;
    uint32_t queries;
    float q_factor;  // q dequant_scale * softmax_scale * log2 e
    Softmax<D, 1, WARPGROUP_THREADS, false> softmax;
    int x[16][4];          // S of both tiles
    uint32_t codes[4][4];  // P in u8, the A operand of P V: 32 keys per fragment
    float dequant[2];      // the scale of P V for each row
    int y[D / 8][4];       // P V of the current step

    __device__ __forceinline__ Consumer(const SageBwdForwardSm90& numerics, int slot, int warpgroup)
        : of(numerics), queries(of.queries(slot, warpgroup)),
          q_factor(of.p.codes.q_dequant_scale[of.query_tile(warpgroup)] * (of.p.shape.softmax_scale * ptx::LOG2_E)), softmax(nullptr) {}

    __device__ __forceinline__ uint32_t staging() const { return queries + threadIdx.x / 32 % 4 * STAGING; }

    __device__ __forceinline__ void start(int stage) {
      multiply_codes<D / 32>(x, ptx::row_descriptor<D>(queries), ptx::row_descriptor<D>(of.keys(stage)));
    }

    // The first tile whose exponentials come after the branch in `follow`. With 1 the forward takes 0.97x of the time
    // that it takes with 0 at head_dim 128, and would take 1.05x at head_dim 64.
    static constexpr int BRANCH_BEFORE = D == 64 ? 0 : 1;

    template <Hidden HIDDEN, int PENDING>
    __device__ __forceinline__ void online_softmax(int step, int stage, const Segment& segment, int first) {
      int lane = threadIdx.x % 32;
      // At head_dim 64 the scales are copied to registers; at 128 they are read from shared memory where they are used.
      // Swapping the two would make the forward 5 % slower at both head_dims, because ptxas would order its
      // instructions differently.
      const std::conditional_t<D == 64, StepScales, StepScales&> scales = of.scales(stage);
      const float factor[2] = {logit_factor(q_factor, scales.k[0]), logit_factor(q_factor, scales.k[1])};
      ptx::wgmma_wait<PENDING>(x);
      Logits s[2];
      take_logits<HIDDEN>(s, step, segment, first, lane);
      float row_max[2], offset[2];
      find_maxima<HIDDEN>(s, factor, scales, row_max, offset);
      if constexpr (BRANCH_BEFORE == 0) follow(row_max, offset);
      // unseen[0][r]: whether row r's window starts after the first tile.
      // unseen[1][r]: whether row r sees no key of the second tile.
      const int second = (2 * step + 1) * TILE;
      bool unseen[2][2] = {};
      if constexpr (HIDDEN != NO_KEYS) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          int row = first + threadIdx.x / 32 % 4 * 16 + row_of(r, lane);
          Sight<HIDDEN> sight(segment, of.p);
          unseen[1][r] = sight.visible_keys(row) <= second;
          if constexpr (HIDDEN == OUTER_KEYS) {
            // 0 for a row beyond the segment's end. Its window may start beyond the last tile, and the code below would
            // then read the scale of a tile that does not exist.
            int first_key = row < segment.query_len ? sight.first_key(row) : 0;
            unseen[0][r] = first_key >= second, unseen[1][r] |= first_key >= second + TILE;
          }
        }
      }
      // Quantized P and the sum of P are both computed from P in f16. Rounding P to f16 changes it by at most a quarter
      // of the maximum quantization error. In the sum, these changes average out.
      float sum[2][2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        if (BRANCH_BEFORE == 1 && t == 1) follow(row_max, offset);
        // A second tile that no query of the warpgroup sees needs no exponentials.
        if (HIDDEN != NO_KEYS && t == 1 && Sight<HIDDEN>(segment, of.p).visible_keys(first + TILE - 1) <= second) {
#pragma unroll
          for (int i = 2; i < 4; ++i) codes[i][0] = codes[i][1] = codes[i][2] = codes[i][3] = 0;
          sum[1][0] = sum[1][1] = 0.0f;
          break;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // The scale of a tile that the row does not see may be NaN.
          float start = offset[r] + scales.log2_v[t], by = unseen[t][r] ? 1.0f : factor[t];
          __half2 pairs[8];
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            const float* logits = &s[t][0][n][2 * r];
            pairs[n] = __floats2half2_rn(ptx::exp2(fmaf(logits[0], by, start)), ptx::exp2(fmaf(logits[1], by, start)));
          }
#pragma unroll
          for (int n = 0; n < 8; n += 2)
            codes[2 * t + n / 4][r + n % 4] = quant::codes_of_positive(pairs[n], pairs[n + 1]);
#pragma unroll
          for (int half = 4; half > 0; half /= 2)
#pragma unroll
            for (int n = 0; n < half; ++n) pairs[n] = __hadd2(pairs[n], pairs[n + half]);
          sum[t][r] = __low2float(pairs[0]) + __high2float(pairs[0]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float p_dequant = ptx::exp2(-offset[r] - softmax.shift(r));
        if (HIDDEN != NO_KEYS && row_max[r] == -CUDART_INF_F) p_dequant = 0.0f;
        dequant[r] = p_dequant * (unseen[1][r] ? scales.first_v * scales.inverse_v[0] : scales.v);
        if constexpr (HIDDEN == OUTER_KEYS) {
          if (unseen[0][r]) dequant[r] = p_dequant * scales.inverse_v[1] * __ldg(of.p.codes.v_dequant_scale + of.first_key_tile + 2 * step + 1);
          if (p_dequant == 0.0f) dequant[r] = 0.0f;  // V's scales may be NaN if the row sees no key of this step
        }
#pragma unroll
        for (int t = 0; t < 2; ++t) softmax.state(softmax.state.SUM, r) += p_dequant * scales.inverse_v[t] * sum[t][r];
      }
      // The division of quantized P by a power of two (shift_codes) is at the end, where its branch separates no
      // instructions that should be interleaved. Dividing P before it is quantized would make the forward 2 % slower at
      // head_dim 64.
      if (__builtin_expect(scales.beyond != 0, false)) shift_codes<HIDDEN>(scales, unseen);
    }

    __device__ __forceinline__ void add_last(int stage) { add(stage); }
    __device__ __forceinline__ void add(int stage) {
      ptx::discard_operand(y);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::wgmma_u8(y, codes[i], ptx::row_descriptor<TILE>(of.values(stage) + i / 2 * TILE_BYTES) + 2 * (i % 2), i > 0);
      ptx::wgmma_commit();
    }
    template <int PENDING>
    __device__ __forceinline__ void added() {
      ptx::wgmma_wait<PENDING>(y);
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) softmax.acc[0][n][e] = fmaf(float(y[n][e]), dequant[e >> 1], softmax.acc[0][n][e]);
    }

   private:
    using Logits = float[1][8][4];  // S of a tile: the integer sums as floats

    // Converts S of both tiles to floats, and masks it.
    template <Hidden HIDDEN>
    __device__ __forceinline__ void take_logits(Logits (&s)[2], int step, const Segment& segment, int first, int lane) const {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[t][0][n][e] = float(x[t * 8 + n][e]);
        if constexpr (HIDDEN != NO_KEYS)
          mask(s[t], Sight<HIDDEN>(segment, of.p), first + threadIdx.x / 32 % 4 * 16, (2 * step + t) * TILE, lane, -CUDART_INF_F);
      }
    }

    // Computes each row's maximum of logit + StepScales::log2_v, and the offset with which 2^(logit + log2_v + offset)
    // is in the range of u8.
    template <Hidden HIDDEN>
    __device__ __forceinline__ void find_maxima(const Logits (&s)[2], const float (&factor)[2], const StepScales& scales,
                                                float (&row_max)[2], float (&offset)[2]) const {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float of_tile[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if constexpr (HIDDEN != NO_KEYS) {
            of_tile[t] = -CUDART_INF_F;
#pragma unroll
            for (int n = 0; n < 8; ++n) of_tile[t] = fmaxf(of_tile[t], fmaxf(s[t][0][n][2 * r], s[t][0][n][2 * r + 1]));
          } else {
            int largest = x[t * 8][2 * r];
#pragma unroll
            for (int n = 0; n < 8; ++n) largest = max(max(largest, x[t * 8 + n][2 * r]), x[t * 8 + n][2 * r + 1]);
            of_tile[t] = float(largest);
          }
          of_tile[t] = fmaf(of_tile[t], factor[t], scales.log2_v[t]);
        }
        row_max[r] = quad_max(fmaxf(of_tile[0], of_tile[1]));
        // 2^(row_max + offset) is 254 or a little less: the offset is lowered by 2^-21 of row_max, which is more than
        // all rounding errors, so that no quantized value exceeds 254.
        offset[r] = fmaf(fabsf(row_max[r]), -0x1p-21f, quant::LOG2_254 - row_max[r]);
        if (HIDDEN != NO_KEYS && row_max[r] == -CUDART_INF_F) offset[r] = 0.0f;
      }
    }

    // Updates softmax's running maxima, which the exponentials above do not use (they use `offset`). Then adds 0 to the
    // offsets: this false dependency on the branch in softmax.follow makes ptxas schedule ex2 and packing in one basic
    // block, where several execution units work at once. Otherwise ptxas hoists ex2 above the branch, and ex2 does not
    // overlap with packing.
    __device__ __forceinline__ void follow(const float (&row_max)[2], float (&offset)[2]) {
      softmax.follow(row_max);
#pragma unroll
      for (int r = 0; r < 2; ++r) offset[r] = fmaf(softmax.shift(r), 0.0f, offset[r]);
    }

    // Divides quantized P of tile t by 2^(byte t of `beyond`), except in rows that see only one of a step's tiles.
    template <Hidden HIDDEN>
    __device__ __forceinline__ void shift_codes(const StepScales& scales, const bool (&unseen)[2][2]) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if ((i >= 2 || !unseen[1][j % 2]) && (HIDDEN != OUTER_KEYS || i < 2 || !unseen[0][j % 2]))
            codes[i][j] = quant::codes_over(codes[i][j], scales.beyond >> 8 * (i / 2) & 255);
    }
  };
};

}  // namespace sage::attention
