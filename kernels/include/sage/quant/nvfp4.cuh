// NVFP4: E2M1 codes in groups of 16 that share an E4M3 scale, x ~ code * scale. The same arithmetic, to the bit, as
// candle-sage/src/nvfp4.rs, which says what it means.
#pragma once

#include <sage/ptx/math.cuh>
#include <stdint.h>

namespace sage::quant {

constexpr int NVFP4_GROUP = 16;
constexpr float E2M1_MAX = 6.0f, E4M3_MAX = 448.0f;

// |x| rounded to a format with 2^MANTISSA steps in each power of two from SMALLEST on, and steps of that size below. Adding
// 1.5 * 2^23 steps leaves no bits under a step: ties go to the even code.
template <int MANTISSA>
__device__ __forceinline__ float round_magnitude(float magnitude, float smallest) {
  constexpr float STEPS = 1.5f * float(1 << (23 - MANTISSA));
  float power = fmaxf(__uint_as_float(__float_as_uint(magnitude) & 0x7f800000u), smallest);
  return fmaf(-power, STEPS, fmaf(power, STEPS, magnitude));
}

// The same for E2M1, of numbers under 2^22, with an operation less in the pipe of maxima and masks. Two bits of the exponent
// are (nearly) 0 for x < 2, 2 in [2, 4) and 4 in [4, 8); the addend is then 1.5 * 2^22, 1.5 * 2^23 or 1.125 * 2^24, whose last
// bit is worth 0.5, 1 or 2: E2M1's step there. From 8 on the result is above 6, and is saturated by the caller.
__device__ __forceinline__ float e2m1_steps(float x) {
  float power = __uint_as_float(__float_as_uint(x) & 0x40800000u);
  float magic = fmaf(power, 3145728.0f, 6291456.0f);
  return __fadd_rn(__fadd_rn(x, magic), -magic);
}

// The nearest E2M1 value.
__device__ __forceinline__ float e2m1_of_positive(float x) { return e2m1_steps(fminf(x, E2M1_MAX)); }
__device__ __forceinline__ float e2m1(float x) { return copysignf(e2m1_of_positive(fabsf(x)), x); }

// Two E2M1 values in 16 bit, of numbers that are not negative and under 2^22. They saturate last, together.
template <class T>
__device__ __forceinline__ uint32_t e2m1_pair(float low, float high) {
  return ptx::min_2<T>(ptx::pack_16<T>(e2m1_steps(low), e2m1_steps(high)),
                       ptx::twice<T>(E2M1_MAX));
}

// The nearest E4M3 value of a number that is not negative; a NaN stays one.
__device__ __forceinline__ float e4m3_of_positive(float x) {
  return round_magnitude<3>(x > E4M3_MAX ? E4M3_MAX : x, 1.0f / 64.0f);
}

// The two directions of a group's scale.
struct Nvfp4Scale {
  float dequant;  // an E4M3 value
  float quant;    // 1 / dequant, 0 where that is 0
};

// The scale of a group whose largest magnitude is `max`. Quotient and reciprocal are the correctly rounded ones, each by one
// step of Newton's after the approximation. An infinity gives NaN as a NaN does.
__device__ __forceinline__ Nvfp4Scale nvfp4_scale_of(float max) {
  constexpr float SIXTH = 1.0f / E2M1_MAX;
  float sixth = max * SIXTH;
  sixth = fmaf(fmaf(-E2M1_MAX, sixth, max), SIXTH, sixth);
  float dequant = e4m3_of_positive(sixth);
  float quant = ptx::reciprocal(dequant);
  quant = fmaf(quant, fmaf(-dequant, quant, 1.0f), quant);
  return {dequant, dequant == 0.0f ? 0.0f : quant};
}

}  // namespace sage::quant
