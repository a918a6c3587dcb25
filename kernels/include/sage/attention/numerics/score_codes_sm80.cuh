// For the backward of SageBwd: quantizes P and dS to INT8, copies INT8 K, and computes S^T = K Q^T of INT8 values.
#pragma once

#include <sage/attention/mainloop/backward_sm80.cuh>
#include <sage/attention/softmax.cuh>
#include <sage/layout/permutation.cuh>
#include <sage/quant/codes.cuh>

namespace sage::attention {

// INT8 values of a warp's scores: two A fragments, of 16 rows x 32 elements of the reduction each.
using ScoreCodes = uint32_t[2][4];

// The maximum over the four lanes of a row, for nonnegative x; NaN if any x is NaN.
__device__ __forceinline__ float quad_max_abs(float x) { return __int_as_float(quad_max(__float_as_int(x))); }

// Quantizes a warp's scores, whose rows are keys, with one scale per row or group of rows. `share` replaces the maxima
// of rows g and g + 8 by the maxima of their groups. POSITIVE: no score is negative.
template <bool POSITIVE, class Share>
__device__ __forceinline__ void quantize_scores(const Scores& s, ScoreCodes& codes, float (&dequant)[2], Share share) {
  float largest[2], scale[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (POSITIVE) {
      // Nonnegative floats have the same order as their bits as integers, with NaN above all.
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
  share(largest);
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

// Quantizes dS of the 16 queries of a strip over one tile of keys, with one scale for each query or group of queries.
// dS^T is in `rows` in bf16. `dequant` includes the dequant_scale of the keys.
template <class Share>
__device__ __forceinline__ void quantize_queries(ScoreCodes& codes, float2& dequant, float k_dequant, uint32_t rows,
                                                 int strip, int lane, Share share) {
  layout::TransposedReaderA<TILE * 2> reader(rows, lane);
  // [group of 16 keys][register]. A register contains dS of two keys and one query in bf16: query lane / 4 of the strip
  // in registers 0 and 2, query lane / 4 + 8 in registers 1 and 3.
  uint32_t r[4][4];
  uint32_t largest16[2] = {0, 0};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    reader.load(r[step], step * 16, strip);
#pragma unroll
    for (int i = 0; i < 4; ++i) largest16[i & 1] = __vmaxu2(largest16[i & 1], r[step][i] & 0x7fff7fffu);
  }
  float largest[2], scale[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    largest[h] = quad_max_abs(__uint_as_float(max(largest16[h] & 0xffff0000u, largest16[h] << 16)));
  share(largest);
#pragma unroll
  for (int h = 0; h < 2; ++h) scale[h] = quant::quick_quant_scale(largest[h]);
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Four consecutive slots (layout/permutation.cuh) store two of the first 8 keys and two of the last 8 keys of a
      // group of 16 keys.
      uint32_t low = r[2 * i + j / 2][j & 1], high = r[2 * i + j / 2][(j & 1) + 2];
      codes[i][j] = quant::codes(__uint_as_float(low << 16), __uint_as_float(low & 0xffff0000u),
                                 __uint_as_float(high << 16), __uint_as_float(high & 0xffff0000u), scale[j & 1]);
    }
  dequant = make_float2(largest[0] * (1.0f / 127.0f) * k_dequant, largest[1] * (1.0f / 127.0f) * k_dequant);
}

// Computes S^T = K Q^T of INT8 values, for a warp's 16 keys and 64 queries. Each element of `x` has the
// bits of a float: quant::MAGIC + INT8 dot product of q and k.
template <int D>
__device__ __forceinline__ void multiply_score_codes(int (&x)[8][4], uint32_t k_rows, uint32_t q_rows, int lane) {
  layout::ReaderA<D> k_reader(k_rows, lane);
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

// Transposes K's INT8 values in shared memory from [KEYS][D] to [D][KEYS]. Every 16 keys are permuted
// (layout/permutation.cuh). K and K^T are swizzled.
template <int KEYS, int D, int THREADS>
__device__ __forceinline__ void transpose_keys(unsigned char* k_transposed, const unsigned char* k) {
  for (int i = threadIdx.x; i < D * (KEYS / 16); i += THREADS) {
    int channel = i % D, group = i / D;
    *reinterpret_cast<uint4*>(k_transposed + layout::swizzled<KEYS>(channel, group)) = layout::gather_tokens(
        [&](int key) { return k[layout::swizzled<D>(group * 16 + key, channel / 16) + channel % 16]; });
  }
}

// The index of the thread block's first key tile in the arrays of params::Codes.
__device__ __forceinline__ int64_t first_key_tile(const params::Backward& p, const BackwardBlock& block) {
  return int64_t(block.key_head) * p.shape.key_tiles + block.segment.key_tile + block.first_key / TILE;
}
// Whether the thread block's key tile number `part` exists.
__device__ __forceinline__ bool key_tile_exists(const BackwardBlock& block, int part) {
  return block.first_key + part * TILE < block.segment.key_len;
}

// Issues the asynchronous copies of INT8 K: the thread block's PARTS key tiles, with rows of D bytes.
template <int PARTS, int D, int THREADS>
__device__ __forceinline__ void copy_key_tiles(uint32_t shared, const params::Backward& p, const BackwardBlock& block) {
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    bool exists = key_tile_exists(block, part);
    copy_tile<TILE * D, THREADS>(shared + part * TILE * D,
                                p.codes.k + (first_key_tile(p, block) + (exists ? part : 0)) * (TILE * D), threadIdx.x, exists);
  }
}

// The dequant_scale of the thread block's key tile number `part`; 0 if the tile does not exist.
__device__ __forceinline__ float k_dequant_of(const params::Backward& p, const BackwardBlock& block, int part) {
  return key_tile_exists(block, part) ? __ldg(p.codes.k_dequant_scale + first_key_tile(p, block) + part) : 0.0f;
}

}  // namespace sage::attention
