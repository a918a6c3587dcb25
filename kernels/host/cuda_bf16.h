// A stand-in for CUDA's bf16 on a CPU.
#pragma once
#include "cuda_on_host.h"

struct __nv_bfloat16 {
  uint16_t bits;
  operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  uint32_t bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
