// The output of a block of queries: phi(q) H / (phi(q) . z), or its mixture with the output of exact attention.
// past_linear.cu defines phi, H and z.
#pragma once

#include <sage/attention/mixture.cuh>
#include <sage/past_linear/state_product.cuh>

namespace sage::past_linear {

template <class T, int D>
__device__ __forceinline__ void forward(const params::Linear& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float sums[D], norms[BLOCK];
  using At = Tile<T, D>;
  static_assert(PLAN_FITS<D, params::plan("linear_forward", D, params::LISTED), 1 * At::ROWS_BYTES>);
  At at(p);
  if (at.first >= at.segment.query_len) return;
  Rows<T> q = at.queries(p, p.q);
  uint32_t memory = ptx::shared_address(shared);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float acc[D / 8][4] = {};
  if (at.block > 0) {
    int key_head = at.head / (p.shape.query_heads / p.shape.key_heads);
    copy_block<T, D>(memory, q, at.first);
    at.load_state(memory + At::ROWS_BYTES, p, at.row(p, key_head));
    ptx::cp_async_wait<0>();
    at.complete_state(memory + At::ROWS_BYTES, sums, p, key_head);
    __syncthreads();
    make_query_features<T, D>(memory, q, at.first, sums, norms);
    __syncthreads();
    multiply_state<T, D, false>(acc, memory + warp * 16 * D * 2, memory + At::ROWS_BYTES, lane);
    __syncwarp();  // the results overwrite the operand
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = warp * 16 + lane / 4 + 8 * h;
    float inverse = at.block > 0 ? inverse_norm(norms[row]) : 0.0f;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      leave_2<T, D>(shared, row, n * 8 + 2 * (lane & 3), acc[n][2 * h] * inverse, acc[n][2 * h + 1] * inverse);
  }
  Rows<T> out = at.queries(p, p.out);
  if (!p.mixture.theta) {
    store_rows<T, D>(out, shared, warp * 16, at.first, false);
    return;
  }
  attention::MixtureWeights weights(p.mixture, p.shape, at.segment, at.segment_index, at.head, at.block);
  Rows<T> sparse = at.queries(p, p.sparse);
  change_and_store_rows<T, D>(out, shared, warp * 16, at.first, [&](int row, int column, float(&tail)[8]) {
    if (row >= at.segment.query_len) return;
    float a = weights.of_exact(row), exact[8];
    unpack_8<T>(sparse.load_8(row, column), exact);
#pragma unroll
    for (int c = 0; c < 8; ++c) tail[c] = a < 1.0f ? a * exact[c] + (1.0f - a) * tail[c] : exact[c];
  });
}

}  // namespace sage::past_linear
