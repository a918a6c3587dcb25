// Rounding to E4M3 values: PTX ISA, "Data Movement and Conversion Instructions: cvt".
#pragma once

#include <stdint.h>

namespace sage::ptx {

// cvt.rn.satfinite.e4m3x2.f32 and back by cvt.rn.f16x2.e4m3x2: the E4M3 value nearest to x, ties to even, saturating at
// 448. Each thread converts its own x. Needs sm_89; on earlier architectures it traps.
__device__ __forceinline__ float e4m3(float x) {
#if __CUDA_ARCH__ >= 890
  uint16_t code;
  uint32_t halves;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(code) : "f"(0.0f), "f"(x));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(code));
  float y;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(y) : "r"(halves));
  return y;
#else
  __trap();
  return x;
#endif
}

}  // namespace sage::ptx
