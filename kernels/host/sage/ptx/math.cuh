// include/sage/ptx/math.cuh on a CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace sage::ptx {

inline float exp2(float x) { return ::exp2f(x); }
constexpr float LOG2_E = 1.44269504088896341f;
inline int opaque(int x) { return x; }
inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float max_abs(float a, float b) { return a != a || b != b ? NAN : fmaxf(fabsf(a), fabsf(b)); }

template <class T>
inline float to_float(T x) { return float(x); }
template <class T>
inline T from_float(float x);
template <>
inline float from_float<float>(float x) { return x; }
template <>
inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
inline __half from_float<__half>(float x) { return __float2half_rn(x); }

template <class T>
inline uint32_t pack_16(float low, float high) {
  return same_bits<uint16_t>(from_float<T>(low)) | uint32_t(same_bits<uint16_t>(from_float<T>(high))) << 16;
}
template <class T>
inline uint32_t pack_16_towards_zero(float low, float high) {
  auto truncated = [](float x) {
    uint16_t bits = same_bits<uint16_t>(from_float<T>(x));
    return uint32_t(fabsf(float(same_bits<T>(bits))) > fabsf(x) ? bits - 1 : bits);
  };
  return truncated(low) | truncated(high) << 16;
}
template <class T>
inline uint32_t twice(float x) { return pack_16<T>(x, x); }
template <class T>
inline float half_of(uint32_t pair, int n) { return float(same_bits<T>(uint16_t(pair >> (16 * n)))); }
template <class T>
inline uint32_t min_2(uint32_t a, uint32_t b) {
  return pack_16<T>(fminf(half_of<T>(a, 0), half_of<T>(b, 0)), fminf(half_of<T>(a, 1), half_of<T>(b, 1)));
}
template <class T>
inline uint32_t fma_2(uint32_t a, uint32_t b, uint32_t c) {
  auto of = [&](int n) { return fmaf(half_of<T>(a, n), half_of<T>(b, n), half_of<T>(c, n)); };
  return pack_16<T>(of(0), of(1));
}
template <class T>
inline uint32_t mul_2(uint32_t a, uint32_t b) {
  return pack_16<T>(half_of<T>(a, 0) * half_of<T>(b, 0), half_of<T>(a, 1) * half_of<T>(b, 1));
}

}  // namespace sage::ptx
