// Arithmetic instructions that C++ has no name for, one per function. None of them accesses memory. Quoted titles are
// sections of the PTX ISA manual.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace sage::ptx {

// ex2.approx.ftz.f32, "Floating Point Instructions: ex2": 2^x within 2 ulp; 2^-inf is 0.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float LOG2_E = 1.44269504088896341f;

// Returns x through an empty asm statement, which the compiler cannot see into: addresses derived from the result are
// recomputed instead of being hoisted out of the loop and kept in registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// shfl.sync, "Data Movement and Conversion Instructions: shfl.sync": x from lane 0. All lanes of the warp call it with
// the same x; the compiler then knows that the value is uniform and keeps it in one uniform register instead of one
// register per thread.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

// rcp.approx.ftz.f32, "Floating Point Instructions: rcp": 1 / x within 1 ulp.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// max.NaN.f32, "Floating Point Instructions: max": the larger of |a| and |b|; NaN if a or b is NaN.
__device__ __forceinline__ float max_abs(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(fabsf(a)), "f"(fabsf(b)));
  return y;
}

// cvt.rn.bf16x2.f32 or cvt.rn.f16x2.f32, "Data Movement and Conversion Instructions: cvt": two floats rounded to 16
// bit, `low` in the low half.
template <class T>
__device__ __forceinline__ uint32_t pack_16(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack_16<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack_16<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Two floats rounded to 16 bit towards zero, `low` in the low half: f16 by cvt.rz.f16x2.f32; bf16 by taking the upper
// half of each float.
template <class T>
__device__ __forceinline__ uint32_t pack_16_towards_zero(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    uint32_t packed;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  } else {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
  }
}

// fma.rn.f16x2 or fma.rn.bf16x2, "Half Precision Floating Point Instructions: fma": a * b + c of two values at once,
// each rounded once.
template <class T>
__device__ __forceinline__ uint32_t fma_2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  if constexpr (std::is_same_v<T, __half>)
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// x rounded to 16 bit, in both halves.
template <class T>
__device__ __forceinline__ uint32_t twice(float x) {
  return pack_16<T>(x, x);
}

// min.f16x2 or min.bf16x2, "Half Precision Floating Point Instructions: min": min(a, b) in each 16-bit half.
template <class T>
__device__ __forceinline__ uint32_t min_2(uint32_t a, uint32_t b) {
  uint32_t d;
  if constexpr (std::is_same_v<T, __half>)
    asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else
    asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// a * b in each 16-bit half. bf16 has no multiplication instruction before sm_90; adding -0 changes no product.
template <class T>
__device__ __forceinline__ uint32_t mul_2(uint32_t a, uint32_t b) {
  return fma_2<T>(a, b, 0x80008000u);
}

// max.NaN.xorsign.abs.f16x2, "Half Precision Floating Point Instructions: max": the larger of |a| and |b| for two pairs
// of f16; NaN if either operand is NaN. The caller ignores the result's sign, the exclusive or of the operands' signs.
// Needs sm_86; on earlier architectures it traps, and no kernel calls it there.
__device__ __forceinline__ uint32_t max_abs_2(uint32_t a, uint32_t b) {
  uint32_t d = 0;
#if __CUDA_ARCH__ >= 860
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  __trap();
#endif
  return d;
}

template <class T>
__device__ __forceinline__ float to_float(T x) {
  return static_cast<float>(x);
}

// One of the two 16-bit values in `pair`, as f32: n = 0 is the low half.
template <class T>
__device__ __forceinline__ float half_of(uint32_t pair, int n) {
  return to_float(reinterpret_cast<const T*>(&pair)[n]);
}

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

}  // namespace sage::ptx
