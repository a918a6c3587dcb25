// Quantizes P and dS to INT8 on Hopper, two 16-bit values per instruction. P is in bf16. dS is in f16, divided by a
// power of two that each warp chooses so that its largest dS stays well inside the range of f16.
#pragma once

#include <sage/attention/numerics/score_codes_sm80.cuh>

namespace sage::attention {

// A warp's scores in 16 bit: w[n][h] of lane 4g + t is columns 8n + 2t and 8n + 2t + 1 of row 8h + g.
using PackedScores = uint32_t[8][2];

template <class T>
__device__ __forceinline__ void pack(PackedScores& w, const Scores& s) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) w[n][h] = ptx::pack_16<T>(s[n][2 * h], s[n][2 * h + 1]);
}

// Stores scores in shared memory. Their registers are already A fragments of 16 keys x 16 queries.
__device__ __forceinline__ void store(uint32_t rows, const PackedScores& w, int lane) {
  layout::ReaderA<TILE * 2> writer(rows, lane);
#pragma unroll
  for (int step = 0; step < 4; ++step)
    writer.store({w[2 * step][0], w[2 * step][1], w[2 * step + 1][0], w[2 * step + 1][1]}, 0, step, lane);
}

// Computes the maximum of each row over the two halves of its word. Returns the maxima of two rows as the halves of one
// word.
template <class Max>
__device__ __forceinline__ uint32_t join_rows(const uint32_t (&rows)[2], Max max) {
  return max(__byte_perm(rows[0], rows[1], 0x5410), __byte_perm(rows[0], rows[1], 0x7632));
}
// Each half of `x` is this lane's maximum of one row. Returns the maxima of the two rows over the four lanes that have
// their values.
template <class Max>
__device__ __forceinline__ uint32_t join_lanes(uint32_t x, Max max) {
  x = max(x, __shfl_xor_sync(~0u, x, 1));
  return max(x, __shfl_xor_sync(~0u, x, 2));
}
// The element-wise larger magnitudes of two pairs of f16 values. The signs of the result are arbitrary.
struct MaxAbs {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return ptx::max_abs_2(a, b); }
};
// The element-wise maxima of two pairs of nonnegative bf16 values. Compares bits as integers, so NaN is the largest.
struct MaxPositive {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return __vmaxu2(a, b); }
};

// Reduces this lane's values with `max`. The result's low half is for row g = lane / 4, its high half for row g + 8.
template <class Max>
__device__ __forceinline__ uint32_t largest_of(const PackedScores& w, Max max) {
  uint32_t largest[2] = {w[0][0], w[0][1]};
#pragma unroll
  for (int n = 1; n < 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) largest[h] = max(largest[h], w[n][h]);
  return join_rows(largest, max);
}

// Quantizes P with one scale per key. The arithmetic is in bf16, whose 8 significant bits are more than the 7 of INT8.
// Adding 128 rounds to an integer, because bf16 numbers in [128, 256) are integers. `largest`: the maximum of each of
// this lane's two keys.
__device__ __forceinline__ void quantize_probabilities(const PackedScores& w, uint32_t largest, ScoreCodes& codes,
                                                       float (&dequant)[2]) {
  constexpr uint32_t MAGIC = 0x43004300;  // 128, twice
  uint32_t scale[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x = __uint_as_float(h == 0 ? largest << 16 : largest & 0xffff0000u);
    // Infinite for a row of zeros: its INT8 values are then arbitrary, and its dequant_scale is zero.
    float quant = 127.0f * ptx::reciprocal(x);
    scale[h] = ptx::pack_16<__nv_bfloat16>(quant, quant);
    dequant[h] = ptx::reciprocal(__uint_as_float(scale[h] & 0xffff0000u));
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int n = 4 * i + 2 * (j / 2), h = j & 1;
      codes[i][j] = __byte_perm(ptx::fma_2<__nv_bfloat16>(w[n][h], scale[h], MAGIC),
                                ptx::fma_2<__nv_bfloat16>(w[n + 1][h], scale[h], MAGIC), 0x6420);
    }
}

// The scales that quantize two rows in f16, from the rows' maxima in the halves of `largest`. If 127 / max overflows
// f16, the quant_scale is the largest f16.
struct HalfScales {
  uint32_t quant[2];
  float dequant[2];

  __device__ __forceinline__ explicit HalfScales(uint32_t largest) {
    largest &= 0x7fff7fffu;  // MaxAbs returns values of any sign
    constexpr float LARGEST = 65504.0f;
    float2 x = __half22float2(reinterpret_cast<const __half2&>(largest));
    float scale[2] = {fminf(127.0f * ptx::reciprocal(x.x), LARGEST), fminf(127.0f * ptx::reciprocal(x.y), LARGEST)};
    quant[0] = ptx::pack_16<__half>(scale[0], scale[0]), quant[1] = ptx::pack_16<__half>(scale[1], scale[1]);
    dequant[0] = ptx::max_abs(x.x * (1.0f / 127.0f), 1.0f / LARGEST);
    dequant[1] = ptx::max_abs(x.y * (1.0f / 127.0f), 1.0f / LARGEST);
  }
  // Quantizes four values of row g + 8h. Adding 1536 rounds to an integer: f16 numbers in [1024, 2048) are integers.
  __device__ __forceinline__ uint32_t codes(int h, uint32_t a, uint32_t b) const {
    constexpr uint32_t MAGIC = 0x66006600;  // 1536, twice
    return __byte_perm(ptx::fma_2<__half>(a, quant[h], MAGIC), ptx::fma_2<__half>(b, quant[h], MAGIC), 0x6420);
  }
};

// The unit of a warp's dS: a power of two that dS is divided by, so that its largest value is in [LOW, HIGH] in f16.
// Typical dS is about 1e-7, too small for f16. The unit changes when the largest dS leaves this range. HalfScales
// limits the quant_scale of rows whose largest dS is below 2^-9 in this unit: they are quantized more coarsely. The
// largest dS of such a row is at least 2^9 times smaller than the warp's. Some dS becomes infinite in f16: dS beyond
// 2^76 and, right after tiles whose dS is nearly zero, dS beyond 2^26.
struct DsUnit {
  static constexpr uint32_t LOW = 0x3c00, HIGH = 0x7800;  // 1, 2^15 in f16
  static constexpr int TARGET = 12, LEAST = -60, MOST = 90, STEP = 100;
  float exponent = 20.0f, unit = 1.0f / (1 << 20);  // 2^-exponent

  // Adopts `other`, the largest unit of the warpgroup's warps. If dS is zero in all these warps, `other` is 0 and the
  // unit does not change.
  __device__ __forceinline__ void follow(float other) {
    if (other == 0.0f) return;
    unit = other, exponent = float(127 - int(__float_as_uint(other) >> 23));
  }
  // `s` is dS divided by `unit`; `w` is `s` packed in f16; `largest` contains the maxima of |w| in rows g and g + 8. If
  // the warp's largest |w| is outside [LOW, HIGH], changes `unit`, and rescales `s`, `w` and `largest`. Returns `unit`,
  // or 0 if all of `s` is zero.
  __device__ __forceinline__ float keep(PackedScores& w, uint32_t& largest, Scores& s) {
    uint32_t top = max(largest & 0x7fffu, largest >> 16 & 0x7fffu);
    if (__builtin_expect(__all_sync(~0u, top - LOW <= HIGH - LOW), true)) return unit;
    if (!__any_sync(~0u, top > HIGH) && __any_sync(~0u, top >= LOW)) return unit;
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) bits = max(bits, quant::abs_bits(s[n][e]));
    int power = int(__reduce_max_sync(~0u, bits) >> 23) - 127;
    // The unit does not change if the largest |dS| is zero or not finite.
    if (power <= -127) return 0.0f;
    if (power >= 128) return unit;
    int now = int(exponent), next = min(max(now + min(max(TARGET - power, -STEP), STEP), LEAST), MOST);
    float change = __int_as_float(127 + next - now << 23);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= change;
    exponent = float(next), unit = __int_as_float(127 - next << 23);
    pack<__half>(w, s);
    largest = join_lanes(largest_of(w, MaxAbs()), MaxAbs());
    return unit;
  }
};

// Quantizes dS with one scale for each key. The halves of `largest`: the largest |dS| of each of the lane's two keys.
__device__ __forceinline__ void quantize_keys(const PackedScores& w, uint32_t largest, ScoreCodes& codes, float (&dequant)[2]) {
  HalfScales scales(largest);
  dequant[0] = scales.dequant[0], dequant[1] = scales.dequant[1];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int n = 4 * i + 2 * (j / 2), h = j & 1;
      codes[i][j] = scales.codes(h, w[n][h], w[n + 1][h]);
    }
}

// Quantizes dS of the 16 queries of a strip over one tile of keys, with one scale per query. Each of four warps has
// stored dS^T of 16 keys in `rows`, divided by the warp's own unit (DsUnit). Returns the largest of the four units, or
// 0 if all of dS is zero.
__device__ __forceinline__ float quantize_queries(ScoreCodes& codes, float2& dequant, uint32_t rows, const float4* units_at,
                                                  int strip, int lane) {
  float4 units = *units_at;
  float unit = fmaxf(fmaxf(units.x, units.y), fmaxf(units.z, units.w));
  layout::TransposedReaderA<TILE * 2> reader(rows, lane);
  // [group of 16 keys][register]. A register contains dS of two keys and one query: query lane / 4 of the strip in
  // registers 0 and 2, query lane / 4 + 8 in registers 1 and 3.
  uint32_t r[4][4];
#pragma unroll
  for (int step = 0; step < 4; ++step) reader.load(r[step], step * 16, strip);
  // r[i] contains dS that warp i has stored, divided by units[i]. If the four units differ, changes r[i] to dS / `unit`.
  if (__builtin_expect(fminf(fminf(units.x, units.y), fminf(units.z, units.w)) != unit, false)) {
    float of_step[4] = {units.x, units.y, units.z, units.w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      float change = of_step[step] * ptx::reciprocal(unit);
      uint32_t factor = ptx::pack_16<__half>(change, change);
#pragma unroll
      for (int i = 0; i < 4; ++i) r[step][i] = ptx::fma_2<__half>(r[step][i], factor, 0x80008000);
    }
  }
  uint32_t largest[2] = {};
#pragma unroll
  for (int step = 0; step < 4; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i & 1] = ptx::max_abs_2(largest[i & 1], r[step][i]);
  HalfScales scales(join_lanes(join_rows(largest, MaxAbs()), MaxAbs()));
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      // Every 16 keys are permuted (layout/permutation.cuh). Four neighbours in the permuted order are two of the first
      // eight keys and two of the last eight.
      codes[i][j] = scales.codes(j & 1, r[2 * i + j / 2][j & 1], r[2 * i + j / 2][(j & 1) + 2]);
  dequant = make_float2(scales.dequant[0] * unit, scales.dequant[1] * unit);
  return unit;
}

}  // namespace sage::attention
