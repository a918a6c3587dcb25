// Descriptors of the operands and of the kind of a product out of tensor memory, for ptx/tcgen05.cuh.
#pragma once

#include <stdint.h>

namespace sage::ptx {

// The descriptor (PTX ISA, "Tensorcore 5th Generation: Shared memory descriptor") of rows in shared memory that lie along the
// reduction, `row_bytes` = 32 or 64 apart and swizzled as in layout/swizzle.cuh, or 16 apart and not swizzled. The first row's
// number is a multiple of 8, and the rows start at a multiple of 8 row_bytes: the hardware's swizzle is a function of the address.
// A descriptor larger by 2 starts 32 bytes further along the rows.
__host__ __device__ constexpr uint64_t tcgen05_rows(uint32_t shared, int row_bytes) {
  uint64_t swizzle = row_bytes == 64 ? 4 : row_bytes == 32 ? 6 : 0, version = 1;
  return swizzle << 61 | version << 46 | uint64_t(8 * row_bytes / 16) << 32 | shared >> 4;
}

// The instruction descriptor ("Instruction descriptor", kind::mxf4nvf4) of A of 128 x 64 and B of 64 x `columns`: both E2M1, rows
// along the reduction, with scales in E4M3 whose bytes are all of a column's four.
__host__ __device__ constexpr uint32_t tcgen05_nvfp4(int columns) {
  constexpr uint32_t E2M1 = 1;
  return E2M1 << 7 | E2M1 << 10 | uint32_t(columns / 8) << 17 | uint32_t(128 / 128) << 27;
}

}  // namespace sage::ptx
