// Conversions between floats and the codes of NVFP4.
#pragma once

#include <sage/quant/nvfp4.cuh>
#include <stdint.h>

// The conversion to E2M1 is an instruction of the families 10 (sm_100, sm_103) and 12 (sm_120).
#ifdef __CUDA_ARCH_FAMILY_SPECIFIC__
#define SAGE_HAS_E2M1 (__CUDA_ARCH_FAMILY_SPECIFIC__ == 1000 || __CUDA_ARCH_FAMILY_SPECIFIC__ == 1200)
#elif defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define SAGE_HAS_E2M1 1
#else
#define SAGE_HAS_E2M1 0
#endif

namespace sage::ptx {

// The value of an E4M3 code, whose sign bit is ignored.
__device__ __forceinline__ float value_of_e4m3(uint32_t code) {
  code &= 0x7f;
  if (code == 0x7f) return __uint_as_float(0x7fffffffu);
  return code < 8 ? float(code) * (1.0f / 512.0f) : __uint_as_float((code << 20) + (120u << 23));
}

// The code of a nonnegative E4M3 value; 0x7f for a NaN. Uses cvt.rn.satfinite.e4m3x2.f32 (PTX ISA, "Data Movement and
// Conversion Instructions: cvt") if the architecture has it.
__device__ __forceinline__ uint32_t code_of_e4m3(float value) {
#if __CUDA_ARCH__ >= 890
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(value));
  return codes;
#endif
  if (value != value) return 0x7f;
  return value < 1.0f / 64.0f ? uint32_t(value * 512.0f) : (__float_as_uint(value) - (120u << 23)) >> 20;
}

// The value of the E2M1 code in the lowest four bits.
__device__ __forceinline__ float value_of_e2m1(uint32_t code) {
  uint32_t magnitude = code & 7;
  float value = magnitude < 2 ? 0.5f * float(magnitude) : __uint_as_float((magnitude << 22) + (126u << 23));
  return code & 8 ? -value : value;
}

// The code of the nearest E2M1 value.
__device__ __forceinline__ uint32_t code_of_e2m1(float x) {
  float value = quant::e2m1_of_positive(fabsf(x));
  uint32_t magnitude = value < 1.0f ? uint32_t(2.0f * value) : (__float_as_uint(value) >> 22) - 252;
  return magnitude | (__float_as_uint(x) >> 31) << 3;
}

// Converts eight values to E2M1 codes, the first in the lowest bits. Uses cvt.rn.satfinite.e2m1x2.f32 (PTX ISA, "Data
// Movement and Conversion Instructions: cvt") if the architecture has it.
__device__ __forceinline__ uint32_t codes_of_e2m1(const float (&x)[8]) {
  uint32_t codes = 0;
#if SAGE_HAS_E2M1
  asm("{.reg .b8 c0, c1, c2, c3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c3, %8, %7;\n"
      "mov.b32 %0, {c0, c1, c2, c3};}"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
#else
#pragma unroll
  for (int i = 0; i < 8; ++i) codes |= code_of_e2m1(x[i]) << (4 * i);
#endif
  return codes;
}

}  // namespace sage::ptx
