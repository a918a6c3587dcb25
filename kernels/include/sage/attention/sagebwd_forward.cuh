// SageBwd forward on INT8 codes (arXiv 2603.02170, algorithm 1): S = Q K^T and O = P V as s8 x s8 -> s32.
#pragma once

#include <sage/attention/forward.cuh>
#include <sage/attention/query_mean.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/quant/codes.cuh>

namespace sage::attention {

// QK: whether Q is smoothed as well, which adds a row to the logits of each tile.
template <class T, int HEAD_DIM, bool QK>
struct SageBwdForward {
  using Type = T;
  static constexpr int D = HEAD_DIM;
  static constexpr bool COOPERATES = QK;
  static constexpr int Q_BYTES = FORWARD_QUERIES * D;
  static constexpr int TILE_BYTES = TILE * D;
  static constexpr int ROWS_BYTES = QK ? 2 * TILE * 4 : 0;
  static constexpr int SHARED_BYTES = Q_BYTES + 4 * TILE_BYTES + ROWS_BYTES;

  uint32_t shared;
  float* mean_logits;  // (query tile, key), with Q smoothing
  int warp;
  int first_key_tile;   // in the padded buffers, of this head
  int64_t query_tile;   // of the block's first query
  int query_tiles_left;
  float q_factor;       // q dequant_scale * softmax_scale * log2 e
  const params::Forward& p;
  const ForwardBlock& block;

  __device__ __forceinline__ SageBwdForward(const params::Forward& p, const ForwardBlock& b, unsigned char* memory)
      : shared(ptx::shared_address(memory)),
        mean_logits(reinterpret_cast<float*>(memory + Q_BYTES + 4 * TILE_BYTES)),
        warp(threadIdx.x / 32), first_key_tile(b.key_head(p.shape) * p.shape.key_tiles + b.segment.key_tile),
        query_tile(int64_t(b.head) * p.shape.query_tiles + b.segment.query_tile + b.first / TILE),
        query_tiles_left(b.segment.query_tiles() - b.first / TILE), p(p), block(b) {
    int tile = min(warp / 2, query_tiles_left - 1);
    q_factor = p.codes.q_scale[query_tile + tile] * (p.shape.softmax_scale * 1.44269504f);
  }

  __device__ __forceinline__ uint32_t k_tile(int tile) const { return shared + Q_BYTES + (tile & 1) * 2 * TILE_BYTES; }

  __device__ __forceinline__ void load_queries() {
    // The second tile may not exist; its rows are then read from the first, and never stored.
    const int8_t* codes = p.codes.q + query_tile * TILE_BYTES;
    copy_tile<TILE, D, FORWARD_THREADS>(shared, codes, threadIdx.x);
    copy_tile<TILE, D, FORWARD_THREADS>(shared + TILE_BYTES, codes + (query_tiles_left > 1 ? TILE_BYTES : 0),
                                        threadIdx.x);
  }

  __device__ __forceinline__ void load(int tile) {
    // Addresses are worked out anew for each tile: kept, they would cost registers that the products need.
    int thread = ptx::opaque(threadIdx.x);
    int64_t at = int64_t(first_key_tile + tile) * TILE_BYTES;
    copy_tile<TILE, D, FORWARD_THREADS>(k_tile(tile), p.codes.k + at, thread);
    copy_tile<D, TILE, FORWARD_THREADS>(k_tile(tile) + TILE_BYTES, p.codes.v_transposed + at, thread);
  }

  __device__ __forceinline__ void attend(int tile, Softmax<D>& softmax, const Segment& segment, int warp_first,
                                         bool hides) {
    int lane = ptx::opaque(threadIdx.x) % 32;
    float k_dequant = __ldg(p.codes.k_scale + first_key_tile + tile);
    float v_dequant = __ldg(p.codes.v_scale + first_key_tile + tile);
    if constexpr (QK) {
      query_mean_logits<T, D>(p.k, p.codes, p.shape, block.segment, block.segment_index, block.key_head(p.shape), query_tile,
                              min(query_tiles_left, 2), tile * TILE, TILE, mean_logits);
      __syncthreads();
    }

    // Logits as the floats MAGIC + integer.
    int x[2][8][4];
    layout::ReaderA<D> q_reader(shared + warp * 32 * D, lane);
    layout::ReaderB<D> k_reader(k_tile(tile), lane);
#pragma unroll
    for (int step = 0; step < D / 32; ++step) {
      uint32_t a[2][4];
      q_reader.load(a[0], 0, step);
      q_reader.load(a[1], 16, step);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        k_reader.load(b, n * 8, step);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          quant::multiply(x[m][n], a[m], b[0], b[1], step == 0);
          quant::multiply(x[m][n + 1], a[m], b[2], b[3], step == 0);
        }
      }
    }

    // A tile of zeros has scale 0; any factor then gives logits of 0, and minus infinity stays what it is.
    float factor = quant::short_factor(q_factor * k_dequant);
    if (factor == 0.0f) factor = 1e-30f;
    if constexpr (QK) {
      // Back to integers in f32: the mean's logits are added to them, in their unit, and the maximum is of the sum.
      float unit = 1.0f / factor;
      const float* row = mean_logits + (warp / 2) * TILE;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float add = row[n * 8 + 2 * (lane & 3) + e] * unit;
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              int& at = x[m][n][2 * h + e];
              at = __float_as_int((__int_as_float(at) - quant::MAGIC) + add);
            }
        }
    }
    if (hides) mask(x, segment, warp_first, tile * TILE, lane, __float_as_int(-CUDART_INF_F));

    float exact_offset = QK ? 0.0f : -quant::MAGIC * factor;
    float row_max[4], offset[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if constexpr (QK) {
        float largest = -CUDART_INF_F;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) largest = fmaxf(largest, __int_as_float(x[r >> 1][n][2 * (r & 1) + e]));
        row_max[r] = quad_max(largest) * factor;
      } else {
        // All are positive floats, or minus infinity: their order is that of the integers.
        int largest = x[r >> 1][0][2 * (r & 1)];
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) largest = max(largest, x[r >> 1][n][2 * (r & 1) + e]);
        row_max[r] = fmaf(__int_as_float(quad_max(largest)), factor, exact_offset);
      }
      // 2^(x factor + offset) is 127 at the row's largest logit. What the rounding of the offset changes is the same
      // for the whole row, and goes into its dequant_scale below.
      offset[r] = row_max[r] == -CUDART_INF_F ? 0.0f : exact_offset - (row_max[r] - LOG2_127);
    }
    softmax.follow(row_max);

    // Codes of P, one scale a row: an operand of 16 x 32 for each (32 keys, m).
    uint32_t codes[2][2][4];
    float dequant[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          e[i] = ptx::exp2(fmaf(__int_as_float(x[r >> 1][n + (i >> 1)][2 * (r & 1) + (i & 1)]), factor, offset[r]));
          sum += e[i];
          e[i] += quant::MAGIC;
        }
        codes[n >> 2][r >> 1][(r & 1) + 2 * ((n >> 1) & 1)] = quant::pack_bytes(
            __float_as_uint(e[0]), __float_as_uint(e[1]), __float_as_uint(e[2]), __float_as_uint(e[3]));
      }
      float p_dequant = row_max[r] == -CUDART_INF_F ? 0.0f
                                                    : ptx::exp2(exact_offset - offset[r] - softmax.shift(r));
      // The sum is of the unquantized probabilities.
      softmax.sum[r] = fmaf(p_dequant, sum, softmax.sum[r]);
      dequant[r] = p_dequant * v_dequant;
    }

    layout::ReaderB<TILE> v_reader(k_tile(tile) + TILE_BYTES, lane);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      int y[2][2][4];
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint32_t b[4];
        v_reader.load(b, n * 8, step);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          quant::multiply(y[m][0], codes[step][m], b[0], b[1], step == 0);
          quant::multiply(y[m][1], codes[step][m], b[2], b[3], step == 0);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& acc = softmax.acc[m][n + i][e];
            acc = fmaf(__int_as_float(y[m][i][e]) - quant::MAGIC, dequant[2 * m + (e >> 1)], acc);
          }
    }
  }

 private:
  static constexpr float LOG2_127 = 6.98868468677217f;
};

}  // namespace sage::attention
