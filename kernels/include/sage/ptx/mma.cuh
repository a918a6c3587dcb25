// Matrix instructions of a warp, sm_80 and later, one per function: PTX ISA, "Multiply-and-Accumulate Instruction:
// mma". All 32 lanes of the warp call them; operands and results are registers, so that no fence is needed.
//
// A warp computes D = A B + C for a 16 x 8 tile of D. Lane l is (g, t) = (l / 4, l % 4), and its fragments are:
//   D, C   d[0], d[1]: row g, columns 2t and 2t + 1;  d[2], d[3]: row g + 8, the same columns
//   A      a[0] row g, a[1] row g + 8: bytes 4t to 4t + 3 of the first 16 bytes of the row;  a[2], a[3]: of the next 16
//   B      b0: column g, bytes 4t to 4t + 3 of the first 16 bytes along the reduction;  b1: of the next 16
// In bytes the layout is the same for 8-bit operands (reduction 32) and 16-bit ones (reduction 16).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace sage::ptx {

// mma.m16n8k32, s8 x s8 -> s32: PTX ISA, "Matrix Fragments for mma.m16n8k32".
__device__ __forceinline__ void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                       const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// mma.m16n8k16, 16-bit x 16-bit -> f32, accumulating in place: PTX ISA, "Matrix Fragments for mma.m16n8k16".
template <class T>
__device__ __forceinline__ void mma_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_16<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma_16<__half>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace sage::ptx
