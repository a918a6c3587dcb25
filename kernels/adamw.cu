// The norm of the gradient; and AdamW, which clips the gradient by this norm and updates all parameters in one pass.
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;

namespace {

constexpr int THREADS = 256;
constexpr int V = 4;

// Returns, in thread 0, the threads' `sum`s added in a fixed order. They are sums of squares of f32, which cannot
// overflow f64.
__device__ double block_sum(double sum) {
  __shared__ double sums[THREADS];
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

__device__ void squares(const params::SumOfSquares& p) {
  double sum = 0.0;
  int64_t stride = int64_t(gridDim.x) * THREADS * V;
  for (int64_t at = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * V; at < p.len; at += stride) {
    float x[V] = {};
    if (at + V <= p.len && p.vector) {
      elements::load_floats(p.x + at, x);
    } else {
      for (int i = 0; i < V && at + i < p.len; ++i) x[i] = p.x[at + i];
    }
#pragma unroll
    for (int i = 0; i < V; ++i) sum += double(x[i]) * double(x[i]);
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.partials[blockIdx.x] = sum;
}

// One thread block adds the sums of all thread blocks.
__device__ void sum_partials(const params::SumOfSquares& p) {
  double sum = 0.0;
  for (int part = threadIdx.x; part < p.parts; part += THREADS) sum += p.partials[part];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *p.out = sum;
}

// g = factor * gradient, clipped to norm `clip`; m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g^2;
// w = keep * w - rate * m / (sqrt(root * v) + eps). If the norm is not finite, nothing is updated.
__device__ void update(const params::AdamW& p) {
  double norm = double(p.factor) * sqrt(*p.sum_of_squares);
  if (!isfinite(norm)) return;
  float factor = p.factor * float(norm > double(p.clip) ? double(p.clip) / norm : 1.0);
  elements::each_pack<V>(p.len, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    float w[N], m[N], v[N], g[N];
    elements::load_floats(p.weights + at, w);
    elements::load_floats(p.mean + at, m);
    elements::load_floats(p.square + at, v);
    elements::load_floats(p.gradient + at, g);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      g[i] *= factor;
      m[i] = p.beta1 * m[i] + (1.0f - p.beta1) * g[i];
      v[i] = p.beta2 * v[i] + (1.0f - p.beta2) * (g[i] * g[i]);
      float keep = at + i < p.decayed ? p.keep : 1.0f;
      w[i] = keep * w[i] - p.rate * m[i] / (sqrtf(p.root * v[i]) + p.eps);
    }
    elements::store_floats(p.mean + at, m);
    elements::store_floats(p.square + at, v);
    elements::store_floats(p.weights + at, w);
    if (p.copy_type == elements::BF16) elements::store_floats(static_cast<__nv_bfloat16*>(p.copy) + at, w);
    if (p.copy_type == elements::F16) elements::store_floats(static_cast<__half*>(p.copy) + at, w);
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) sum_of_squares(const __grid_constant__ params::SumOfSquares p) {
  squares(p);
}
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_of_squares_end(const __grid_constant__ params::SumOfSquares p) { sum_partials(p); }
extern "C" __global__ void __launch_bounds__(THREADS) adamw(const __grid_constant__ params::AdamW p) { update(p); }
