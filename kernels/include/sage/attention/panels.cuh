// What the walks with a part for each warpgroup have in common: operands in panels, and products of a warpgroup.
#pragma once

#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/ptx/wgmma.cuh>

namespace sage::attention {

constexpr int GROUP_THREADS = 128;

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
        ptx::copy_16(to + panel * ROWS * 128 + i * 128, from + panel * 64, i < left && column + panel * 64 < rows.head_dim);
  } else {
#pragma unroll 1
    for (int panel = 0; panel < D / 64; ++panel) {
      copy_rows<ROWS, 64, THREADS>(to + panel * ROWS * 128, rows, first, thread);
      rows.skip_channels(64);
    }
  }
}

// The same of a tile of 64 rows by one thread, out of a tensor that has a map: its bytes are to be announced.
template <int D>
__device__ __forceinline__ void copy_tile_panels(uint32_t to, const params::TensorMap& map, int batch, int head, int first,
                                                 uint32_t landing) {
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel)
    ptx::tensor_copy(to + panel * TILE * 128, &map, panel * 64, first, head, batch, landing);
}

// out = A B^T, or out += A B^T with ADD: 64 rows of A, whose panels have A_ROWS, and a tile of 64 rows, in 16 bit. Its end
// is to be waited for.
template <class T, int D, int A_ROWS, bool ADD>
__device__ __forceinline__ void multiply_rows(float (&out)[8][4], uint32_t a, uint32_t b) {
  if constexpr (ADD) ptx::hold(out);
  else ptx::forget(out);
  ptx::wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel) {
    uint64_t a_rows = ptx::row_descriptor<128>(a + panel * A_ROWS * 128);
    uint64_t b_rows = ptx::row_descriptor<128>(b + panel * TILE * 128);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (ADD || panel > 0 || step > 0) ptx::wgmma_16<T>(out, a_rows + 2 * step, b_rows + 2 * step);
      else ptx::wgmma_16<T, false>(out, a_rows, b_rows);
    }
  }
  ptx::wgmma_commit();
}

// out += X B: 64 rows of X, in registers or in shared memory, and B a tile of 64 rows in panels. Its end is to be waited
// for.
template <class T, int D, class X>
__device__ __forceinline__ void add_product(float (&out)[D / 8][4], const X& x, uint32_t b) {
  ptx::hold(out);
  ptx::wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel)
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      uint64_t rows = ptx::column_descriptor(b + panel * TILE * 128) + step * ptx::COLUMN_STEP;
      if constexpr (std::is_same_v<X, uint64_t>)
        ptx::wgmma_16<T, true, false, true>(ptx::part<8>(out, panel * 8), x + 2 * step, rows);
      else
        ptx::wgmma_16<T>(ptx::part<8>(out, panel * 8), x[step], rows);
    }
  ptx::wgmma_commit();
}

// y = A B^T of codes over 32 TIMES of the reduction, A in shared memory or in registers. Its end is to be waited for.
template <int TIMES, int N, class A>
__device__ __forceinline__ void multiply_codes(int (&y)[N][4], const A& a, uint64_t b) {
  ptx::forget(y);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < TIMES; ++step) {
    if constexpr (std::is_same_v<A, uint64_t>) ptx::wgmma_s8(y, a + 2 * step, b + 2 * step, step > 0);
    else ptx::wgmma_s8(y, a[step], b + 2 * step, step > 0);
  }
  ptx::wgmma_commit();
}

}  // namespace sage::attention
