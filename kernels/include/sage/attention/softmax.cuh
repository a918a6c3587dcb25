// The online softmax of a warp's 16 * M queries, and the mask.
//
// A lane has a quarter of the columns of 2 * M rows: row 16 * m + 8 * h + g (m < M; h = 0, 1; g = lane / 4) is the
// lane's row number r = 2 * m + h.
#pragma once

#include <math_constants.h>
#include <sage/attention/segment.cuh>
#include <sage/ptx/math.cuh>

namespace sage::attention {

// The maximum, or the sum, over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ int quad_max(int x) {
  x = max(x, __shfl_xor_sync(~0u, x, 1));
  return max(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Converts a row's number among the lane's rows, `r`, to its number among the warp's 16 * M rows.
__device__ __forceinline__ int row_of(int r, int lane) { return (r >> 1) * 16 + (r & 1) * 8 + lane / 4; }

// A sink is an additional logit without a row of V. Returns log2 of the factor by which the sink raises a row's sum of
// exponentials. `lse2` is log2 of the sum without the sink.
__device__ __forceinline__ float log2_with_sink(float sink2, float lse2) {
  float above = sink2 - lse2;
  return fmaxf(above, 0.0f) + log2f(1.0f + ptx::exp2(-fabsf(above)));
}

// The factor that turns results of INT8 matmuls into logits, given the dequant_scale of a tile's keys. A tile of zeros
// has scale 0. The matmul's results for it are 0, so any positive factor gives the correct logits. A factor of 0 would
// turn the minus infinity of masked keys into NaN.
__device__ __forceinline__ float logit_factor(float q_factor, float k_dequant) {
  float factor = q_factor * k_dequant;
  return factor == 0.0f ? 1e-30f : factor;
}

// Masks the logits of one tile: writes `hidden` where a query does not see a key. `first_query` is the warp's first
// query, `first_key` the tile's first key.
template <Hidden HIDDEN, int M, class X>
__device__ __forceinline__ void mask(X (&x)[M][8][4], const Sight<HIDDEN>& sight, int first_query, int first_key,
                                     int lane, X hidden) {
#pragma unroll
  for (int r = 0; r < 2 * M; ++r) {
    // Opaque, so that ptxas compares row by row. If ptxas made all comparisons first, it would run out of registers for
    // their results.
    int visible =
        ptx::opaque(sight.visible_keys(first_query + row_of(r, lane)) - first_key - 2 * (lane & 3));
    int first = 0;
    if constexpr (HIDDEN == OUTER_KEYS)
      first = ptx::opaque(sight.first_key(first_query + row_of(r, lane)) - first_key - 2 * (lane & 3));
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (n * 8 + e >= visible || (HIDDEN == OUTER_KEYS && n * 8 + e < first)) x[r >> 1][n][2 * (r & 1) + e] = hidden;
  }
}

// The values SUM and MAGIC of each of a thread's rows. They are read and written only once per tile, so they are kept
// in shared memory (SHARED) if registers are short.
template <int ROWS, int THREADS, bool SHARED>
struct RowState {
  float* memory;  // (value, row, thread)
  float registers[SHARED ? 1 : 2 * ROWS];
  static constexpr int BYTES = SHARED ? 2 * ROWS * THREADS * 4 : 0;
  static constexpr int SUM = 0;    // this lane's part of the row's sum of 2^(logit - reference)
  static constexpr int MAGIC = 1;  // quant::MAGIC * this value is still to be subtracted from the row of Softmax::acc

  __device__ __forceinline__ explicit RowState(unsigned char* at) : memory(reinterpret_cast<float*>(at) + threadIdx.x) {
#pragma unroll
    for (int i = 0; i < 2 * ROWS; ++i) (*this)(0, i) = 0.0f;
  }
  __device__ __forceinline__ float& operator()(int value, int row) {
    return SHARED ? memory[(value * ROWS + row) * THREADS] : registers[SHARED ? 0 : value * ROWS + row];
  }
};

// The exponents of a row are relative to its reference. The references of a warp are raised to the rows' maxima when
// the maximum of some row exceeds the row's reference by more than SLACK. With SLACK = 8 the accumulator is rescaled
// rarely, and 2^8 is far from overflow.
template <int D, int M, int THREADS, bool SHARED, int OUTPUTS = 1, int SLACK = 8>
struct Softmax {
  using State = RowState<2 * M, THREADS, SHARED>;
  float reference[2 * M];  // per row: at most SLACK below its largest logit so far
  float acc[OUTPUTS * M][D / 8][4];  // (output, m): sum 2^(logit - reference) v
  State state;

  __device__ __forceinline__ explicit Softmax(unsigned char* memory) : state(memory) {
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) reference[r] = -CUDART_INF_F;
#pragma unroll
    for (int m = 0; m < OUTPUTS * M; ++m)
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[m][n][e] = 0.0f;
  }

  // `row_max`: the rows' maxima of new logits. If a maximum exceeds its row's reference by more than SLACK, raises the
  // references of the warp's rows and rescales the accumulator.
  __device__ __forceinline__ void follow(const float (&row_max)[2 * M]) {
    float decay[2 * M];
    if (__builtin_expect(catch_up(row_max, decay), false)) rescale(decay);
  }

  // `follow` in two steps, for an accumulator to which an MMA in flight still adds: catch_up returns whether the
  // accumulator must be rescaled, and computes the factors `decay`. The caller calls rescale after the MMA.
  __device__ __forceinline__ bool catch_up(const float (&row_max)[2 * M], float (&decay)[2 * M]) {
    bool behind = false;
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) behind |= row_max[r] > reference[r] + SLACK;
    if (__builtin_expect(!__any_sync(~0u, behind), true)) return false;
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
      float next = fmaxf(reference[r], row_max[r]);
      decay[r] = ptx::exp2(reference[r] - (next == -CUDART_INF_F ? 0.0f : next));
      reference[r] = next;
      state(State::SUM, r) *= decay[r];
      state(State::MAGIC, r) *= decay[r];
    }
    return true;
  }
  __device__ __forceinline__ void rescale(const float (&decay)[2 * M]) {
#pragma unroll
    for (int r = 0; r < 2 * M * OUTPUTS; ++r)
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) acc[r >> 1][n][2 * (r & 1) + i] *= decay[r % (2 * M)];
  }

  // The reference, or 0 while a row has seen no key. Each term of such a row is then 2^(-inf - 0) = 0; with a reference
  // of -inf the term would be NaN.
  __device__ __forceinline__ float shift(int r) const { return reference[r] == -CUDART_INF_F ? 0.0f : reference[r]; }
};

}  // namespace sage::attention
