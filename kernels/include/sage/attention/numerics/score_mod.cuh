// Policies that change the scaled logits before the softmax (FlexAttention's score_mod). Most kernels change nothing.
// Separately compiled kernels apply a soft cap (Gemma 2, arXiv 2408.00118, section 2), ALiBi (arXiv 2108.12409), or
// both, according to the parameters.
//
// A policy has:
// - apply(x, factor, offset, ..): on entry x times factor are base-2 logits, and offset is 0. Changes all three, so
//   that the new base-2 logits are x times factor plus offset. In a forward, each row has an offset; in a
//   backward, all rows share one offset.
// - of_lane: in a forward, a further addend of all logits of this lane; 0 unless `apply` sets it.
// - add_of_lane(x, factor): returns x + of_lane / factor.
// - chain(ds): on entry `ds` is the gradient of the new logits. Changes it to the gradient of the old logits, with the
//   derivatives that the preceding `apply` stored.
// - next_head(): the caller calls it before the query tiles of the next query head.
#pragma once

#include <sage/attention/numerics/probabilities.cuh>
#include <sage/attention/query_tiles.cuh>
#include <sage/ptx/math.cuh>

namespace sage::attention {

// The first query head that a thread block of a backward visits.
__device__ __forceinline__ int first_query_head(const params::Backward& p, const BackwardBlock& block) {
  return block.key_head * (p.shape.query_heads / p.shape.key_heads);
}

struct NoScoreMod {
  static constexpr bool MODIFIES = false;
  NoScoreMod() = default;
  template <class Params>
  __device__ __forceinline__ NoScoreMod(const Params&, int) {}
  template <class X, class Offset, class... At>
  __device__ __forceinline__ void apply(X&, float&, Offset&, const Segment&, At...) {}
  __device__ __forceinline__ float add_of_lane(float x, float) const { return x; }
  __device__ __forceinline__ void chain(Scores&) const {}
  __device__ __forceinline__ void next_head() {}
};

// tanh(x / 4) for |x| < 2, within a relative error of 2^-15: x times a minimax polynomial of degree 2 in x^2.
__device__ __forceinline__ float tanh_of_small(float x) {
  float square = x * x, y = fmaf(square, 0x1.d7e632p-14f, -0x1.53a6fp-8f);
  return x * fmaf(square, y, 0x1.fffd0ap-3f);
}

// x[i] = tanh(x[i] * by / 4), computed with tanh_of_small or an exponential. The exponential, which would delay the
// exponentials of the softmax, is computed only if one of the thread's arguments of tanh is large. Which formula is
// used for an argument depends only on the argument's own size, so that a masked key does not change the results of
// other keys.
template <int N>
__device__ __forceinline__ void take_tanh(float (&x)[N], float by) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] *= by, bits |= __float_as_uint(x[i]);
  // The exponent's highest bit: set if |x[i]| >= 2 for any i.
  if (__builtin_expect(bits & 0x40000000u, 0)) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float large = fmaf(-2.0f, ptx::reciprocal(1.0f + ptx::exp2(x[i] * (0.5f * ptx::LOG2_E))), 1.0f);
      x[i] = fabsf(x[i]) < 2.0f ? tanh_of_small(x[i]) : large;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = tanh_of_small(x[i]);
}

// With a soft cap c, logits become c tanh(x / c). Then, with ALiBi, they are lowered by the head's slope times the
// distance between the query's position and the key.
struct SoftcapAndAlibi {
  static constexpr bool MODIFIES = true;
  const params::ScoreMod& mod;
  int head;
  float slope;  // for base-2 logits; 0: no ALiBi
  bool only_earlier;  // whether no query sees a key after its own position
  float of_lane = 0.0f;
  // The soft cap's derivative, 1 - tanh^2, at each of the lane's logits of a tile, in pairs of f16.
  uint32_t derivative[8][2];

  template <class Params>
  __device__ __forceinline__ SoftcapAndAlibi(const Params& p, int head) : mod(p.score_mod), head(head), slope(slope_of(head)), only_earlier(p.shape.limit_after == 1) {}
  __device__ __forceinline__ float slope_of(int of_head) const {
    return mod.alibi_slopes ? __ldg(mod.alibi_slopes + of_head) * ptx::LOG2_E : 0.0f;
  }
  __device__ __forceinline__ void next_head() {
    if (++head < mod.heads) slope = slope_of(head);
  }
  __device__ __forceinline__ float add_of_lane(float x, float factor) const { return x + of_lane * ptx::reciprocal(factor); }
  // The slope divided by `factor`, for logits that are not yet multiplied by `factor`. In a backward `factor` is 0 if
  // an INT8 tile of Q or K is all zeros. This function raises such a factor, so that its inverse is finite.
  __device__ __forceinline__ float unscaled_slope(float& factor) const {
    if (factor < 1e-30f) factor = 1e-30f;
    return slope * ptx::reciprocal(factor);
  }
  __device__ __forceinline__ bool has_softcap() const { return mod.softcap > 0.0f; }

  // Sets x to tanh(x * factor / c), and then sets `factor` to c, the cap of base-2 logits.
  template <int N>
  __device__ __forceinline__ void cap(float (&x)[N], float& factor) const {
    float cap2 = mod.softcap * ptx::LOG2_E;
    float by = 4.0f * factor / cap2;
    // In chunks, so that ptxas has registers for take_tanh's exponentials.
    constexpr int PART = 16;
#pragma unroll
    for (int i = 0; i < N; i += PART) take_tanh(reinterpret_cast<float(&)[PART]>(x[i]), by);
    factor = cap2;
  }

  // Applies the soft cap and ALiBi to a forward's logits: 16 * M queries from `first_query` on, and the tile of keys
  // from `first_key + column` on.
  //
  // If no query sees a key after its own position, a distance needs no absolute value. Then one FMA per logit adds only
  // the term of ALiBi that is the same in all rows and lanes. The caller adds `offset`, which depends only on the row,
  // and the member `of_lane`, which depends only on the lane. `offset` is the same for every `column`.
  template <int M>
  __device__ __forceinline__ void apply(float (&x)[M][8][4], float& factor, float (&offset)[2 * M], const Segment& segment, int first_query, int first_key, int column, int lane) {
    if (has_softcap()) {
      const float before = factor;
#pragma unroll
      for (int m = 0; m < M; ++m) cap(reinterpret_cast<float(&)[32]>(x[m]), factor = before);
    }
    if (slope == 0.0f) return;
    const float unscaled = unscaled_slope(factor);
    auto lower = [&](auto earlier) {
      constexpr bool EARLIER = decltype(earlier)::value;
      if constexpr (EARLIER) of_lane = slope * float(2 * (lane & 3));
#pragma unroll
      for (int r = 0; r < 2 * M; ++r) {
        // Opaque, so that ptxas processes row by row: see `mask` in softmax.cuh.
        float before = float(ptx::opaque(first_query + row_of(r, lane) + segment.key_len - segment.query_len - first_key - (EARLIER ? 0 : 2 * (lane & 3))));
        if constexpr (EARLIER) offset[r] = -slope * before;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& logit = x[r >> 1][n][2 * (r & 1) + e];
            float key = float(column + n * 8 + e);
            logit = EARLIER ? fmaf(unscaled, key, logit) : fmaf(-unscaled, fabsf(before - key), logit);
          }
      }
    };
    if (only_earlier) lower(std::true_type());
    else lower(std::false_type());
  }

  // Applies the soft cap and ALiBi to a backward's transposed scores: 16 keys from `first_key` on, and the tile of
  // queries from `first_query` on.
  __device__ __forceinline__ void apply(Scores& s, float& factor, float& offset, const Segment& segment, int first_query, int first_key, int lane) {
    if (has_softcap()) {
      cap(reinterpret_cast<float(&)[32]>(s), factor);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          derivative[n][h] = ptx::pack_16<__half>(fmaf(-s[n][2 * h], s[n][2 * h], 1.0f), fmaf(-s[n][2 * h + 1], s[n][2 * h + 1], 1.0f));
    }
    if (slope == 0.0f) return;
    const float unscaled = unscaled_slope(factor);
    float before = float(ptx::opaque(first_query + 2 * (lane & 3) + segment.key_len - segment.query_len - first_key - lane / 4));
    auto lower = [&](auto earlier) {
      constexpr bool EARLIER = decltype(earlier)::value;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float further = float(n * 8 + (e & 1) - 8 * (e >> 1));
          s[n][e] = fmaf(-unscaled, EARLIER ? further : fabsf(before + further), s[n][e]);
        }
    };
    if (only_earlier) offset = -slope * before, lower(std::true_type());
    else lower(std::false_type());
  }

  __device__ __forceinline__ void chain(Scores& ds) const {
    if (!has_softcap()) return;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) ds[n][e] *= ptx::half_of<__half>(derivative[n][e >> 1], e & 1);
  }
};

}  // namespace sage::attention
