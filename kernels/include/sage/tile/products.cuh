// The matmuls (wgmma) of a warpgroup on Hopper. 16-bit operands are stored in shared memory in panels of 64 channels,
// because a swizzled row has 128 bytes; INT8 operands are stored in panels of at most 128 channels.
#pragma once

#include <sage/layout/fragments.cuh>
#include <sage/ptx/wgmma.cuh>

namespace sage::tile {

constexpr int WARPGROUP_THREADS = 128;

// Issues out = A B^T, or out += A B^T with ADD, for 16-bit operands in shared memory: 64 rows of A, from panels that
// hold A_ROWS rows, and all 8 * N rows of B's panels. The caller waits for completion (wgmma_wait).
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

// Like the function above, but B has 64 rows, and A is in registers: read_rows loaded its fragments. Rows of A and B
// have 64 channels.
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

// Loads the A fragments of a warp's 16 rows, from row `first` on. A row in shared memory has ROW_BYTES bytes; a[step]
// holds 32 bytes of each row.
template <int ROW_BYTES, int STEPS>
__device__ __forceinline__ void read_rows(uint32_t (&a)[STEPS][4], uint32_t rows, int first) {
  static_assert(STEPS * 32 == ROW_BYTES);
  layout::ReaderA<ROW_BYTES> reader(rows + first * ROW_BYTES, threadIdx.x % 32);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) reader.load(a[step], 0, step);
}

// Issues out += X B. X has 64 rows, in registers, or in shared memory if a descriptor is passed. B is the first
// 16 * STEPS rows of a matrix in panels of PANEL_ROWS rows. The caller waits for completion (wgmma_wait).
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

// The descriptor of the first panel of an INT8 operand with D channels. A panel has rows of min(D, 128) bytes.
template <int D>
__device__ __forceinline__ uint64_t code_descriptor(uint32_t shared) { return ptx::row_descriptor<(D < 128 ? D : 128)>(shared); }

// Issues y = A B^T of INT8 operands over a reduction of 32 * TIMES values, with A in registers or, given a descriptor,
// in shared memory. A panel of 128 channels covers four steps of 32 values; panels have 64 rows. The caller waits for
// completion (wgmma_wait).
template <int TIMES, int N, class A>
__device__ __forceinline__ void multiply_codes(int (&y)[N][4], const A& a, uint64_t b) {
  constexpr int PANEL = 64 * 128 / 16;  // in units of 16 bytes, as in descriptors
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

}  // namespace sage::tile
