// Shared by the warp-specialized mainloops for Hopper: copies of 16-bit operands into panels, and the products (wgmma) of a
// warpgroup.
#pragma once

#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/ptx/wgmma.cuh>

namespace sage::attention {

constexpr int WARPGROUP_THREADS = 128;

// Copies ROWS rows of D 16-bit channels, from row `first` on, into shared memory as wgmma reads them: in panels of 64 channels,
// because a swizzled row has 128 bytes. Like copy_rows it is asynchronous where 16-byte copies work, and writes zeros beyond
// the ends of the tensor.
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
      for (int panel = 0; panel < D / 64; ++panel)  // a copy that is not valid reads nothing: its address may be anything
        ptx::cp_async_16(to + panel * ROWS * 128 + i * 128, from + panel * 64, i < left && column + panel * 64 < rows.head_dim);
  } else {
#pragma unroll 1
    for (int panel = 0; panel < D / 64; ++panel) {
      copy_rows<ROWS, 64, THREADS>(to + panel * ROWS * 128, rows, first, thread);
      rows.skip_channels(64);
    }
  }
}

// Copies a tile of 64 rows into panels of PANEL_ROWS rows. One warp does it, chunk by chunk, because the producer has few
// registers.
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

// Copies D channels of a tile of 64 rows, from channel `channel` on, through a tensor map into panels of PANEL_ROWS rows: one thread
// issues a copy for each panel. The caller announces the 64 x D x 2 bytes to the mbarrier by expect_tx.
template <int D, int PANEL_ROWS = TILE>
__device__ __forceinline__ void copy_tile_panels(uint32_t to, const params::TensorMap& map, int batch, int head, int first,
                                                 uint32_t mbarrier, int channel = 0) {
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel)
    ptx::cp_async_bulk_tensor(to + panel * PANEL_ROWS * 128, &map, channel + panel * 64, first, head, batch, mbarrier);
}

// Issues out = A B^T, or out += A B^T with ADD, for 16-bit operands in shared memory: 64 rows of A, in panels of A_ROWS rows,
// and 8 N rows of B, in panels of 8 N rows. The caller waits for the product (wgmma_wait).
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

// Issues the same product with A in registers: fragments of rows of 64 channels, which read_rows loads.
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

// Loads the A fragments of a warp's 16 rows, from row `first` on: rows of ROW_BYTES in shared memory, 32 bytes of the reduction
// a step.
template <int ROW_BYTES, int STEPS>
__device__ __forceinline__ void read_rows(uint32_t (&a)[STEPS][4], uint32_t rows, int first) {
  static_assert(STEPS * 32 == ROW_BYTES);
  layout::ReaderA<ROW_BYTES> reader(rows + first * ROW_BYTES, threadIdx.x % 32);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) reader.load(a[step], 0, step);
}

// Issues out += X B: 64 rows of X, in registers or, given a descriptor, in shared memory, and the first 16 STEPS rows of B, in
// panels of PANEL_ROWS rows. The caller waits for the product (wgmma_wait).
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

// The descriptor of a tile of codes: rows of D bytes, or panels with rows of 128 bytes.
template <int D>
__device__ __forceinline__ uint64_t code_descriptor(uint32_t shared) { return ptx::row_descriptor<(D < 128 ? D : 128)>(shared); }

// Issues y = A B^T of INT8 codes over a reduction of 32 TIMES, with A in registers or, given a descriptor, in shared memory. Four times
// are a panel of 128 channels; panels have 64 rows. The caller waits for the product (wgmma_wait).
template <int TIMES, int N, class A>
__device__ __forceinline__ void multiply_codes(int (&y)[N][4], const A& a, uint64_t b) {
  constexpr int PANEL = TILE * 128 / 16;  // in units of descriptors
  static_assert(TIMES <= 4 || N == 8);
  ptx::discard_operand(y);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < TIMES; ++step) {
    int at = step / 4 * PANEL + step % 4 * 2;
    if constexpr (std::is_same_v<A, uint64_t>) ptx::wgmma_s8(y, a + at, b + at, step > 0);
    else ptx::wgmma_s8(y, a[step], b + at, step > 0);
  }
  ptx::wgmma_commit();
}

}  // namespace sage::attention
