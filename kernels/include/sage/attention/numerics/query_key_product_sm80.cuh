// S = Q K^T on INT8 values, with mma.sync, for the forwards of SageBwd.
#pragma once

#include <sage/layout/fragments.cuh>
#include <sage/quant/codes.cuh>

namespace sage::attention {

// Computes S of a warp's 16 * M queries and a tile of 64 keys from INT8 values in shared memory. An element s of S is
// returned as the bits of the float quant::MAGIC + s.
template <int D, int M>
__device__ __forceinline__ void multiply_query_codes(int (&x)[M][8][4], uint32_t q_codes, uint32_t k_codes, int lane) {
  layout::ReaderA<D> q_reader(q_codes, lane);
  layout::ReaderB<D> k_reader(k_codes, lane);
#pragma unroll
  for (int step = 0; step < D / 32; ++step) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) q_reader.load(a[m], m * 16, step);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      uint32_t b[4];
      k_reader.load(b, n * 8, step);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        quant::multiply(x[m][n], a[m], b[0], b[1], step == 0);
        quant::multiply(x[m][n + 1], a[m], b[2], b[3], step == 0);
      }
    }
  }
}

}  // namespace sage::attention
