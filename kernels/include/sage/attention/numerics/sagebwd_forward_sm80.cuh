// The forward of SageBwd with INT8 matmuls (arXiv 2603.02170, algorithm 1): S = Q K^T and O = P V are s8 x s8 -> s32.
#pragma once

#include <sage/attention/mainloop/forward_sm80.cuh>
#include <sage/attention/numerics/query_key_product_sm80.cuh>
#include <sage/attention/numerics/query_mean.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/params/plans.cuh>
#include <sage/quant/codes.cuh>

namespace sage::attention {

// QK: whether Q is also smoothed, not only K. mean_logits is then added to each row of logits.
template <class T, int HEAD_DIM, params::Plan PLAN, bool QK = false>
struct SageBwdForwardSm80 {
  using Type = T;
  static constexpr int D = HEAD_DIM;
  static constexpr int THREADS = PLAN.threads, M = FORWARD_QUERIES * 2 / THREADS;
  using Logits = int[M][8][4];  // the bits of floats: quant::MAGIC + INT8 dot product of q and k
  static constexpr int BLOCKS = HEAD_DIM == 64 && !QK ? 3 : 2;  // thread blocks per multiprocessor, limited by registers
  static constexpr int STAGES = PLAN.stages;
  using RowSoftmax = Softmax<D, M, THREADS, HEAD_DIM == 64>;
  static constexpr bool COOPERATES = QK, SMOOTHS_VALUES = !QK;
  static constexpr int Q_BYTES = FORWARD_QUERIES * D;
  static constexpr int TILE_BYTES = TILE * D;
  static constexpr int ROWS_BYTES = QK ? 2 * TILE * 4 : 0;
  static constexpr int STATE_AT = Q_BYTES + 4 * TILE_BYTES;
  static constexpr int ROWS_AT = STATE_AT + RowSoftmax::State::BYTES;
  static constexpr int SHARED_BYTES = ROWS_AT + ROWS_BYTES;
  static_assert(PLAN.mainloop == params::FORWARD_SM80);
  static_assert(PLAN.rows == FORWARD_QUERIES && PLAN.row_bytes == D && PLAN.stages == 2 && PLAN.shared_bytes == SHARED_BYTES);

  uint32_t shared;
  float* mean_logits;  // logits of the means of Q, by (query tile, key); only used with Q smoothing
  int warp;
  int first_key_tile;   // index in Codes::k of the segment's first key tile of this head
  int64_t query_tile;   // index in Codes::q of the tile of the thread block's first query
  int query_tiles_left;
  float q_factor;       // q dequant_scale * softmax_scale * log2 e
  const params::Forward& p;
  const ForwardBlock& block;

  __device__ __forceinline__ SageBwdForwardSm80(const params::Forward& p, const ForwardBlock& b, unsigned char* memory)
      : shared(ptx::shared_address(memory)),
        mean_logits(reinterpret_cast<float*>(memory + ROWS_AT)),
        warp(threadIdx.x / 32), first_key_tile(b.key_head * p.shape.key_tiles + b.segment.key_tile),
        query_tile(int64_t(b.head) * p.shape.query_tiles + b.segment.query_tile + b.first / TILE),
        query_tiles_left(b.segment.query_tiles() - b.first / TILE), p(p), block(b) {
    int tile = min(warp * 16 * M / TILE, query_tiles_left - 1);
    q_factor = p.codes.q_dequant_scale[query_tile + tile] * (p.shape.softmax_scale * ptx::LOG2_E);
  }

  __device__ __forceinline__ uint32_t k_tile(int tile) const { return shared + Q_BYTES + (tile & 1) * 2 * TILE_BYTES; }

  __device__ __forceinline__ void load_queries() {
    // If the second tile does not exist, the first is copied in its place; the copy's outputs are not stored.
    const int8_t* codes = p.codes.q + query_tile * TILE_BYTES;
    copy_tile<TILE * D, THREADS>(shared, codes, threadIdx.x);
    copy_tile<TILE * D, THREADS>(shared + TILE_BYTES, codes + (query_tiles_left > 1 ? TILE_BYTES : 0),
                                        threadIdx.x);
  }

  // The thread index is opaque, so that addresses are recomputed for each tile: stored addresses would use registers
  // that the MMAs need.
  __device__ __forceinline__ void load_keys(int tile) {
    copy_tile<TILE * D, THREADS>(k_tile(tile), p.codes.k + int64_t(first_key_tile + tile) * TILE_BYTES,
                                ptx::opaque(threadIdx.x));
  }

  __device__ __forceinline__ void load_values(int tile) {
    copy_tile<TILE * D, THREADS>(k_tile(tile) + TILE_BYTES,
                                p.codes.v_transposed + int64_t(first_key_tile + tile) * TILE_BYTES,
                                ptx::opaque(threadIdx.x));
  }

  __device__ __forceinline__ void multiply(int tile, Logits& x) {
    int lane = ptx::opaque(threadIdx.x) % 32;
    multiply_query_codes<D>(x, shared + warp * 16 * M * D, k_tile(tile), lane);
  }

  template <Hidden HIDDEN>
  __device__ __forceinline__ void attend(int tile, int step, Logits& x, RowSoftmax& softmax, const Segment& segment,
                                         int warp_first) {
    int lane = ptx::opaque(threadIdx.x) % 32;
    float k_dequant = __ldg(p.codes.k_dequant_scale + first_key_tile + tile);
    if constexpr (QK) {
      query_mean_logits<T, D>(p.k, p.codes, p.shape, block.segment, block.segment_index, block.key_head, query_tile,
                              min(query_tiles_left, 2), tile * TILE, TILE, mean_logits);
      __syncthreads();
    }

    // A tile of zeros has k_dequant 0, and a factor of 0 would turn masked logits into NaN: see logit_factor.
    float factor = quant::short_factor(q_factor * k_dequant);
    if (factor == 0.0f) factor = 1e-30f;
    if constexpr (QK) add_mean_logits(x, factor, lane);
    if constexpr (HIDDEN != NO_KEYS) mask(x, Sight<HIDDEN>(segment, p), warp_first, tile * TILE, lane, __float_as_int(-CUDART_INF_F));

    const float exact_offset = QK ? 0.0f : -quant::MAGIC * factor;
    float row_max[2 * M], offset[2 * M];
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
      row_max[r] = row_maximum(x, r, factor, exact_offset);
      // Rounded down: with an offset rounded up, the row's largest 2^(x * factor + offset) could become 128, which does
      // not fit INT8. p_dequant below is computed from the rounded offset.
      offset[r] = __fadd_rd(exact_offset, quant::LOG2_127 - row_max[r]);
      if (HIDDEN != NO_KEYS && row_max[r] == -CUDART_INF_F) offset[r] = 0.0f;
    }
    softmax.follow(row_max);

    float v_dequant = __ldg(p.codes.v_dequant_scale + first_key_tile + tile);
    ProbabilityCodes codes;
    float dequant[2 * M];
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
      float sum = quantize_row(x, r, factor, offset[r], codes);
      float p_dequant = ptx::exp2(exact_offset - offset[r] - softmax.shift(r));
      if (HIDDEN != NO_KEYS && row_max[r] == -CUDART_INF_F) p_dequant = 0.0f;
      softmax.state(RowSoftmax::State::SUM, r) += p_dequant * sum;
      dequant[r] = p_dequant * v_dequant;
    }

    add_values(tile, codes, dequant, softmax, lane);
    // add_values also added MAGIC * dequant[r] to the accumulators of row r; flush_magic subtracts this.
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) softmax.state(RowSoftmax::State::MAGIC, r) += dequant[r];
    if (__builtin_expect(step % quant::MAGIC_TILES == quant::MAGIC_TILES - 1, false)) flush_magic(softmax);
  }

  // Subtracts from each row's accumulators the MAGIC terms that add_values added since the last flush_magic.
  __device__ __forceinline__ void flush_magic(RowSoftmax& softmax) {
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
      float& part = softmax.state(RowSoftmax::State::MAGIC, r);
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& acc = softmax.acc[r >> 1][n][2 * (r & 1) + e];
          acc = fmaf(-quant::MAGIC, part, acc);
        }
      part = 0.0f;
    }
  }

 private:
  // INT8 values of P with one scale per row: mma operand A, a fragment of 16 queries x 32 keys for each
  // [group of 32 keys][group of 16 queries].
  using ProbabilityCodes = uint32_t[2][M][4];

  // Subtracts MAGIC from x, and adds the logits of Q's mean, so that the row maximum includes them. They are divided by
  // `factor`, because x is later multiplied by `factor`.
  __device__ __forceinline__ void add_mean_logits(Logits& x, float factor, int lane) const {
    float unit = 1.0f / factor;
    const float* row = mean_logits + warp * 16 * M / TILE * TILE;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float add = row[n * 8 + 2 * (lane & 3) + e] * unit;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            int& at = x[m][n][2 * h + e];
            at = __float_as_int((__int_as_float(at) - quant::MAGIC) + add);
          }
      }
  }

  // The largest logit of a row, over the four lanes that share the row. A logit is x * factor + exact_offset.
  static __device__ __forceinline__ float row_maximum(const Logits& x, int r, float factor, float exact_offset) {
    if constexpr (QK) {
      float largest = -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) largest = fmaxf(largest, __int_as_float(x[r >> 1][n][2 * (r & 1) + e]));
      return quad_max(largest) * factor;
    } else {
      // x holds the bits of floats: positive numbers or -infinity. Compared as integers, they have the same order.
      int largest = x[r >> 1][0][2 * (r & 1)];
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) largest = max(largest, x[r >> 1][n][2 * (r & 1) + e]);
      return fmaf(__int_as_float(quad_max(largest)), factor, exact_offset);
    }
  }

  // Computes 2^(x * factor + offset) of a row, and quantizes it. Returns the sum of this lane's unquantized values of
  // the row.
  static __device__ __forceinline__ float quantize_row(const Logits& x, int r, float factor, float offset, ProbabilityCodes& codes) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        e[i] = ptx::exp2(fmaf(__int_as_float(x[r >> 1][n + (i >> 1)][2 * (r & 1) + (i & 1)]), factor, offset));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += e[i];
      codes[n >> 2][r >> 1][(r & 1) + 2 * ((n >> 1) & 1)] = quant::codes_of_positive(e[0], e[1], e[2], e[3]);
    }
    return sum;
  }

  __device__ __forceinline__ void add_values(int tile, const ProbabilityCodes& codes, const float (&dequant)[2 * M],
                                             RowSoftmax& softmax, int lane) const {
    layout::ReaderB<TILE> v_reader(k_tile(tile) + TILE_BYTES, lane);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      int y[M][2][4];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t b[4];
        v_reader.load(b, n * 8, step);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          quant::multiply(y[m][0], codes[step][m], b[0], b[1], step == 0);
          quant::multiply(y[m][1], codes[step][m], b[2], b[3], step == 0);
        }
      }
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& acc = softmax.acc[m][n + i][e];
            acc = fmaf(__int_as_float(y[m][i][e]), dequant[2 * m + (e >> 1)], acc);
          }
    }
  }
};

}  // namespace sage::attention
