// Policies for the operand P of 16-bit matmuls: P itself, or P and its NVFP4 values. The numerics of 16-bit operands
// are the same for both policies (dense16_{forward,backward}*.cuh).
//
// A policy has, for the forward:
// - OUTPUTS: the number of attention outputs: one from each version of P. SLACK: see Softmax.
// - maxima(row maxima, group maxima, logits, of_lane): computes the largest of_lane(logit) of each row, and for
//   NVFP4 also of the lane's group of the row. of_lane adds a number to all logits of a lane (score_mod.cuh).
// - reference(params, largest logit): the reference that the exponents of a row are relative to.
// - RowScales: the NVFP4 scales of a row's groups, one group per lane. A lane computes its group's scale from the
//   group's largest probability.
// - pack(operands, probabilities, scales): creates the 16-bit A operands of each output.
// For the backward:
// - QUERY_VALUES: the number of values of row state per query. WARP_BYTES: shared memory per warp.
// - make_scales(P^T, the tile's row state except log-sum-exp and delta, the warp's memory, lane): computes the scales.
// - pack_transposed(operand, P^T, the warp's memory, lane): called after make_scales, creates the A operand of dV.
#pragma once

#include <math_constants.h>
#include <sage/attention/softmax.cuh>
#include <sage/params/attention.cuh>
#include <sage/quant/nvfp4.cuh>

namespace sage::attention {

// The operands of S in the forwards whose P V has 16-bit operands: Q and K in 16 bit, or as INT8 values.
enum class Operands { ROWS, CODES };

// Transposed scores of a warp in the backward: x[n][2h + e] of lane 4g + t is row 8h + g of the 16 keys, column 8n + 2t
// + e of the 64 queries.
using Scores = float[8][4];

// Packs scores in 16 bit, as A fragments of 16 keys x 16 queries.
template <class T>
__device__ __forceinline__ void pack_scores(uint32_t (&x)[4][4], const Scores& s) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[step][i] = ptx::pack_16<T>(s[2 * step + i / 2][2 * (i & 1)], s[2 * step + i / 2][2 * (i & 1) + 1]);
}

// The operand is P itself.
struct PlainProbabilities {
  static constexpr int OUTPUTS = 1, SLACK = 8;
  static constexpr int QUERY_VALUES = 2, WARP_BYTES = 0;

  static __device__ __forceinline__ float reference(const params::Forward&, float max) { return max; }

  template <int M, class OfLane>
  static __device__ __forceinline__ void maxima(float (&row)[2 * M], float (&)[2 * M], const float (&x)[M][8][4], OfLane of_lane) {
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
      row[r] = -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < 8; ++n)
        row[r] = fmaxf(row[r], fmaxf(x[r >> 1][n][2 * (r & 1)], x[r >> 1][n][2 * (r & 1) + 1]));
      row[r] = quad_max(of_lane(row[r]));
    }
  }

  // The maxima of one strip of 16 queries over 8 * N keys.
  template <int N, class OfLane>
  static __device__ __forceinline__ void maxima(float (&row)[2], float (&)[2], const float (&x)[N][4], OfLane of_lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r] = -CUDART_INF_F;
#pragma unroll
      for (int n = 0; n < N; ++n) row[r] = fmaxf(row[r], fmaxf(x[n][2 * r], x[n][2 * r + 1]));
      row[r] = quad_max(of_lane(row[r]));
    }
  }

  template <class T>
  struct RowScales {
    RowScales() = default;
    __device__ __forceinline__ explicit RowScales(float) {}
  };

  template <class T, int M>
  static __device__ __forceinline__ void pack(uint32_t (&p)[1][M][4][4], const float (&x)[M][8][4],
                                              const RowScales<T> (&)[2 * M]) {
#pragma unroll
    for (int m = 0; m < M; ++m) pack_scores<T>(p[0][m], x[m]);
  }

  static __device__ __forceinline__ void make_scales(const Scores&, const float*, void*, int) {}

  template <class T>
  static __device__ __forceinline__ void pack_transposed(uint32_t (&p)[4][4], const Scores& x, const void*, int) {
    pack_scores<T>(p, x);
  }
};

// Attn-QAT (arXiv 2603.00040) quantizes P to NVFP4; a group is 16 keys. O and dV are computed from the NVFP4 values,
// and a second output from unquantized P. In the forward the NVFP4 values are exact in 16 bit, so that 16-bit matmuls
// equal FP4 matmuls, up to the order of sums. For dV the values are divided by the row's sum, and rounded to 16 bit.
struct Nvfp4Probabilities {
  static constexpr int OUTPUTS = 2, SLACK = 0;
  static constexpr int QUERY_VALUES = 3;         // log-sum-exp, delta, and the entry of params::Backward::row_sums
  static constexpr int WARP_BYTES = 32 * 4 * 4;

  // A row's probabilities are 2^(logit - reference). Unless `p_literal` is set, the reference is an integer: raising it
  // divides the row's NVFP4 scales by a power of two. This changes FP4 values only if a scale becomes subnormal in
  // E4M3.
  static __device__ __forceinline__ float reference(const params::Forward& p, float max) {
    return p.p_literal ? max : ceilf(max) - p.p_lift;
  }

  // Computes the largest logit of each row, and of the group whose scale this lane computes: group t for lane t of the
  // row's four lanes. A group's largest logit has the group's largest probability.
  template <int M, class OfLane>
  static __device__ __forceinline__ void maxima(float (&row)[2 * M], float (&group)[2 * M], const float (&x)[M][8][4], OfLane of_lane) {
    bool upper_half = threadIdx.x & 2, odd = threadIdx.x & 1;
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
      float max[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float *a = &x[r >> 1][2 * n][2 * (r & 1)], *b = &x[r >> 1][2 * n + 1][2 * (r & 1)];
        max[n] = of_lane(fmaxf(fmaxf(a[0], a[1]), fmaxf(b[0], b[1])));
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
        max[n] = fmaxf(upper_half ? max[n + 2] : max[n], __shfl_xor_sync(~0u, upper_half ? max[n] : max[n + 2], 2));
      group[r] = fmaxf(odd ? max[1] : max[0], __shfl_xor_sync(~0u, odd ? max[0] : max[1], 1));
      row[r] = quad_max(group[r]);
    }
  }

  // The scales of a row's four groups. Each of the row's four lanes computes and keeps the scales of one group.
  template <class T>
  struct RowScales {
    float quant;
    uint32_t dequant;  // in 16 bit, in both halves

    // `largest`: the largest probability of this lane's group.
    __device__ __forceinline__ explicit RowScales(float largest) {
      quant::Nvfp4Scale scale = quant::nvfp4_scale_of(largest);
      quant = scale.quant, dequant = ptx::twice<T>(scale.dequant);
    }
    RowScales() = default;
    // The row's four lanes get `quant` and `dequant` of lane `group`.
    __device__ __forceinline__ RowScales of(int group) const {
      RowScales scales;
      scales.quant = __shfl_sync(~0u, quant, group, 4), scales.dequant = __shfl_sync(~0u, dequant, group, 4);
      return scales;
    }
    __device__ __forceinline__ uint32_t quantized(float low, float high) const {
      return ptx::mul_2<T>(quant::e2m1_pair<T>(low * quant, high * quant), dequant);
    }
  };

  template <class T, int M>
  static __device__ __forceinline__ void pack(uint32_t (&p)[2][M][4][4], const float (&x)[M][8][4],
                                              const RowScales<T> (&rows)[2 * M]) {
#pragma unroll
    for (int m = 0; m < M; ++m) pack_scores<T>(p[1][m], x[m]);
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        RowScales<T> scales = rows[r].of(group);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* a = &x[r >> 1][2 * group + half][2 * (r & 1)];
          p[0][r >> 1][group][2 * half + (r & 1)] = scales.quantized(a[0], a[1]);
        }
      }
    }
  }

  // A warp's 16 keys are one NVFP4 group of each query. A lane has two of the keys for 16 queries; lane 4g + t computes
  // the scales of queries 8g + 2t and 8g + 2t + 1, and stores in shared memory the factors that quantize x and the
  // factors that dequantize it. The scales are for x times the query's entry in `sums`: so the quantizing factors
  // include this entry, and the dequantizing factors its inverse.
  static __device__ __forceinline__ void make_scales(const Scores& x, const float* sums, void* shared, int lane) {
    float max[8][2];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) max[n][e] = fmaxf(x[n][e], x[n][2 + e]);
    // In each step a lane sends the maxima of half of its queries to another lane, and keeps the other half.
#pragma unroll
    for (int count = 4; count > 0; count /= 2) {
      bool upper = lane & (4 * count);
#pragma unroll
      for (int n = 0; n < count; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float other = __shfl_xor_sync(~0u, upper ? max[n][e] : max[n + count][e], 4 * count);
          max[n][e] = fmaxf(upper ? max[n + count][e] : max[n][e], other);
        }
    }
    float2 sum = reinterpret_cast<const float2*>(sums)[lane];
    quant::Nvfp4Scale a = quant::nvfp4_scale_of(max[0][0] * sum.x), b = quant::nvfp4_scale_of(max[0][1] * sum.y);
    __syncwarp();  // all lanes have read what the previous call stored in `shared`
    static_cast<float4*>(shared)[lane] = make_float4(a.quant * sum.x, b.quant * sum.y, a.dequant * ptx::reciprocal(sum.x),
                                                     b.dequant * ptx::reciprocal(sum.y));
  }

  template <class T>
  static __device__ __forceinline__ void pack_transposed(uint32_t (&p)[4][4], const Scores& x, const void* shared, int lane) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      float4 f = static_cast<const float4*>(shared)[4 * n + lane % 4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float low = x[n][2 * h] * f.x, high = x[n][2 * h + 1] * f.y;
        uint32_t& pair = p[n / 2][2 * (n & 1) + h];
        // A small dequantizing factor would lose bits in f16, so for f16 the multiplication is done in f32.
        if constexpr (std::is_same_v<T, __half>)
          pair = ptx::pack_16<T>(quant::e2m1_of_positive(low) * f.z, quant::e2m1_of_positive(high) * f.w);
        else
          pair = ptx::mul_2<T>(quant::e2m1_pair<T>(low, high), ptx::pack_16<T>(f.z, f.w));
      }
    }
  }
};

}  // namespace sage::attention
