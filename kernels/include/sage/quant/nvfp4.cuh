// NVFP4: E2M1 values in groups of 16 that share an E4M3 scale, x ~ value * scale. The arithmetic is bit-identical to
// candle-sage/src/nvfp4.rs, which documents the format.
#pragma once

#include <sage/ptx/math.cuh>
#include <stdint.h>

namespace sage::quant {

constexpr int NVFP4_GROUP = 16;
constexpr float E2M1_MAX = 6.0f, E4M3_MAX = 448.0f;

// Rounds a magnitude to a format with 2^MANTISSA steps per power of two. Below `smallest` the steps are as large as
// those just above it. Adding 1.5 * 2^23 steps leaves no bits below a step, and ties go to the even code.
template <int MANTISSA>
__device__ __forceinline__ float round_magnitude(float magnitude, float smallest) {
  constexpr float STEPS = 1.5f * float(1 << (23 - MANTISSA));
  float power = fmaxf(__uint_as_float(__float_as_uint(magnitude) & 0x7f800000u), smallest);
  return fmaf(-power, STEPS, fmaf(power, STEPS, magnitude));
}

// Rounds a number in [0, 6] to the steps of E2M1. The ALU pipe (maxima and masks) executes one instruction less than in
// `round_magnitude`. `power` is (nearly) 0 for x < 2, 2 for x in [2, 4), and 4 for x in [4, 8). `magic` is then
// 1.5 * 2^22, 1.5 * 2^23 or 1.125 * 2^24. Its last bit is worth 0.5, 1 or 2, which is E2M1's step at x.
__device__ __forceinline__ float e2m1_steps(float x) {
  float power = __uint_as_float(__float_as_uint(x) & 0x40800000u);
  float magic = fmaf(power, 3145728.0f, 6291456.0f);
  return __fadd_rn(__fadd_rn(x, magic), -magic);
}

// The nearest E2M1 value; ties go to the even code.
__device__ __forceinline__ float e2m1_of_positive(float x) { return e2m1_steps(fminf(x, E2M1_MAX)); }
__device__ __forceinline__ float e2m1(float x) { return copysignf(e2m1_of_positive(fabsf(x)), x); }

// Rounds two nonnegative numbers to E2M1, with packed 16-bit arithmetic. The numbers are first truncated to 16 bit, and
// their last bit is set, so that no number moves onto or across a midpoint. Unlike in `e2m1`, exact midpoints are
// rounded up, not to the even code. (The callers' numbers, probabilities divided by their group's scale, are exact
// midpoints in one of 2^20 cases.) `magic` is 1.5 * HALVES for x < 2, 3 * HALVES for x in [2, 4), and 4.5 * HALVES for
// x in [4, 8). Its last bit is worth 1/2, 1 or 2, which is E2M1's step at x.
template <class T>
__device__ __forceinline__ uint32_t e2m1_pair(float low, float high) {
  constexpr bool F16 = std::is_same_v<T, __half>;
  constexpr float HALVES = F16 ? 512.0f : 64.0f;
  const uint32_t one = ptx::twice<T>(1.0f), minus_one = ptx::twice<T>(-1.0f);
  uint32_t x = ptx::pack_16_towards_zero<T>(low, high) | 0x00010001u;
  uint32_t power = x & (F16 ? 0x44004400u : 0x40804080u);
  uint32_t magic = ptx::fma_2<T>(power, ptx::twice<T>(0.75f * HALVES), ptx::twice<T>(1.5f * HALVES));
  x = ptx::fma_2<T>(magic, minus_one, ptx::fma_2<T>(x, one, magic));
  return ptx::min_2<T>(x, ptx::twice<T>(E2M1_MAX));
}

// The nearest E4M3 value of a nonnegative number; a NaN stays a NaN.
__device__ __forceinline__ float e4m3_of_positive(float x) {
  return round_magnitude<3>(x > E4M3_MAX ? E4M3_MAX : x, 1.0f / 64.0f);
}

struct Nvfp4Scale {
  float dequant;  // an E4M3 value, divided by the `factor` passed to nvfp4_scale_of, if any
  float quant;    // 1 / dequant, 0 if dequant is 0
};

// The scale of a group whose largest magnitude is `max`. Newton steps make max / 6 and 1 / dequant correctly rounded.
// An infinity or a NaN gives NaN.
__device__ __forceinline__ Nvfp4Scale nvfp4_scale_of(float max) {
  constexpr float SIXTH = 1.0f / E2M1_MAX;
  float sixth = max * SIXTH;
  sixth = fmaf(fmaf(-E2M1_MAX, sixth, max), SIXTH, sixth);
  float dequant = e4m3_of_positive(sixth);
  float quant = ptx::reciprocal(dequant);
  quant = fmaf(quant, fmaf(-dequant, quant, 1.0f), quant);
  return {dequant, dequant == 0.0f ? 0.0f : quant};
}

// `head_factor` of candle-sage/src/nvfp4.rs. `max`: the bits of the largest magnitude of a head of V.
__device__ __forceinline__ float nvfp4_head_factor(uint32_t max) {
  constexpr uint32_t MOST = 100 + 127;
  uint32_t exponent = max >> 23;
  if (max == 0 || exponent >= 255) return 1.0f;
  return __uint_as_float(min(9 + 2 * 127 - exponent, MOST) << 23);
}

// A group's scale if its values are multiplied by `factor`, a power of two, before they are quantized, and divided by
// `factor` afterwards. `max` is the largest magnitude before the multiplication.
__device__ __forceinline__ Nvfp4Scale nvfp4_scale_of(float max, float factor) {
  Nvfp4Scale scale = nvfp4_scale_of(max * factor);
  float inverse = __uint_as_float(0x7f000000u - __float_as_uint(factor));
  return {scale.dequant * inverse, scale.quant * factor};
}

}  // namespace sage::quant
