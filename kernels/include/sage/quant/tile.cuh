// Quantizes a tile of 64 tokens x D channels in the registers of 256 threads.
#pragma once

#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/layout/permutation.cuh>
#include <sage/quant/codes.cuh>

namespace sage::quant {

using attention::TILE;

constexpr int TILE_THREADS = 256;

// The largest x of all threads of the thread block.
__device__ __forceinline__ uint32_t block_max(uint32_t x) {
  __shared__ uint32_t of_warp[TILE_THREADS / 32];
  x = __reduce_max_sync(~0u, x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warp[0];
#pragma unroll
  for (int i = 1; i < TILE_THREADS / 32; ++i) x = max(x, of_warp[i]);
  return x;
}

// A tile in registers: each thread has eight neighbouring channels of every STEP-th row.
template <int D>
struct Tile {
  static constexpr int CHUNKS = D / 8;
  static constexpr int STEP = TILE_THREADS / CHUNKS;
  static constexpr int ROWS = TILE / STEP;

  float x[ROWS][8];

  __device__ __forceinline__ static int row(int i) { return threadIdx.x / CHUNKS + i * STEP; }
  __device__ __forceinline__ static int column() { return threadIdx.x % CHUNKS * 8; }

  template <class T>
  __device__ __forceinline__ void load(const attention::Rows<T>& rows, int first) {
    uint4 words[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) words[i] = rows.load_8(first + row(i), column());
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int c = 0; c < 8; ++c) x[i][c] = ptx::to_float(reinterpret_cast<const T*>(&words[i])[c]);
  }

  // Subtracts `mean`, one value per channel, from the rows that exist; the padding stays zero.
  __device__ __forceinline__ void subtract(const float* mean, int rows_left) {
    mean += column();
    rows_left -= row(0);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float of_channel = mean[c];
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        if (i * STEP < rows_left) x[i][c] = __fsub_rn(x[i][c], of_channel);
    }
  }

  __device__ __forceinline__ uint32_t max_abs_bits() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int c = 0; c < 8; ++c) largest = max(largest, abs_bits(x[i][c]));
    return largest;
  }

  __device__ __forceinline__ uint2 codes(int i, float quant_scale) const {
    int q[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) q[c] = code(x[i][c], quant_scale);
    return make_uint2(pack_bytes(q[0], q[1], q[2], q[3]), pack_bytes(q[4], q[5], q[6], q[7]));
  }
};

// Quantizes a tile with one scale, which is written to `dequant_scale`. `at(row, channel)`: where eight INT8 values of
// a row are written, from `channel` on.
template <int D, class At>
__device__ __forceinline__ void quantize_tile(const Tile<D>& values, float* dequant_scale, At at) {
  Scale scale = scale_of(block_max(values.max_abs_bits()));
  if (threadIdx.x == 0) *dequant_scale = scale.dequant;
#pragma unroll
  for (int i = 0; i < values.ROWS; ++i)
    *reinterpret_cast<uint2*>(at(values.row(i), values.column())) = values.codes(i, scale.quant);
}

// The address of an INT8 value in its tile in global memory. A tile is [64][D], swizzled as in shared memory, so that
// one bulk copy copies it. Above 128 channels a tile has consecutive panels of 128 channels, because a swizzled row of
// a wgmma operand has 128 bytes.
template <int D>
__device__ __forceinline__ int8_t* at_swizzled(int8_t* tile, int row, int channel) {
  constexpr int ROW = D < 128 ? D : 128;
  return tile + channel / ROW * (TILE * ROW) + layout::swizzled<ROW>(row, channel % ROW / 16) + channel % 16;
}

// Writes an INT8 tile from shared memory, row-major with rows of PITCH bytes, to global memory as [D][64]: transposed,
// tokens permuted (layout/permutation.cuh), swizzled.
template <int D, int PITCH>
__device__ __forceinline__ void store_transposed(const int8_t* tile, int8_t* out) {
  for (int i = threadIdx.x; i < D * (TILE / 16); i += blockDim.x) {
    // Neighbouring threads read neighbouring channels, without bank conflicts.
    int channel = i % D, group = i / D;
    *reinterpret_cast<uint4*>(out + layout::swizzled<TILE>(channel, group)) =
        layout::gather_tokens([&](int token) { return uint8_t(tile[(group * 16 + token) * PITCH + channel]); });
  }
}

}  // namespace sage::quant
