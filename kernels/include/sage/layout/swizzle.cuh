// The swizzle: the position of a 16-byte chunk of a row in shared memory. Chunks with the same number in eight
// neighbouring rows are in different banks, so that `ldmatrix` reads all eight without bank conflicts. INT8 and FP4
// tiles are stored with the swizzle in global memory too.
#pragma once

#include <stdint.h>

namespace sage::layout {

// The mask that is xor-ed with the chunk number, for rows of ROW_BYTES = 32, 64 or a multiple of 128. 128 bytes cover
// all banks, so eight neighbouring rows of 128 bytes or more need eight different masks. Two rows of 64 bytes, or four
// rows of 32 bytes, cover the banks together, so they have the same mask.
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
