// FP8 quantization of whole rows, for kernels that must reduce over a row before they can compute the values to
// quantize, such as RMSNorm. A thread block processes strips of rows, and writes each strip's FP8 values both row-major
// and transposed.
#pragma once

#include <sage/quant/fp8_tile.cuh>

namespace sage::quant {

constexpr int FP8_STRIP_WIDTH = 1024;  // columns per warp

// A thread block has FP8_THREADS threads. A team of WARPS warps processes LINES rows of up to COLUMNS columns, one row
// after the other. A thread has KEEP groups of V neighbouring values of a row.
template <int WARPS>
struct Fp8Strip {
  static constexpr int V = FP8_NEIGHBOURS, LINES = FP8_LINES, KEEP = FP8_STRIP_WIDTH / (32 * V), COLUMNS = WARPS * FP8_STRIP_WIDTH;
  static constexpr int THREADS = FP8_THREADS, LANES = 32 * WARPS, TEAMS = THREADS / LANES, ROWS = TEAMS * LINES;
  static constexpr int PITCH = COLUMNS / 4 + 1;  // in units of 4 bytes; odd, so that a column's elements are in different banks

  // The strip's FP8 values, row-major. After the last strip: `sums`, each team's part of RMSNorm's weight gradient.
  union {
    uint32_t codes[ROWS][PITCH];
    float sums[TEAMS][COLUMNS];
  };
  float parts[2][THREADS / 32];

  static __device__ __forceinline__ int team() { return threadIdx.x / LANES; }
  static __device__ __forceinline__ int lane() { return threadIdx.x % LANES; }
  // The first column of a lane's group k.
  static __device__ __forceinline__ int column(int k) { return (k * LANES + lane()) * V; }

  // Writes `word`, the FP8 values of the lane's group k in the matrix's row `row`, to p.row_codes and `codes`. The row
  // is number `line` of the team's rows in the strip.
  __device__ __forceinline__ void set(const params::Fp8Codes& p, int k, int line, int row, uint2 word) {
    if (p.row_codes) *reinterpret_cast<uint2*>(p.row_codes + int64_t(row) * p.columns + column(k)) = word;
    uint32_t* to = &codes[team() * LINES + line][column(k) / 4];
    to[0] = word.x, to[1] = word.y;
  }

  // Writes the transposed FP8 values of the strip, which starts at the matrix's row `first_row`. All threads of a
  // thread block call it.
  __device__ __forceinline__ void store(const params::Fp8Codes& p, int first_row) const {
    if (!p.column_codes) return;
    __syncthreads();
    // TEAMS neighbouring threads write adjacent words of the same four columns.
    int group = threadIdx.x % TEAMS, row = first_row + group * LINES;
    for (int c = threadIdx.x / TEAMS * 4; c < p.columns && row < p.rows; c += THREADS / TEAMS * 4) {
      uint32_t lines[LINES], columns[4];
#pragma unroll
      for (int i = 0; i < LINES; ++i) lines[i] = codes[group * LINES + i][c / 4];
      transpose(lines, columns);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        *reinterpret_cast<uint32_t*>(p.column_codes + int64_t(c + i) * p.rows + row) = columns[i];
    }
    __syncthreads();
  }
};

// The team of warps that processes a row of a strip, with the interface of elements::Group. All threads of the thread
// block must call each function together.
template <int WARPS>
struct Fp8Team {
  Fp8Strip<WARPS>& strip;
  int turn = 0;

  __device__ __forceinline__ float sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if constexpr (WARPS > 1) {
      float* parts = strip.parts[turn];  // a buffer that no thread still reads
      turn ^= 1;
      int warp = threadIdx.x / 32, first = warp / WARPS * WARPS;
      if (threadIdx.x % 32 == 0) parts[warp] = x;
      __syncthreads();
      x = parts[first];
#pragma unroll
      for (int other = 1; other < WARPS; ++other) x += parts[first + other];
    }
    return x;
  }
  __device__ __forceinline__ bool any(bool x) const { return WARPS > 1 ? __syncthreads_or(x) : x; }
};

}  // namespace sage::quant
