// Where a 16-byte chunk of a row lies in shared memory, so that eight rows of one column of chunks lie in different
// banks: what `ldmatrix` reads at once never collides. Codes lie like this in memory too, tile by tile.
#pragma once

#include <stdint.h>

namespace sage::layout {

// Rows of ROW_BYTES = 32, 64 or a multiple of 128. The chunk number is xor-ed with a function of the row: 128 bytes are
// all banks, so rows of 128 bytes and more differ in their last three bits; two rows of 64, or four of 32, share a line.
template <int ROW_BYTES>
__device__ __forceinline__ int chunk_mask(int row) {
  static_assert(ROW_BYTES == 32 || ROW_BYTES == 64 || ROW_BYTES % 128 == 0, "rows of 32, 64 or n x 128 bytes");
  return ROW_BYTES == 32 ? (row >> 2) & 1 : ROW_BYTES == 64 ? (row >> 1) & 3 : row & 7;
}

// Byte offset of chunk `chunk` of row `row`.
template <int ROW_BYTES>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * ROW_BYTES + ((chunk ^ chunk_mask<ROW_BYTES>(row)) << 4);
}

}  // namespace sage::layout
