// Copies of 16-bit operands into panels for wgmma (tile/products.cuh), shared by the warp-specialized mainloops for
// Hopper.
#pragma once

#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/params/plans.cuh>
#include <sage/tile/products.cuh>

namespace sage::attention {

using namespace tile;

// Copies ROWS rows of D 16-bit channels, from row `first` on, into shared memory as wgmma reads them: in panels of 64
// channels, because a swizzled row has 128 bytes. As in copy_rows, the copies are asynchronous if `rows.vector`, and
// rows and channels that the tensor does not have are zeros in shared memory.
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
      for (int panel = 0; panel < D / 64; ++panel)  // beyond the last row or channel, `from` is not read
        ptx::cp_async_16(to + panel * ROWS * 128 + i * 128, from + panel * 64, i < left && column + panel * 64 < rows.head_dim);
  } else {
#pragma unroll 1
    for (int panel = 0; panel < D / 64; ++panel) {
      copy_rows<ROWS, 64, THREADS>(to + panel * ROWS * 128, rows, first, thread);
      rows.skip_channels(64);
    }
  }
}

// Copies a tile of 64 rows into D / 64 panels, which start PANEL_ROWS rows apart. The loop is not unrolled, because the
// calling producer warp has few registers.
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

// A copy through a tensor map also reads rows beyond the end of a packed document. Whether these rows can change the
// mainloop's results:
enum class OverEnd {
  HARMLESS,  // either no row beyond a document's end is used, or the document's last tile is copied without a map
  WRONG,     // the mainloop uses rows beyond a document's end: the host must not pass maps of packed documents
};

// Copies D channels of a tile of 64 rows, from channel `channel` on, through a tensor map into panels of PANEL_ROWS
// rows. One thread issues a copy per panel. The caller announces the 64 * D * 2 bytes to the mbarrier by expect_tx.
template <params::Mainloop MAINLOOP, OverEnd OVER_END, int D, int PANEL_ROWS = TILE>
__device__ __forceinline__ void copy_tile_panels(uint32_t to, const params::TensorMap& map, int batch, int head, int first,
                                                 uint32_t mbarrier, int channel = 0) {
  static_assert(params::facts(MAINLOOP).maps != params::UNMAPPED);
  static_assert(params::facts(MAINLOOP).documents == (OVER_END == OverEnd::HARMLESS));
#pragma unroll
  for (int panel = 0; panel < D / 64; ++panel)
    ptx::cp_async_bulk_tensor(to + panel * PANEL_ROWS * 128, &map, channel + panel * 64, first, head, batch, mbarrier);
}

}  // namespace sage::attention
