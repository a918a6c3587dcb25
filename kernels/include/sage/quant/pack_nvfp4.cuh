// Packs Q, K and V as NVFP4 for the forward with FP4 matmuls, in the layout of layout/nvfp4.cuh. Values and scales are
// the same as in `nvfp4::Packed` of candle-sage/src/nvfp4.rs.
#pragma once

#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/layout/nvfp4.cuh>
#include <sage/ptx/mma_nvfp4.cuh>
#include <sage/quant/codes.cuh>

namespace sage::quant {

constexpr int PACK_THREADS = 256;

struct Nvfp4Group {
  uint2 codes;
  uint8_t scale;
  __device__ __forceinline__ explicit Nvfp4Group(float (&x)[NVFP4_GROUP]) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < NVFP4_GROUP; ++i) largest = max(largest, abs_bits(x[i]));
    Nvfp4Scale of = nvfp4_scale_of(__uint_as_float(largest));
    float low[8], high[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) low[i] = x[i] * of.quant, high[i] = x[i + 8] * of.quant;
    codes = make_uint2(ptx::codes_of_e2m1(low), ptx::codes_of_e2m1(high));
    scale = uint8_t(ptx::code_of_e4m3(of.dequant));
  }
};

// Packs the 64 tokens from `first` on, in groups of 16 channels. If `mean` (one value per channel) is not null, it is
// subtracted. With KEYS the rows are permuted: layout::row_of_key.
template <class T, int D, bool KEYS>
__device__ __forceinline__ void pack_tokens(const attention::Rows<T>& from, int first, const float* mean, uint8_t* to) {
  using Tile = layout::Nvfp4Tile<D>;
  for (int i = threadIdx.x; i < 64 * Tile::GROUPS; i += PACK_THREADS) {
    int token = i / Tile::GROUPS, group = i % Tile::GROUPS, row = KEYS ? layout::row_of_key(token) : token;
    float x[NVFP4_GROUP];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 words = from.load_8(first + token, group * NVFP4_GROUP + half * 8);
#pragma unroll
      for (int c = 0; c < 8; ++c) x[half * 8 + c] = ptx::to_float(reinterpret_cast<const T*>(&words)[c]);
    }
    if (mean && first + token < from.count) {
#pragma unroll
      for (int c = 0; c < NVFP4_GROUP; ++c) x[c] = __fsub_rn(x[c], mean[group * NVFP4_GROUP + c]);
    }
    Nvfp4Group packed(x);
    *reinterpret_cast<uint2*>(to + layout::swizzled<Tile::ROW>(row, group / 2) + group % 2 * 8) = packed.codes;
    to[Tile::CODES_BYTES + Tile::template scales_at<64>(row, group / 4) + group % 4] = packed.scale;
  }
}

// Packs the 64 tokens from `first` on, in groups of 16 tokens. A row of the result is a channel.
template <class T, int D>
__device__ __forceinline__ void pack_channels(const attention::Rows<T>& from, int first, uint8_t* to) {
  using Tile = layout::Nvfp4Tile<D>;
  for (int i = threadIdx.x; i < D * Tile::V_GROUPS; i += PACK_THREADS) {
    int channel = i % D, group = i / D;
    float x[NVFP4_GROUP];
#pragma unroll
    for (int n = 0; n < NVFP4_GROUP; ++n) {
      int token = first + group * NVFP4_GROUP + n;
      bool real = token < from.count && channel < from.head_dim;
      x[n] = real ? ptx::to_float(*from.at(token, channel)) : 0.0f;
    }
    Nvfp4Group packed(x);
    *reinterpret_cast<uint2*>(to + layout::swizzled<Tile::V_ROW>(channel, group / 2) + group % 2 * 8) = packed.codes;
    to[Tile::CODES_BYTES + Tile::template scales_at<D>(channel, 0) + group] = packed.scale;
  }
}

// Each thread block packs a tile of 64 tokens of one head. The first thread blocks pack K, the next ones Q, the last
// ones V. Neighbouring thread blocks pack neighbouring heads.
template <class T, int D>
__device__ __forceinline__ void pack_nvfp4(const params::Forward& p) {
  const params::Shape& shape = p.shape;
  int queries = shape.query_tiles * shape.query_heads, keys = shape.key_tiles * shape.key_heads, index = blockIdx.x;
  bool query = index >= keys && index < keys + queries, value = index >= keys + queries;
  index -= value ? keys + queries : query ? keys : 0;
  int heads = query ? shape.query_heads : shape.key_heads, head = index % heads, tile = index / heads;
  int number = query ? attention::segment_of_tile<true>(shape, tile) : attention::segment_of_tile<false>(shape, tile);
  attention::Segment segment(shape, number);
  int start = query ? segment.query_start : segment.key_start, count = query ? segment.query_len : segment.key_len;
  int first = (tile - (query ? segment.query_tile : segment.key_tile)) * 64;
  attention::Rows<T> rows(query ? p.q : value ? p.v : p.k, segment.batch, start, head, count, shape.head_dim);
  int64_t at = int64_t(head) * (query ? shape.query_tiles : shape.key_tiles) + tile;
  int8_t* all = query ? p.codes.q : value ? p.codes.v_transposed : p.codes.k;
  using Tile = layout::Nvfp4Tile<D>;
  uint8_t* to = reinterpret_cast<uint8_t*>(all) + at * Tile::BYTES;
  // The forward copies whole rows of scales, so the unused bytes of these rows are set to zero.
  if (64 * Tile::GROUPS < Tile::SCALES_BYTES && threadIdx.x < 32)
    *reinterpret_cast<uint2*>(to + Tile::CODES_BYTES + threadIdx.x * 16 + 8) = make_uint2(0, 0);
  if (query) {
    pack_tokens<T, D, false>(rows, first, nullptr, to);
  } else if (value) {
    pack_channels<T, D>(rows, first, to);
  } else {
    const float* mean = p.codes.k_mean ? p.codes.k_mean + (int64_t(head) * shape.segment_count + number) * D : nullptr;
    pack_tokens<T, D, true>(rows, first, mean, to);
  }
}

}  // namespace sage::quant
