// Muon's passes over a matrix: momentum, row normalization, and the update by the orthogonalized direction; and the
// traces and linear combinations inside the orthogonalization, whose matmuls run in cuBLAS.
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;

namespace {

constexpr int THREADS = 256, V = 4, V16 = 8;

// The sum over a thread block, in a fixed order.
__device__ float block_sum(float sum) {
  __shared__ float sums[THREADS];
  sums[threadIdx.x] = sum;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  __syncthreads();
  float total = sums[0];
  __syncthreads();
  return total;
}

// Calls body(at, Count<N>) for every pack in a grid-stride loop, and body(at, Count<1>) for the elements after the last
// whole pack.
template <int N, class Body>
__device__ __forceinline__ void each(int64_t len, Body body) {
  for (int64_t at = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * N; at < len; at += int64_t(gridDim.x) * THREADS * N) {
    if (at + N <= len) {
      body(at, elements::Count<N>());
    } else {
      for (int64_t i = at; i < len; ++i) body(i, elements::Count<1>());
    }
  }
}

// g = factor * gradient, clipped to norm `clip`; m = beta * m + (1 - beta) * g. The direction is a constant `unit` times m, or
// with Nesterov times (beta * m + (1 - beta) * g). If the norm is not finite, m is not changed.
__device__ void momentum(const params::MuonMomentum& p) {
  double norm = double(p.factor) * sqrt(*p.sum_of_squares);
  bool finite = isfinite(norm);
  float factor = p.factor * float(norm > double(p.clip) ? double(p.clip) / norm : 1.0);
  auto* direction = static_cast<__nv_bfloat16*>(p.direction);
  each<V>(p.len, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    float m[N], g[N];
    elements::load_floats(p.momentum + at, m);
    elements::load_floats(p.gradient + at, g);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      g[i] = finite ? (1.0f - p.beta) * (factor * g[i]) : 0.0f;
      if (finite) m[i] = p.beta * m[i] + g[i];
      g[i] = p.unit * (p.nesterov ? p.beta * m[i] + g[i] : m[i]);
    }
    elements::store_floats(p.momentum + at, m);
    elements::store_floats(direction + at, g);
  });
}

// One thread block per matrix.
__device__ void trace(const params::MuonTrace& p) {
  int64_t size = p.size;
  auto* x = static_cast<const __nv_bfloat16*>(p.x) + blockIdx.x * size * size;
  float sum = 0.0f;
  for (int row = threadIdx.x; row < p.size; row += THREADS) sum += __bfloat162float(x[row * (size + 1)]);
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.inverse[blockIdx.x] = sum > 0.0f && isfinite(sum) ? 1.0f / sqrtf(sum) : 0.0f;
}

// y = f * (a * I + b * x + c * y), for a batch of matrices; f is inverse^power.
__device__ void combine(const params::MuonCombine& p) {
  uint32_t size = p.size, square = size * size;
  auto* x = static_cast<const __nv_bfloat16*>(p.x);
  auto* y = static_cast<__nv_bfloat16*>(p.y);
  each<V16>(p.len, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    float from[N], to[N] = {};
    elements::load_floats(x + at, from);
    if (p.c != 0.0f) elements::load_floats(y + at, to);
    int64_t matrix = at / square;
    // Elements of the diagonal are size + 1 apart.
    uint32_t element = uint32_t(at - matrix * square), after = element % (size + 1);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float sum = p.b * from[i] + p.c * to[i] + (after == 0 ? p.a : 0.0f);
      if (p.power > 0) {
        // Does not square `inverse`: the square may overflow although the result does not. An inverse of 0 gives
        // zeros.
        float inverse = p.inverse[matrix];
        sum = inverse == 0.0f ? 0.0f : sum * inverse;
        if (p.power > 1) sum *= inverse;
      }
      to[i] = sum;
      if (++after > size) after = 0;
      if (++element == square) element = 0, after = 0, ++matrix;
    }
    elements::store_floats(y + at, to);
  });
}

// One thread block per row: computes the row's mean square, and updates its running mean square.
__device__ void row_squares(const params::MuonRows& p) {
  auto* x = static_cast<const __nv_bfloat16*>(p.x) + int64_t(blockIdx.x) * p.columns;
  float sum = 0.0f;
  for (int column = threadIdx.x; column < p.columns; column += THREADS) {
    float value = __bfloat162float(x[column]);
    sum += value * value;
  }
  sum = block_sum(sum) / p.columns;
  if (threadIdx.x != 0) return;
  p.factors[blockIdx.x] = sum;
  float* mean = p.mean_squares + blockIdx.x;
  if (isfinite(*p.sum_of_squares)) *mean = p.beta * *mean + (1.0f - p.beta) * sum;
}

// One thread block per matrix: computes one factor per row. Multiplying the rows by the factors does not change the
// matrix's sum of squares.
__device__ void row_factors(const params::MuonRows& p) {
  float* factors = p.factors + int64_t(blockIdx.x) * p.rows;
  const float* mean = p.mean_squares + int64_t(blockIdx.x) * p.rows;
  constexpr float SMALLEST = 1e-20f;
  float before = 0.0f, after = 0.0f;
  for (int row = threadIdx.x; row < p.rows; row += THREADS) {
    before += factors[row];
    after += factors[row] / fmaxf(mean[row], SMALLEST);
  }
  before = block_sum(before);
  after = block_sum(after);
  float size = after > 0.0f ? before / after : 0.0f;
  for (int row = threadIdx.x; row < p.rows; row += THREADS) factors[row] = sqrtf(size / fmaxf(mean[row], SMALLEST));
}

// One thread block per row.
__device__ void scale_rows(const params::MuonRows& p) {
  auto* x = static_cast<__nv_bfloat16*>(p.x) + int64_t(blockIdx.x) * p.columns;
  float factor = p.factors[blockIdx.x];
  for (int column = threadIdx.x; column < p.columns; column += THREADS)
    x[column] = __float2bfloat16(__bfloat162float(x[column]) * factor);
}

// w = keep * w - rate * direction. If the gradient's norm is not finite, w is not changed.
__device__ void apply(const params::MuonApply& p) {
  if (!isfinite(*p.sum_of_squares)) return;
  auto* direction = static_cast<const __nv_bfloat16*>(p.direction);
  each<V>(p.len, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    float w[N], d[N];
    elements::load_floats(p.weights + at, w);
    elements::load_floats(direction + at, d);
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = p.keep * w[i] - p.rate * d[i];
    elements::store_floats(p.weights + at, w);
    if (p.copy_type == elements::BF16) elements::store_floats(static_cast<__nv_bfloat16*>(p.copy) + at, w);
    if (p.copy_type == elements::F16) elements::store_floats(static_cast<__half*>(p.copy) + at, w);
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS) muon_momentum(const __grid_constant__ params::MuonMomentum p) { momentum(p); }
extern "C" __global__ void __launch_bounds__(THREADS) muon_trace(const __grid_constant__ params::MuonTrace p) { trace(p); }
extern "C" __global__ void __launch_bounds__(THREADS) muon_combine(const __grid_constant__ params::MuonCombine p) { combine(p); }
extern "C" __global__ void __launch_bounds__(THREADS) muon_row_squares(const __grid_constant__ params::MuonRows p) { row_squares(p); }
extern "C" __global__ void __launch_bounds__(THREADS) muon_row_factors(const __grid_constant__ params::MuonRows p) { row_factors(p); }
extern "C" __global__ void __launch_bounds__(THREADS) muon_scale_rows(const __grid_constant__ params::MuonRows p) { scale_rows(p); }
extern "C" __global__ void __launch_bounds__(THREADS) muon_apply(const __grid_constant__ params::MuonApply p) { apply(p); }
