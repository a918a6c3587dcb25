// The epilogue of a backward: writes the gradients of keys and values.
#pragma once

#include <sage/attention/query_tiles.cuh>
#include <sage/attention/rows.cuh>

namespace sage::attention {

enum KeyGradient { DK, DV };

// Used if several thread blocks divide the query blocks that select a key block (see Cut). Atomically adds a warp's dK
// or dV of 16 keys to the key block's sums, in no fixed order. The sums consist of `pieces` pieces of 16 keys x
// 8 * PIECE channels, in fragment layout. The warp adds to the first 8 * N channels of piece number `piece`. Returns
// true in the last warp that adds to this piece; `x` then has the full sums.
template <int PIECE, int N>
__device__ __forceinline__ bool add_part(const params::ListSplits& cuts, params::CutList list, int pieces, int piece, float (&x)[N][4]) {
  int64_t number = int64_t(list.slot) * pieces + piece;
  int lane = threadIdx.x % 32;
  float* sums = cuts.sums + (number * (PIECE * 32) + lane) * 4;
#pragma unroll
  for (int n = 0; n < N; ++n) ptx::red_add_4(sums + n * 128, x[n][0], x[n][1], x[n][2], x[n][3]);
  // On behalf of all lanes, lane 0 releases their additions, and acquires the additions of the list's other parts.
  __syncwarp();
  int arrived = 0;
  if (lane == 0) {
    __threadfence();
    arrived = atomicAdd(cuts.arrivals + number, 1);
    __threadfence();
  }
  if (__shfl_sync(~0u, arrived, 0) + 1 != int(list.parts)) return false;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float4 sum = __ldcg(reinterpret_cast<const float4*>(sums + n * 128));
    x[n][0] = sum.x, x[n][1] = sum.y, x[n][2] = sum.z, x[n][3] = sum.w;
  }
  return true;
}

// Writes the gradient of a warp's 16 keys, from `first_key` on. If several thread blocks divide the query blocks that
// select these keys, only the warp that arrives last (see add_part) writes. The thread block computes one of
// CHANNEL_PARTS parts of the channels: `x` has the channels from `first_channel` on. STAGING is the size of the warp's
// `staging` memory: see store_rows.
template <KeyGradient GRADIENT, class Queries, class T, int STAGING = 0, int CHANNEL_PARTS = 1, int N>
__device__ __forceinline__ void store_gradient(const params::Backward& p, const BackwardBlock& block, int first_key, float (&x)[N][4],
                                               uint32_t staging = 0, int first_channel = 0) {
  if constexpr (Queries::LISTED) {
    params::CutList list = Cut(p, block).list;
    constexpr int STRIPS = SELECTION_BLOCK / 16;
    int piece = first_key % SELECTION_BLOCK / 16 + GRADIENT * STRIPS;
    if constexpr (CHANNEL_PARTS > 1) piece += block.channel_part * 2 * STRIPS;
    if (list.parts > 1 && !add_part<CHANNEL_PARTS == 1 ? N : 16>(p.cuts, list, CHANNEL_PARTS * 2 * STRIPS, piece, x)) return;
  }
  const params::View& view = GRADIENT == DK ? p.dk : p.dv;
  float scale = GRADIENT == DK ? p.shape.softmax_scale : 1.0f;
  const Segment& segment = block.segment;
  Rows<T> rows(view, segment.batch, segment.key_start, block.key_head, segment.key_len,
               GRADIENT == DK ? p.shape.head_dim : p.shape.value_dim);
  if constexpr (CHANNEL_PARTS > 1) rows.skip_channels(first_channel);
  int lane = threadIdx.x % 32;
  if constexpr (STAGING > 0) {
    store_rows<STAGING>(rows, first_key, x, {scale, scale}, staging, lane);
    return;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = first_key + lane / 4 + 8 * h, column = 2 * (lane & 3);
    if (rows.vector) {
      // Keeps one address per row, because the accumulators leave few registers.
      uint32_t* at = reinterpret_cast<uint32_t*>(rows.at(row, column));
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (row < rows.count && n * 8 < rows.head_dim) at[n * 4] = ptx::pack_16<T>(x[n][2 * h] * scale, x[n][2 * h + 1] * scale);
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n) rows.store_2(row, n * 8 + column, x[n][2 * h] * scale, x[n][2 * h + 1] * scale);
    }
  }
}

}  // namespace sage::attention
