// Conversion to FP8 on a CPU: searches for the nearest value; ties go to the even code, large values saturate.
#pragma once

enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };

namespace host {

// The value of a code whose sign bit is 0. Infinity and NaN are treated like ordinary codes.
inline double fp8_value(int code, bool e5m2) {
  int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, exponent = code >> mantissa;
  double fraction = double(code & ((1 << mantissa) - 1)) / (1 << mantissa);
  return exponent == 0 ? ldexp(fraction, 1 - bias) : ldexp(1 + fraction, exponent - bias);
}
inline int fp8_largest(bool e5m2) { return e5m2 ? 0x7b : 0x7e; }

inline uint32_t fp8_code(float x, bool e5m2) {
  if (x != x) return 0x7f;
  uint32_t sign = same_bits<uint32_t>(x) >> 24 & 0x80;
  double size = fabs(double(x));
  int low = 0, high = fp8_largest(e5m2);
  if (size >= fp8_value(high, e5m2)) return sign | high;
  while (high - low > 1) (fp8_value((low + high) / 2, e5m2) <= size ? low : high) = (low + high) / 2;
  double below = size - fp8_value(low, e5m2), above = fp8_value(high, e5m2) - size;
  return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
}

}  // namespace host

inline uint16_t __nv_cvt_float2_to_fp8x2(float2 x, __nv_saturation_t, __nv_fp8_interpretation_t format) {
  bool e5m2 = format == __NV_E5M2;
  return uint16_t(host::fp8_code(x.x, e5m2) | host::fp8_code(x.y, e5m2) << 8);
}
