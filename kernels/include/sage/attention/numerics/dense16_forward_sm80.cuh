// The forward with 16-bit operands and f32 accumulators (FlashAttention-2, arXiv 2307.08691): for unquantized
// attention, and for Attn-QAT, whose operands are NVFP4 values stored in 16 bit. Also the forward of SageBwd in which S
// is an INT8 matmul and P V is a 16-bit matmul.
#pragma once

#include <sage/attention/mainloop/forward_sm80.cuh>
#include <sage/attention/numerics/probabilities.cuh>
#include <sage/attention/numerics/query_key_product_sm80.cuh>
#include <sage/attention/numerics/score_mod.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/params/plans.cuh>
#include <sage/ptx/mma.cuh>
#include <sage/quant/codes.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, params::Plan PLAN, class P = PlainProbabilities, Operands SOURCE = Operands::ROWS, class Mod = NoScoreMod>
struct Dense16ForwardSm80 {
  using Type = T;
  static constexpr int D = HEAD_DIM, OUTPUTS = P::OUTPUTS;
  static constexpr bool CODES = SOURCE == Operands::CODES;
  static constexpr int THREADS = PLAN.threads, M = FORWARD_QUERIES * 2 / THREADS;
  static constexpr int BLOCKS = OUTPUTS == 1 && D <= 128 ? 2 : 1;  // thread blocks per multiprocessor: as many as its registers allow
  static constexpr int STAGES = PLAN.stages;
  static constexpr bool COOPERATES = false, SMOOTHS_VALUES = OUTPUTS == 2;  // OUTPUTS is 2 only in Attn-QAT
  using Logits = float[M][8][4];
  static constexpr int ROW = D * 2, KEY_ROW = CODES ? D : ROW;  // bytes of a row: ROW for V, KEY_ROW for Q and K
  static constexpr int Q_BYTES = FORWARD_QUERIES * KEY_ROW;
  static constexpr int K_BYTES = TILE * KEY_ROW, STAGE_BYTES = K_BYTES + TILE * ROW;
  static constexpr int STATE_AT = Q_BYTES + STAGES * STAGE_BYTES;
  // The row state is kept in shared memory if the plan has room for it, because registers are short.
  using RowSoftmax = Softmax<D, M, THREADS, (PLAN.shared_bytes > STATE_AT), OUTPUTS, P::SLACK>;
  static constexpr int SHARED_BYTES = STATE_AT + RowSoftmax::State::BYTES;
  static_assert(PLAN.mainloop == params::FORWARD_SM80 || PLAN.mainloop == params::NONE);
  static_assert(PLAN.rows == FORWARD_QUERIES && PLAN.row_bytes == ROW && PLAN.shared_bytes == SHARED_BYTES);

  const params::Forward& p;
  uint32_t shared;
  int warp, first;
  float scale;  // softmax_scale * log2(e); if S is an INT8 matmul, also times Q's dequant_scale
  attention::Rows<T> q, k, v;
  // Set only if S is an INT8 matmul. Tile indices in the buffers of INT8 K and Q: the segment's first key tile, and the
  // thread block's first query tile.
  int64_t first_key_tile, query_tile;
  int query_tiles_left;
  [[no_unique_address]] Mod score_mod;

  __device__ __forceinline__ Dense16ForwardSm80(const params::Forward& p, const ForwardBlock& b, void* memory)
      : p(p), shared(ptx::shared_address(memory)), warp(threadIdx.x / 32), first(b.first),
        scale(p.shape.softmax_scale * ptx::LOG2_E),
        q(p.q, b.segment.batch, b.segment.query_start, b.head, b.segment.query_len, p.shape.head_dim),
        k(p.k, b.segment.batch, b.segment.key_start, b.key_head, b.segment.key_len, p.shape.head_dim),
        v(p.v, b.segment.batch, b.segment.key_start, b.key_head, b.segment.key_len, p.shape.value_dim),
        score_mod(p, b.head) {
    if constexpr (CODES) {
      first_key_tile = int64_t(b.key_head) * p.shape.key_tiles + b.segment.key_tile;
      query_tile = int64_t(b.head) * p.shape.query_tiles + b.segment.query_tile + b.first / TILE;
      query_tiles_left = b.segment.query_tiles() - b.first / TILE;
      scale *= p.codes.q_dequant_scale[query_tile + min(warp * 16 * M / TILE, query_tiles_left - 1)];
    }
  }

  __device__ __forceinline__ uint32_t k_tile(int tile) const { return shared + Q_BYTES + (STAGES == 2 ? tile & 1 : 0) * STAGE_BYTES; }

  __device__ __forceinline__ void load_queries() {
    if constexpr (CODES) {
      // If only one query tile is left, it is copied twice; the second copy's outputs are not stored.
      const int8_t* codes = p.codes.q + query_tile * K_BYTES;
      copy_tile<K_BYTES, THREADS>(shared, codes, threadIdx.x);
      copy_tile<K_BYTES, THREADS>(shared + K_BYTES, codes + (query_tiles_left > 1 ? K_BYTES : 0), threadIdx.x);
    } else {
      copy_rows<FORWARD_QUERIES, D, THREADS>(shared, q, first, threadIdx.x);
    }
  }

  // The thread index is opaque, so that addresses are recomputed for each tile: stored addresses would use registers
  // that the MMAs need.
  __device__ __forceinline__ void load_keys(int tile) {
    if constexpr (CODES)
      copy_tile<K_BYTES, THREADS>(k_tile(tile), p.codes.k + (first_key_tile + tile) * K_BYTES, ptx::opaque(threadIdx.x));
    else
      copy_rows<TILE, D, THREADS>(k_tile(tile), k, tile * TILE, ptx::opaque(threadIdx.x));
  }

  __device__ __forceinline__ void load_values(int tile) {
    copy_rows<TILE, D, THREADS>(k_tile(tile) + K_BYTES, v, tile * TILE, ptx::opaque(threadIdx.x));
  }

  __device__ __forceinline__ void multiply(int tile, Logits& s) {
    int lane = ptx::opaque(threadIdx.x) % 32;
    if constexpr (CODES) return multiply_codes(tile, s, lane);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0.0f;
    layout::ReaderA<ROW> q_reader(shared + warp * 16 * M * ROW, lane);
    layout::ReaderB<ROW> k_reader(k_tile(tile), lane);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      uint32_t a[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m) q_reader.load(a[m], m * 16, step);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        k_reader.load(b, n * 8, step);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          ptx::mma_16<T>(s[m][n], a[m], b[0], b[1]);
          ptx::mma_16<T>(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_codes(int tile, Logits& s, int lane) {
    int x[M][8][4];
    multiply_query_codes<D>(x, shared + warp * 16 * M * D, k_tile(tile), lane);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = __int_as_float(x[m][n][e]) - quant::MAGIC;
  }
  // The factor that turns a tile's S into logits. A factor of 0 would turn masked logits (minus infinity) into NaN.
  __device__ __forceinline__ float factor_of(int tile) const {
    if constexpr (!CODES) return scale;
    float factor = scale * __ldg(p.codes.k_dequant_scale + first_key_tile + tile);
    return factor == 0.0f ? 1e-30f : factor;
  }

  template <Hidden HIDDEN>
  __device__ __forceinline__ void attend(int tile, int, Logits& s, RowSoftmax& softmax, const Segment& segment,
                                         int warp_first) {
    int lane = ptx::opaque(threadIdx.x) % 32;
    float scale = factor_of(tile), offset[2 * M] = {};
    score_mod.apply(s, scale, offset, segment, first + warp * 16 * M, tile * TILE, 0, lane);
    if constexpr (HIDDEN != NO_KEYS) mask(s, Sight<HIDDEN>(segment, p), warp_first, tile * TILE, lane, -CUDART_INF_F);

    float row_max[2 * M], group_max[2 * M];
    P::maxima(row_max, group_max, s, [&](float x) { return score_mod.add_of_lane(x, scale); });
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) row_max[r] = P::reference(p, Mod::MODIFIES ? fmaf(row_max[r], scale, offset[r]) : row_max[r] * scale);
    softmax.follow(row_max);
    typename P::template RowScales<T> scales[2 * M];
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
      float shift = softmax.shift(r), of_lane = shift, sum = 0.0f;
      if constexpr (Mod::MODIFIES) shift -= offset[r], of_lane = shift - score_mod.of_lane;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float* x = &s[r >> 1][n][2 * (r & 1)];
        x[0] = ptx::exp2(fmaf(x[0], scale, -of_lane));
        x[1] = ptx::exp2(fmaf(x[1], scale, -of_lane));
        sum += x[0] + x[1];
      }
      softmax.state(RowSoftmax::State::SUM, r) += sum;
      scales[r] = typename P::template RowScales<T>(ptx::exp2(fmaf(group_max[r], scale, -shift)));
    }
    uint32_t operands[OUTPUTS][M][4][4];  // P as operand A: (output, group of 16 queries, group of 16 keys, register)
    P::template pack<T, M>(operands, s, scales);
    layout::TransposedReaderB<ROW> v_reader(k_tile(tile) + K_BYTES, lane);
#pragma unroll
    for (int step = 0; step < 4; ++step)
#pragma unroll
      for (int n = 0; n < D / 8; n += 2) {
        uint32_t b[4];
        v_reader.load(b, step * 16, n / 2);
#pragma unroll
        for (int m = 0; m < M * OUTPUTS; ++m) {
          ptx::mma_16<T>(softmax.acc[m][n], operands[m / M][m % M][step], b[0], b[1]);
          ptx::mma_16<T>(softmax.acc[m][n + 1], operands[m / M][m % M][step], b[2], b[3]);
        }
      }
  }

  __device__ __forceinline__ void flush_magic(RowSoftmax&) {}
};

}  // namespace sage::attention
