// NVFP4 matmuls: mma.m16n8k64 with kind::mxf4nvf4, scale_vec::4X and ue4m3 scales (PTX ISA, "Multiply-and-Accumulate
// Instruction: mma", and "Block Scaling for mma.sync"). Family 12 (sm_120) has the instruction. For every other
// architecture it is emulated, slowly, from the same fragments, so that kernels can be tested without such a GPU.
//
// Fragments: g = lane / 4, t = lane % 4, eight FP4 values per register, the first in the lowest bits:
//   A   a[0]: row g, reduction 8t..; a[1]: row g + 8; a[2], a[3]: the same, reduction 32 + 8t..
//   B   b0: column g, reduction 8t..; b1: the same, reduction 32 + 8t..
//   D   d[2h + e]: row g + 8h, column 2t + e
// In bytes the layout is the same as for 8-bit operands. A scale register contains four scales: one byte for each 16
// elements of the reduction. The scales of A come from lanes t = 0 (row g) and t = 1 (row g + 8), the scales of B from
// lane t = 0 (column g).
#pragma once

#include <sage/ptx/convert_nvfp4.cuh>

// Set only for family 12: PTX promises the instruction to no other architecture.
#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ == 1200)
#define SAGE_HAS_NVFP4 1
#else
#define SAGE_HAS_NVFP4 0
#endif
#if __CUDA_ARCH__ >= 1200 && !SAGE_HAS_NVFP4
#error "FP4 matmuls on sm_120 need an architecture- or family-specific target: compute_120a or compute_120f"
#endif

namespace sage::ptx {

#if !SAGE_HAS_NVFP4
// Doubles the values of eight E2M1 codes to whole numbers, and returns signed bytes: four in each of two words.
__device__ __forceinline__ void twice_the_values(uint32_t codes, int (&values)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t four = codes >> (16 * i);
    uint32_t magnitudes = __byte_perm(0x03020100, 0x0c080604, four & 0x7777);
    // The sign bits, one per nibble, become byte masks.
    uint32_t signs = four >> 3 & 0x1111;
    signs = (signs | signs << 8) & 0x00110011;
    uint32_t negative = ((signs | signs << 4) & 0x01010101) * 0xff;
    values[i] = int(__vsub4(magnitudes ^ negative, negative));
  }
}
#endif

// mma.sync.m16n8k64 with block scaling: D += A B, A of 16 x 64 and B of 64 x 8. All 32 lanes call it. Byte and thread
// selectors of the scales are 0. The emulation reads the other lanes' operands by shuffles. It doubles the
// FP4 values, which makes them integers. Eight products are summed exactly, then scaled.
__device__ __forceinline__ void mma_nvfp4(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t a_scales,
                                          uint32_t b_scales) {
#if SAGE_HAS_NVFP4
  asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, {%11}, {%12,%12};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scales), "r"(b_scales), "h"(uint16_t(0)));
#else
  int lane = threadIdx.x % 32, quad = lane & ~3, columns = lane % 4 * 8;
  uint32_t rows[2], scales[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows[h] = __shfl_sync(~0u, a_scales, quad + h);
    scales[h] = __shfl_sync(~0u, b_scales, columns + 4 * h);
  }
#pragma unroll 1
  for (int from = 0; from < 4; ++from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int group = (2 * half + from / 2) * 8;
      int left[2][2], right[2][2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        twice_the_values(__shfl_sync(~0u, a[2 * half + h], quad + from), left[h]);
        twice_the_values(__shfl_sync(~0u, half ? b1 : b0, columns + 4 * h + from), right[h]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int sum = __dp4a(left[h][0], right[e][0], __dp4a(left[h][1], right[e][1], 0));
          float scale = 0.25f * value_of_e4m3(rows[h] >> group) * value_of_e4m3(scales[e] >> group);
          d[2 * h + e] = fmaf(float(sum), scale, d[2 * h + e]);
        }
    }
  }
#endif
}

}  // namespace sage::ptx
