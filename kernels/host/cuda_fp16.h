// A stand-in for CUDA's f16 on a CPU.
#pragma once
#include "cuda_on_host.h"

struct __half {
  _Float16 value;
  operator float() const { return float(value); }
};
struct __half2 { __half x, y; };
inline __half __float2half_rn(float x) { return {_Float16(x)}; }
inline __half __ushort_as_half(uint16_t bits) { return {same_bits<_Float16>(bits)}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {{_Float16(a.x.value + b.x.value)}, {_Float16(a.y.value + b.y.value)}}; }
