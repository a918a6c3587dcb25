// FP8 quantization of a matrix by tiles. Two outputs, both optional: the FP8 values in row-major order, written from
// registers, and their transpose, written through shared memory.
#pragma once

#include <cuda_fp8.h>

#include <sage/params/ops.cuh>
#include <sage/ptx/math.cuh>

namespace sage::quant {

constexpr int FP8_THREADS = 256, FP8_ROWS = 128, FP8_COLUMNS = 64, FP8_NEIGHBOURS = 8, FP8_LINES = 4;

// A tile of ROWS x COLUMNS values for THREADS threads. A thread has LINES rows of V neighbouring values, so that its
// LINES FP8 values of a column are one word.
template <int WIDTH>
struct Fp8TileOf {
  static constexpr int THREADS = FP8_THREADS, COLUMNS = WIDTH, V = FP8_NEIGHBOURS, LINES = FP8_LINES, ROWS = THREADS / (COLUMNS / V) * LINES;
  static constexpr int LANES = ROWS / LINES;  // lanes that write a column, one word each
  static_assert(32 % LANES == 0);
  static constexpr int PITCH = LANES + 1;  // in units of 4 bytes; odd, for fewer bank conflicts

  uint32_t turned[COLUMNS][PITCH];

  // The first row and column of a thread in the tile.
  static __device__ __forceinline__ int row() { return threadIdx.x / (COLUMNS / V) * LINES; }
  static __device__ __forceinline__ int column() { return threadIdx.x % (COLUMNS / V) * V; }
};
using Fp8Tile = Fp8TileOf<FP8_COLUMNS>;
static_assert(Fp8Tile::ROWS == FP8_ROWS);

// The bits of |x|, which have the same order as the values, with NaN above infinity.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The smallest power of two by which the value with the bits `largest` can be divided without saturating:
// `Fp8Format::scale` in candle-sage/src/fp8.rs.
__device__ __forceinline__ float fp8_scale(uint32_t largest, int e5m2) {
  if (largest == 0 || largest >= 0x7f800000u) return 1.0f;
  int exponent = int(largest >> 23) - 127 - (e5m2 ? 15 : 8);
  exponent += (largest & 0x7fffffu) > 0x600000u;
  return __uint_as_float(uint32_t(min(max(exponent, -126), 126) + 127) << 23);
}

// The transpose of 4 x 4 bytes.
__device__ __forceinline__ void transpose(const uint32_t (&lines)[4], uint32_t (&columns)[4]) {
  uint32_t a = __byte_perm(lines[0], lines[1], 0x5140), b = __byte_perm(lines[2], lines[3], 0x5140);
  uint32_t c = __byte_perm(lines[0], lines[1], 0x7362), d = __byte_perm(lines[2], lines[3], 0x7362);
  columns[0] = __byte_perm(a, b, 0x5410), columns[1] = __byte_perm(a, b, 0x7632);
  columns[2] = __byte_perm(c, d, 0x5410), columns[3] = __byte_perm(c, d, 0x7632);
}

// A thread's FP8 values of one matrix.
struct Fp8Codes {
  uint2 words[FP8_LINES] = {};
  uint32_t largest = 0, saturated = 0;  // the largest |x|; the number of values that saturate
  float scale, inverse, top;            // inverse is 1 / scale, top the format's largest value
  int e5m2;

  __device__ __forceinline__ explicit Fp8Codes(const params::Fp8Codes& p) : Fp8Codes(p, *p.scale) {}
  __device__ __forceinline__ Fp8Codes(const params::Fp8Codes& p, float scale)
      : scale(scale), inverse(1.0f / scale), top(p.e5m2 ? 57344.0f : 448.0f), e5m2(p.e5m2) {}

  // Two FP8 codes, `low` in the low byte. Values outside the format's range saturate. NaN becomes 0x7f if the hardware
  // converts (sm_89 and later); the software conversion before sm_89 keeps a NaN's sign.
  __device__ __forceinline__ uint32_t pair(float low, float high) const {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3);
  }

  __device__ __forceinline__ uint2 quantize(const float (&x)[FP8_NEIGHBOURS]) {
    float y[FP8_NEIGHBOURS];
#pragma unroll
    for (int i = 0; i < FP8_NEIGHBOURS; ++i) {
      largest = max(largest, magnitude(x[i]));
      y[i] = x[i] * inverse;
      saturated += fabsf(y[i]) > top;
    }
    return make_uint2(pair(y[0], y[1]) | pair(y[2], y[3]) << 16, pair(y[4], y[5]) | pair(y[6], y[7]) << 16);
  }

  __device__ __forceinline__ void set(int line, const float (&x)[FP8_NEIGHBOURS]) { words[line] = quantize(x); }

  // Writes the tile's FP8 values whose column in the matrix is less than `end_column`. All threads of the thread block
  // call it, and synchronize before they use the tile's memory again.
  template <class Tile>
  __device__ __forceinline__ void store(const params::Fp8Codes& p, Tile& tile, int first_row, int first_column, int end_column) const {
    int row = first_row + Tile::row(), column = first_column + Tile::column();
    // p.rows and end_column are multiples of 16, so a thread stores either all of its values or none.
    if (p.row_codes && row < p.rows && column < end_column) {
#pragma unroll
      for (int i = 0; i < Tile::LINES; ++i)
        *reinterpret_cast<uint2*>(p.row_codes + int64_t(row + i) * p.columns + column) = words[i];
    }
    if (!p.column_codes) return;
#pragma unroll
    for (int j = 0; j < Tile::V / 4; ++j) {
      uint32_t lines[Tile::LINES], turned[4];
#pragma unroll
      for (int i = 0; i < Tile::LINES; ++i) lines[i] = j ? words[i].y : words[i].x;
      transpose(lines, turned);
#pragma unroll
      for (int i = 0; i < 4; ++i) tile.turned[Tile::column() + 4 * j + i][Tile::row() / Tile::LINES] = turned[i];
    }
    __syncthreads();
    int lane = threadIdx.x % Tile::LANES;
    row = first_row + lane * Tile::LINES;
    for (int c = threadIdx.x / Tile::LANES; c < Tile::COLUMNS; c += Tile::THREADS / Tile::LANES) {
      if (row < p.rows && first_column + c < end_column)
        *reinterpret_cast<uint32_t*>(p.column_codes + int64_t(first_column + c) * p.rows + row) = tile.turned[c][lane];
    }
  }

  // Updates the matrix's largest value and number of saturated values by those of the warp, and copies the scale to
  // `used`. All lanes of each warp call it.
  __device__ __forceinline__ void report(const params::Fp8Codes& p) const {
    uint32_t most = __reduce_max_sync(~0u, largest), count = __reduce_add_sync(~0u, saturated);
    if (threadIdx.x % 32 != 0) return;
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0 && p.used) *p.used = scale;
    if (most > *p.largest) atomicMax(p.largest, most);  // a stale *p.largest costs only a needless atomic
    if (count) atomicAdd(p.saturated, count);
  }
};

// The columns of a matrix, from `first` on, that a kernel writes.
struct Fp8Columns {
  int first, count;
};

// Quantizes a tile. `line(row, column, x)` computes V neighbouring values of a row; its `column` is relative to
// `columns.first`.
template <class Line>
__device__ __forceinline__ void quantize_tile(const params::Fp8Codes& p, float scale, Fp8Columns columns, Line line) {
  __shared__ Fp8Tile tile;
  int first_row = blockIdx.x * Fp8Tile::ROWS, first_column = blockIdx.y * Fp8Tile::COLUMNS;
  int row = first_row + Fp8Tile::row(), column = first_column + Fp8Tile::column();
  Fp8Codes codes(p, scale);
  if (row < p.rows && column < columns.count) {
#pragma unroll
    for (int i = 0; i < Fp8Tile::LINES; ++i) {
      float x[Fp8Tile::V];
      line(row + i, column, x);
      codes.set(i, x);
    }
  }
  codes.store(p, tile, first_row, columns.first + first_column, columns.first + columns.count);
  codes.report(p);
}
template <class Line>
__device__ __forceinline__ void quantize_tile(const params::Fp8Codes& p, Line line) {
  quantize_tile(p, *p.scale, {0, p.columns}, line);
}

}  // namespace sage::quant
