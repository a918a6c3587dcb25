// What the walks with a part for each warpgroup have in common: operands in panels, and products of a warpgroup.
#pragma once

#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/ptx/wgmma.cuh>

namespace sage::attention {

constexpr int WARPGROUP_THREADS = 128;

// ROWS rows of D channels in 16 bit, from row `first` on, as products read them: panels of 64 channels, what one swizzled
// line holds. As copy_rows is: asynchronous where 16-byte copies work, zeros beyond the ends.
template <int ROWS, int D, int THREADS, class T>
__device__ __forceinline__ void copy_panels(uint32_t to, Rows<T> rows, int first, int thread) {
  constexpr int STEP = THREADS / 8;
  static_assert(STEP % 8 == 0, "the swizzle of a thread's rows must be the same");
  int row = thread / 8, column = thread % 8 * 8;
  if (rows.vector) {
    to += layout::swizzled<128>(row, column / 8);
    const T* from = rows.at(first + row, column);
    int left = rows.count - first - row;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += STEP * rows.token)
#pragma unroll
      for (int panel = 0; panel < D / 64; ++panel)  // where nothing is read it does not matter where from
        ptx::cp_async_16(to + panel * ROWS * 128 + i * 128, from + panel * 64, i < left && column + panel * 64 < rows.head_dim);
  } else {
#pragma unroll 1
    for (int panel = 0; panel < D / 64; ++panel) {
      copy_rows<ROWS, 64, THREADS>(to + panel * ROWS * 128, rows, first, thread);
      rows.skip_channels(64);
    }
  }
}

// The same of a tile of 64 rows, in panels of PANEL_ROWS, by one warp that has few registers.
template <int D, int PANEL_ROWS = TILE, class T>
__device__ __forceinline__ void copy_panels_by_warp(uint32_t to, Rows<T> rows, int first, int lane) {
#pragma unroll 1
  for (int i = lane; i < TILE * D / 8; i += 32) {
    int row = i / 8 % TILE, panel = i / (8 * TILE), column = panel * 64 + i % 8 * 8;
    uint32_t at = to + panel * PANEL_ROWS * 128 + layout::swizzled<128>(row, i % 8);
    bool exists = first + row < rows.count && column < rows.head_dim;
    if (rows.vector) ptx::cp_async_16(at, exists ? rows.at(first + row, column) : rows.data, exists);
    else ptx::store_16(at, rows.load_8(first + row, column));
  }
}

// The same of a tile of 64 rows by one thread, out of a tensor that has a map: its bytes are to be announced.
template <int D, int PANEL_ROWS = TILE>
__device__ __forceinline__ void copy_tile_panels(uint32_t to, const params::TensorMap& map, int batch, int head, int first,
                                                 uint32_t mbarrier) {
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel)
    ptx::cp_async_bulk_tensor(to + panel * PANEL_ROWS * 128, &map, panel * 64, first, head, batch, mbarrier);
}

// out = A B^T, or out += A B^T with ADD: 64 rows of A, whose panels have A_ROWS, and 8 N rows of B, whose panels have as many,
// in 16 bit. Its end is to be waited for.
template <class T, int D, int A_ROWS, bool ADD, int N>
__device__ __forceinline__ void multiply_rows(float (&out)[N][4], uint32_t a, uint32_t b) {
  if constexpr (ADD) ptx::fence_operand(out);
  else ptx::discard_operand(out);
  ptx::wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel) {
    uint64_t a_rows = ptx::row_descriptor<128>(a + panel * A_ROWS * 128);
    uint64_t b_rows = ptx::row_descriptor<128>(b + panel * N * 8 * 128);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (ADD || panel > 0 || step > 0) ptx::wgmma_16<T>(out, a_rows + 2 * step, b_rows + 2 * step);
      else ptx::wgmma_16<T, false>(out, a_rows, b_rows);
    }
  }
  ptx::wgmma_commit();
}

// The same with A in registers, rows of 64 channels, what read_rows gives.
template <class T, bool ADD>
__device__ __forceinline__ void multiply_rows(float (&out)[8][4], const uint32_t (&a)[4][4], uint32_t b) {
  if constexpr (ADD) ptx::fence_operand(out);
  else ptx::discard_operand(out);
  ptx::wgmma_fence();
  uint64_t rows = ptx::row_descriptor<128>(b);
  ptx::wgmma_16<T, ADD, false>(out, a[0], rows);
#pragma unroll
  for (int step = 1; step < 4; ++step) ptx::wgmma_16<T, true, false>(out, a[step], rows + 2 * step);
  ptx::wgmma_commit();
}

// A warp's 16 rows, number `first` and on, as left operands: rows of ROW_BYTES in shared memory, 32 bytes of reduction a step.
template <int ROW_BYTES, int STEPS>
__device__ __forceinline__ void read_rows(uint32_t (&a)[STEPS][4], uint32_t rows, int first) {
  static_assert(STEPS * 32 == ROW_BYTES);
  layout::ReaderA<ROW_BYTES> reader(rows + first * ROW_BYTES, threadIdx.x % 32);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) reader.load(a[step], 0, step);
}

// out += X B: 64 rows of X, in registers or in shared memory, and the first 16 STEPS rows of B, in panels of PANEL_ROWS. Its end
// is to be waited for.
template <class T, int D, int STEPS = 4, int PANEL_ROWS = 16 * STEPS, class X>
__device__ __forceinline__ void add_product(float (&out)[D / 8][4], const X& x, uint32_t b) {
  ptx::fence_operand(out);
  ptx::wgmma_fence();
  uint64_t rows = ptx::column_descriptor_of_panels<PANEL_ROWS * 128>(b);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if constexpr (std::is_same_v<X, uint64_t>) ptx::wgmma_16<T, true, false, true>(out, x + 2 * step, rows + step * ptx::COLUMN_STEP);
    else ptx::wgmma_16<T>(out, x[step], rows + step * ptx::COLUMN_STEP);
  }
  ptx::wgmma_commit();
}

// y = A B^T of codes over 32 TIMES of the reduction, A in shared memory or in registers. Its end is to be waited for.
template <int TIMES, int N, class A>
__device__ __forceinline__ void multiply_codes(int (&y)[N][4], const A& a, uint64_t b) {
  ptx::discard_operand(y);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < TIMES; ++step) {
    if constexpr (std::is_same_v<A, uint64_t>) ptx::wgmma_s8(y, a + 2 * step, b + 2 * step, step > 0);
    else ptx::wgmma_s8(y, a[step], b + 2 * step, step > 0);
  }
  ptx::wgmma_commit();
}

}  // namespace sage::attention
