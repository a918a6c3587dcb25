// Readers of fragments from swizzled shared memory. A matrix is described by its shared memory address and ROW_BYTES.
//
// A reader's `address` depends on the lane. `load` xors the offset of `step` into it and adds the offset of `row`.
// After unrolling, both offsets are constants.
#pragma once

#include <sage/layout/swizzle.cuh>
#include <sage/ptx/memory.cuh>

namespace sage::layout {

// Reads 16 rows x 32 bytes by one ldmatrix; its four matrices of 8 rows x 16 bytes are in the order of the operand's
// registers:
//   A operand (16 rows of A, 32 bytes of reduction): (rows 0-7, low), (rows 8-15, low), (rows 0-7, high), ...
//   B operand (two column tiles of 8):               (tile 0, low), (tile 0, high), (tile 1, low), (tile 1, high)
template <int ROW_BYTES, bool B>
struct Reader {
  uint32_t address;  // of this lane's 16 bytes for row 0 and step 0 of `load`
  __device__ __forceinline__ Reader(uint32_t base, int lane) {
    int matrix = lane >> 3;
    int row = (lane & 7) + ((B ? matrix >> 1 : matrix & 1) << 3);
    int half = B ? matrix & 1 : matrix >> 1;
    address = base + swizzled<ROW_BYTES>(row, half);
  }
  // `row` is a multiple of 16, so that it does not change the swizzle. `step` is a position in the row, in units of 32
  // bytes. The constructor's `base` must be a multiple of both ROW_BYTES and 128, so that the xor stays inside the row.
  __device__ __forceinline__ void load(uint32_t (&r)[4], int row, int step) const {
    ptx::ldmatrix(r, (address ^ (step << 5)) + row * ROW_BYTES);
  }
  // The inverse of `load`: stores registers to shared memory.
  __device__ __forceinline__ void store(const uint32_t (&r)[4], int row, int step, int lane) const {
    ptx::stmatrix(r, (address ^ (step << 5)) + row * ROW_BYTES, lane);
  }
};

template <int ROW_BYTES>
using ReaderA = Reader<ROW_BYTES, false>;
template <int ROW_BYTES>
using ReaderB = Reader<ROW_BYTES, true>;

// Reads 16 rows x 16 columns of a 16-bit matrix whose rows are the steps of the reduction, by one transposing ldmatrix.
// Its four matrices of 8 x 8 are in the order of the operand's registers:
//   A^T stored (rows = reduction, columns = rows of A): (k 0-7, m 0-7), (k 0-7, m 8-15), (k 8-15, m 0-7), ...
//   B stored (rows = reduction, columns = columns of B): (k 0-7, n 0-7), (k 8-15, n 0-7), (k 0-7, n 8-15), ...
template <int ROW_BYTES, bool B>
struct TransposedReader {
  uint32_t address;
  __device__ __forceinline__ TransposedReader(uint32_t base, int lane) {
    int matrix = lane >> 3;
    int row = (lane & 7) + ((B ? matrix & 1 : matrix >> 1) << 3);
    int half = B ? matrix >> 1 : matrix & 1;
    address = base + swizzled<ROW_BYTES>(row, half);
  }
  __device__ __forceinline__ void load(uint32_t (&r)[4], int row, int step) const {
    ptx::ldmatrix_transposed(r, (address ^ (step << 5)) + row * ROW_BYTES);
  }
};

template <int ROW_BYTES>
using TransposedReaderA = TransposedReader<ROW_BYTES, false>;
template <int ROW_BYTES>
using TransposedReaderB = TransposedReader<ROW_BYTES, true>;

}  // namespace sage::layout
