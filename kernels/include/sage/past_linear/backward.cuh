// past_linear.cu defines phi and the states (H and z). backward_queries reads the same states as the forward.
// backward_keys reads states that are summed from the end of the sequence.
#pragma once

#include <sage/attention/mixture.cuh>
#include <sage/past_linear/state_product.cuh>

namespace sage::past_linear {

// With u = H dO, n = phi . z and t = dO . out = phi . u / n: dphi = (u - t * z) / n. As phi . dphi = 0, the
// backward of phi's softmax is dq = phi o dphi. Also stores two numbers of each query for backward_keys:
// f = 1 / n and w = -t / n. H and z are stored times inverse_blocks(block) / BLOCK, so both numbers need this factor
// too: inverse_blocks(block) is applied here, and 1 / BLOCK in backward_keys.
//
// In a mixture (attention/mixture.cuh) dO is the gradient of the mixture's output, and the gradient of the tail's
// output is (1 - a) * dO. blend_backward (blend.cu) has stored dtheta without the tail's terms; this function adds
// them: -a * (1 - a) * t for each query.
template <class T, int D>
__device__ __forceinline__ void backward_queries(const params::Linear& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float sums[D], norms[BLOCK];
  using At = Tile<T, D>;
  static_assert(PLAN_FITS<D, params::plan("linear_backward_queries", D, params::LISTED), 2 * At::ROWS_BYTES>);
  At at(p);
  if (at.first >= at.segment.query_len) return;
  Rows<T> q = at.queries(p, p.q), dout = at.queries(p, p.dout), dq = at.queries(p, p.dq);
  uint32_t memory = ptx::shared_address(shared), state = memory + 2 * At::ROWS_BYTES;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float u[D / 8][4] = {};
  if (at.block > 0) {
    int key_head = at.head / (p.shape.query_heads / p.shape.key_heads);
    copy_block<T, D>(memory, q, at.first);
    copy_block<T, D>(memory + At::ROWS_BYTES, dout, at.first);
    at.load_state(state, p, at.row(p, key_head));
    ptx::cp_async_wait<0>();
    at.complete_state(state, sums, p, key_head);
    __syncthreads();
    make_query_features<T, D>(memory, q, at.first, sums, norms);
    __syncthreads();
    multiply_state<T, D, true>(u, memory + At::ROWS_BYTES + warp * 16 * D * 2, state, lane);
    __syncwarp();  // the results overwrite the operand
  }
  bool mixed = p.mixture.theta && at.block > 0;
  float dtheta = 0.0f, weight_of_exact[2] = {};
  if (mixed) {
    attention::MixtureWeights weights(p.mixture, p.shape, at.segment, at.segment_index, at.head, at.block);
#pragma unroll
    for (int h = 0; h < 2; ++h) weight_of_exact[h] = weights.of_exact(at.first + warp * 16 + lane / 4 + 8 * h);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = warp * 16 + lane / 4 + 8 * h;
    bool real = at.block > 0 && at.first + row < at.segment.query_len;
    float inverse = real ? inverse_norm(norms[row]) : 0.0f, t = 0.0f;
    if (at.block > 0) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) t += element<T, D>(shared, row, n * 8 + 2 * (lane & 3) + e) * u[n][2 * h + e];
    }
    t = row_sum<4>(t) * inverse;
    if (mixed && real) {
      float a = weight_of_exact[h];
      // If no key is in the tail, the tail contributes to no gradient, whatever its normalizer is.
      if (a >= 1.0f) t = 0.0f, inverse = 0.0f;
      if (lane % 4 == 0) dtheta -= a * (1.0f - a) * t;
      inverse *= 1.0f - a;
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int column = n * 8 + 2 * (lane & 3) + e;
        float phi = at.block > 0 ? element<T, D>(shared, row, column) : 0.0f;
        x[e] = real ? phi * inverse * (u[n][2 * h + e] - t * sums[column]) : 0.0f;
      }
      leave_2<T, D>(shared + At::ROWS_BYTES, row, n * 8 + 2 * (lane & 3), x[0], x[1]);
    }
    if (lane % 4 == 0 && at.first + row < at.segment.query_len) {
      float factor = real ? inverse * inverse_blocks(at.block) : 0.0f;
      float* to = p.rows + 2 * (at.padded + row);
      to[0] = factor, to[1] = -factor * t;
    }
  }
  store_rows<T, D>(dq, shared + At::ROWS_BYTES, warp * 16, at.first, p.add);
  if (!mixed) return;
  __syncthreads();  // all warps have read the normalizers
  float sum = attention::sum_of_block<WARPS>(dtheta, norms);
  if (threadIdx.x == 0) attention::theta_part(p.mixture, p.shape, at.segment_index, at.head, at.block) += sum;
}

// G = sum f phi(q)^T dO and z = sum w phi(q) are sums over all later query blocks; backward_queries has stored f and w
// of each query. With phi = phi(k): dphi = G v + z, dk = phi o (dphi - phi . dphi), and dv = phi G. As the
// stored f and w lack the factor 1 / BLOCK (see backward_queries), dphi and dv are multiplied by it.
template <class T, int D>
__device__ __forceinline__ void backward_keys(const params::Linear& p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ float sums[D];
  using At = Tile<T, D>;
  static_assert(PLAN_FITS<D, params::plan("linear_backward_keys", D, params::LISTED), 2 * At::ROWS_BYTES>);
  At at(p);
  if (at.first >= at.segment.key_len) return;
  Rows<T> k = at.keys(p, p.k), v = at.keys(p, p.v), dk = at.keys(p, p.dk), dv = at.keys(p, p.dv);
  uint32_t memory = ptx::shared_address(shared), state = memory + 2 * At::ROWS_BYTES;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  copy_block<T, D>(memory, k, at.first);
  copy_block<T, D>(memory + At::ROWS_BYTES, v, at.first);
  at.load_state(state, p, at.row(p, at.head));
  ptx::cp_async_wait<0>();
  at.complete_state(state, sums, p, at.head);
  make_features<T, D>(memory, k.count - at.first, k.head_dim, [](int, int, const float(&)[8]) {});
  __syncthreads();
  constexpr float BY_TOKEN = 1.0f / BLOCK;
  float acc[D / 8][4];
  // dK overwrites V in shared memory. dV, computed after dK, does not need V.
  multiply_state<T, D, true>(acc, memory + At::ROWS_BYTES + warp * 16 * D * 2, state, lane);
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = warp * 16 + lane / 4 + 8 * h;
    float mean = 0.0f;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int column = n * 8 + 2 * (lane & 3) + e;
        float& x = acc[n][2 * h + e];
        x = (x + sums[column]) * BY_TOKEN;
        mean += element<T, D>(shared, row, column) * x;
      }
    mean = row_sum<4>(mean);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      int column = n * 8 + 2 * (lane & 3);
      leave_2<T, D>(shared + At::ROWS_BYTES, row, column, element<T, D>(shared, row, column) * (acc[n][2 * h] - mean),
                    element<T, D>(shared, row, column + 1) * (acc[n][2 * h + 1] - mean));
    }
  }
  store_rows<T, D>(dk, shared + At::ROWS_BYTES, warp * 16, at.first, p.add);
  multiply_state<T, D, false>(acc, memory + warp * 16 * D * 2, state, lane);
  __syncwarp();
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      leave_2<T, D>(shared, warp * 16 + lane / 4 + 8 * h, n * 8 + 2 * (lane & 3), acc[n][2 * h] * BY_TOKEN,
                    acc[n][2 * h + 1] * BY_TOKEN);
  store_rows<T, D>(dv, shared, warp * 16, at.first, p.add);
}

}  // namespace sage::past_linear
