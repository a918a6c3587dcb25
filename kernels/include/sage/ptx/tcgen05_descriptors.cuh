// The shared memory descriptors and instruction descriptors of tcgen05.mma, for ptx/tcgen05.cuh.
#pragma once

#include <stdint.h>

namespace sage::ptx {

// The descriptor (PTX ISA, "Tensorcore 5th Generation: Shared memory descriptor") of an operand whose rows run along
// the reduction. Rows of `row_bytes` = 32 or 64 are swizzled as in layout/swizzle.cuh; rows of 16 bytes are not
// swizzled. Bits 0 to 13 are the address divided by 16; bits 32 to 45 are the stride from one group of 8 rows to the
// next, divided by 16; 46 to 48 the constant 1; 61 to 63 the swizzle. The base offset is 0, so the rows must start at a
// multiple of 8 * row_bytes. The leading offset is 0, because only rows longer than the swizzle width use it.
// A descriptor larger by 2 starts 32 bytes further along the rows.
__host__ __device__ constexpr uint64_t tcgen05_rows(uint32_t shared, int row_bytes) {
  uint64_t swizzle = row_bytes == 64 ? 4 : row_bytes == 32 ? 6 : 0, version = 1;
  return swizzle << 61 | version << 46 | uint64_t(8 * row_bytes / 16) << 32 | shared >> 4;
}

// The instruction descriptor ("Instruction descriptor", kind::mxf4nvf4): A of 128 x 64 and B of 64 x `columns`, both
// E2M1 and contiguous along the reduction (bits 15, 16: 0), scales in UE4M3 (bit 23: 0). The scale factor IDs are 0,
// the only value that is allowed with four scales per row.
__host__ __device__ constexpr uint32_t tcgen05_nvfp4(int columns) {
  constexpr uint32_t E2M1 = 1;
  return E2M1 << 7 | E2M1 << 10 | uint32_t(columns / 8) << 17 | uint32_t(128 / 128) << 27;
}

}  // namespace sage::ptx
