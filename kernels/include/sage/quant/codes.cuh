// INT8 quantization: q = round(x * quant_scale), x ~ q * dequant_scale, as in candle-sage/src/cpu/quantize.rs.
#pragma once

#include <sage/ptx/math.cuh>
#include <sage/ptx/mma.cuh>
#include <stdint.h>

namespace sage::quant {

// The bits of |x|. The maximum of such bits is the largest magnitude, or NaN if any x is NaN.
__device__ __forceinline__ uint32_t abs_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

struct Scale {
  float dequant;  // max|x| / 127
  float quant;    // 127 / max|x|, 0 for a group of zeros. No epsilon is added, because gradients of 1e-7 are common.
};

// The divisions are correctly rounded, so that the CPU computes the same bits. If 127 / max overflows, `quant` is
// FLT_MAX and `dequant` is 1 / FLT_MAX.
__device__ __forceinline__ Scale scale_of(uint32_t max_abs_bits) {
  constexpr float LARGEST = 3.402823466e38f;
  float max = __uint_as_float(max_abs_bits);
  float quant = __fdiv_rn(127.0f, max);
  if (max == 0.0f) return {0.0f, 0.0f};
  if (quant > LARGEST) return {__fdiv_rn(1.0f, LARGEST), LARGEST};
  return {__fdiv_rn(max, 127.0f), quant};
}

// 1.5 * 2^23. Floats in [2^23, 2^24) are whole numbers, so adding this constant rounds x, |x| < 2^22, to the nearest
// whole number, ties to even. The low bits of the sum are this number in two's complement. Conversely, an s32
// accumulator that starts from the constant's bits reads as the float MAGIC + sum while |sum| < 2^22. A sum of up to
// 256 products of INT8 values within +-127 stays below 2^22.
constexpr float MAGIC = 12582912.0f;
constexpr int MAGIC_BITS = 0x4b400000;

// One step of an INT8 matmul; the first step starts the accumulator from MAGIC.
__device__ __forceinline__ void multiply(int (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool first) {
  const int magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
  if (first)
    ptx::mma_s8(sums, a, b0, b1, magic);
  else
    ptx::mma_s8(sums, a, b0, b1, sums);
}

// The INT8 value of x, in the low byte; ties to even. The product is rounded before the addition, as on the CPU.
__device__ __forceinline__ int code(float x, float quant_scale) {
  return __float_as_int(__fadd_rn(__fmul_rn(x, quant_scale), MAGIC));
}

// The low bytes of four words, as one word.
__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// The INT8 values of four floats. fmaf rounds once, while `code` and the CPU round twice, so a value may differ from
// theirs. Use this function only for values that never leave the kernel.
__device__ __forceinline__ uint32_t codes(float a, float b, float c, float d, float quant_scale) {
  return pack_bytes(__float_as_uint(fmaf(a, quant_scale, MAGIC)), __float_as_uint(fmaf(b, quant_scale, MAGIC)),
                    __float_as_uint(fmaf(c, quant_scale, MAGIC)), __float_as_uint(fmaf(d, quant_scale, MAGIC)));
}

// Instead of subtracting MAGIC from each sum of an INT8 matmul, a kernel can accumulate (MAGIC + sum) * factor, and
// subtract MAGIC * (total of the factors) once in MAGIC_TILES tiles. The accumulator is then rounded to the last bit of
// MAGIC * total: after n tiles with the same factor f the roundings add up to about 0.4 n^1.5 f, 9 f for 8 tiles.
// Quantizing P and dS causes a larger error, about 100 f per tile: the sum of 64 products with random signs. Each is a
// rounding error (about 0.3) times an INT8 value (about 40).
constexpr int MAGIC_TILES = 8;

// Base-2 logarithms of the largest value that P is quantized to: 127 in s8, 254 in u8.
constexpr float LOG2_127 = 6.98868468677217f;
constexpr float LOG2_254 = 7.98868468677217f;

// Quantizes four values in [0, 255] that are already divided by the scale. Adding 1024 in f16 rounds to an integer,
// because f16 numbers in [1024, 2048) are integers.
__device__ __forceinline__ uint32_t codes_of_positive(__half2 low, __half2 high) {
  const __half2 magic = __half2half2(__ushort_as_half(0x6400));  // 1024
  low = __hadd2(low, magic), high = __hadd2(high, magic);
  return __byte_perm(reinterpret_cast<uint32_t&>(low), reinterpret_cast<uint32_t&>(high), 0x6420);
}
__device__ __forceinline__ uint32_t codes_of_positive(float a, float b, float c, float d) {
  return codes_of_positive(__floats2half2_rn(a, b), __floats2half2_rn(c, d));
}

// Four u8 values divided by 2^power, rounded; 0 for powers above 8.
__device__ __forceinline__ uint32_t codes_over(uint32_t codes, int power) {
  if (power == 0) return codes;
  if (power > 8) return 0;
  return (codes >> power & (0xffu >> power) * 0x01010101u) + (codes >> (power - 1) & 0x01010101u);
}

// x with its last two bits cleared. With the result as `factor`, MAGIC * factor (MAGIC = 3 * 2^22) is exact. Therefore
// fmaf(MAGIC + sum, factor, -MAGIC * factor) is sum * factor with one rounding.
__device__ __forceinline__ float short_factor(float x) { return __uint_as_float(__float_as_uint(x) & 0xfffffffcu); }

// A logit is a sum of INT8 products times a factor. If the factor is at most MAGIC_FACTOR, the backward computes
// (MAGIC + sum) * factor - x, where x = MAGIC * factor + log-sum-exp. x and the product in x are rounded, each by at
// most 2^-7, because they are below 2^18. This changes a probability by at most 1.1 %. For larger factors, which
// occur with logits above a hundred, the backward subtracts MAGIC before it multiplies.
constexpr float MAGIC_FACTOR = 1.0f / 64.0f;

// The quant_scale of values with the largest magnitude `max`, with an error of up to 2 ulp. Only for INT8 values that
// never leave the kernel. It is 0 for zeros. It is limited to 1e38, to stay finite. If `max` is below 1.3e-36, no INT8
// value therefore reaches 127. An infinity or a NaN gives NaN.
__device__ __forceinline__ float quick_quant_scale(float max) {
  return max == 0.0f ? 0.0f : fminf(127.0f * ptx::reciprocal(max), 1e38f) + (max - max);
}

}  // namespace sage::quant
