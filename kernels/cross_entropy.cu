// Cross-entropy of rows of logits. The forward reads each row once. If it also replaces the logits by their gradient,
// it reads the row a second time, from the cache.
#include <math_constants.h>
#include <sage/elements/group.cuh>
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>
#include <sage/quant/fp8_tile.cuh>

using namespace sage;
using elements::Group;
using elements::Pack;

namespace {

constexpr int MAX_THREADS = 512;
static_assert(MAX_THREADS >= elements::ROW_THREADS);
constexpr int SCALE_THREADS = 256;
constexpr int BATCH = 4;  // loads in flight per lane
using ptx::LOG2_E;

// Calls body(packs, at, valid) for a lane's packs of a row, BATCH at a time. at(b) is the first class of pack b;
// valid(b) says whether pack b is inside the row.
template <class T, int V, class Body>
__device__ __forceinline__ void each_pack(const T* row, int classes, const Group& group, Body body) {
  int step = group.lanes * V;
  for (int first = group.lane * V; first < classes; first += BATCH * step) {
    Pack<T, V> packs[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
      if (b * step < classes - first) packs[b] = Pack<T, V>::load(row + first + b * step);
    body(packs, [&](int b) { return first + b * step; }, [&](int b) { return b * step < classes - first; });
  }
}

// The largest logit so far, and the sum of exponentials relative to this logit. While the maximum is minus infinity, as
// for masked classes, the exponentials are relative to 0, because the difference of two infinities is NaN.
struct Sum {
  float max = -INFINITY, sum = 0.0f;

  static __device__ __forceinline__ float base(float max) { return max == -INFINITY ? 0.0f : max; }
  __device__ __forceinline__ void raise(float to) {
    sum *= ptx::exp2((max - base(to)) * LOG2_E);
    max = to;
  }
};

template <class T, int V>
__device__ __forceinline__ float log_sum_exp(const T* row, int classes, const Group& group) {
  Sum own;
  each_pack<T, V>(row, classes, group, [&](const Pack<T, V>(&packs)[BATCH], auto, auto valid) {
    float x[BATCH][V], max = own.max;
#pragma unroll
    for (int i = 0; i < BATCH * V; ++i) {
      x[i / V][i % V] = valid(i / V) ? packs[i / V][i % V] : -INFINITY;
      max = fmaxf(max, x[i / V][i % V]);
    }
    own.raise(max);
    float base = Sum::base(max);
#pragma unroll
    for (int i = 0; i < BATCH * V; ++i) own.sum += ptx::exp2((x[i / V][i % V] - base) * LOG2_E);
  });
  own.raise(group.max(own.max));
  return own.max + logf(group.sum(own.sum));
}

// to = factor * ((1 + 2 * z_loss * lse) * softmax(from) - onehot(target)). Each lane writes only the elements that it
// reads itself, so that `to` may be `from`.
template <class T, int V>
__device__ __forceinline__ void to_gradient(const T* from, T* to, int classes, float lse, uint32_t target, float factor,
                                            float z_loss, const Group& group) {
  float raised = factor * fmaf(2.0f * z_loss, lse, 1.0f);
  each_pack<T, V>(from, classes, group, [&](const Pack<T, V>(&packs)[BATCH], auto at, auto valid) {
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      if (!valid(b)) break;
      float x[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        x[i] = raised * ptx::exp2((packs[b][i] - lse) * LOG2_E);
        if (uint32_t(at(b) + i) == target) x[i] -= factor;
      }
      Pack<T, V>::of(x).store(to + at(b));
    }
  });
}

template <class T, int V>
__device__ __forceinline__ void fill_zeros(T* row, int classes, const Group& group) {
  const float zeros[V] = {};
  for (int at = group.lane * V; at < classes; at += group.lanes * V) Pack<T, V>::of(zeros).store(row + at);
}

// Computes the losses. With GRADIENT it also writes the gradient of the sum of the losses, which may overwrite the
// logits; otherwise it writes the log-sum-exp.
template <class T, int V, bool GRADIENT>
__device__ void forward(const params::CrossEntropy& p) {
  Group group(p.lanes);
  int64_t row = int64_t(blockIdx.x) * group.count + group.index;
  if (row >= p.rows) return;
  const T* logits = static_cast<const T*>(p.logits) + row * p.classes;
  T* gradient = static_cast<T*>(p.gradient) + row * p.classes;
  uint32_t target = p.targets[row];
  if (target == params::NO_PLACE) {
    if (group.lane == 0) p.losses[row] = 0.0f;
    if constexpr (GRADIENT) fill_zeros<T, V>(gradient, p.classes, group);
    return;
  }
  float picked = ptx::to_float(logits[target]);
  float lse = log_sum_exp<T, V>(logits, p.classes, group);
  if (group.lane == 0) p.losses[row] = lse - picked + p.z_loss * lse * lse;
  if constexpr (GRADIENT) {
    group.sync();
    to_gradient<T, V>(logits, gradient, p.classes, lse, target, 1.0f, p.z_loss, group);
  } else {
    if (group.lane == 0) p.lse[row] = lse;
  }
}

template <class T, int V>
__device__ void backward(const params::CrossEntropy& p) {
  Group group(p.lanes);
  int64_t row = int64_t(blockIdx.x) * group.count + group.index;
  if (row >= p.rows) return;
  T* gradient = static_cast<T*>(p.gradient) + row * p.classes;
  uint32_t target = p.targets[row];
  if (target == params::NO_PLACE) {
    fill_zeros<T, V>(gradient, p.classes, group);
    return;
  }
  const T* logits = static_cast<const T*>(p.logits) + row * p.classes;
  to_gradient<T, V>(logits, gradient, p.classes, p.lse[row], target, *p.dloss / float(p.status[1]),
                    p.z_loss, group);
}

// Like `backward`, but writes FP8. Each thread block quantizes one tile.
template <class T>
__device__ void quantize_gradient(const params::Fp8CrossEntropy& p) {
  constexpr int V = quant::Fp8Tile::V;
  quant::quantize_tile(p.codes, p.scale, {0, p.codes.columns}, [&](int row, int column, float (&x)[V]) {
    uint32_t target = p.of.targets[row];
    float lse = p.of.lse[row], raised = p.factor * fmaf(2.0f * p.of.z_loss, lse, 1.0f);
    elements::load_floats(static_cast<const T*>(p.of.logits) + int64_t(row) * p.of.classes + column, x);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      x[i] = target == params::NO_PLACE ? 0.0f : raised * ptx::exp2((x[i] - lse) * LOG2_E);
      if (uint32_t(column + i) == target) x[i] -= p.factor;
    }
  });
}

// Runs as one thread block. Computes the mean loss over the rows whose target is not NO_PLACE. It sums in f64, in a
// fixed order.
__device__ void mean(const params::CrossEntropy& p) {
  __shared__ double sums[MAX_THREADS];
  double sum = 0.0;
#pragma unroll 8
  for (int row = threadIdx.x; row < p.rows; row += MAX_THREADS) sum += double(p.losses[row]);
  sums[threadIdx.x] = sum;
  for (int half = MAX_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  // An invalid target makes the loss NaN.
  double bad = p.status[0] ? CUDART_NAN : 0.0;
  if (threadIdx.x == 0) *static_cast<float*>(p.gradient) = float(sums[0] / double(p.status[1]) + bad);
}

template <class From, class To, int V>
__device__ void scale(const params::Scale& p) {
  float factor = p.dloss ? *p.dloss / float(p.status[1]) : 1.0f;
  elements::each_pack<V>(p.len, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    float from[N], out[N] = {};
    elements::load_floats(static_cast<const From*>(p.from) + at, from);
    if (p.accumulate) elements::load_floats(static_cast<To*>(p.out) + at, out);
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = fmaf(from[i], factor, out[i]);
    elements::store_floats(static_cast<To*>(p.out) + at, out);
  });
}

}  // namespace

#define ROWS(name, T, V)                                                                                          \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                       \
      cross_entropy_fwd_##name(const __grid_constant__ params::CrossEntropy p) { forward<T, V, false>(p); }       \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                       \
      cross_entropy_bwd_##name(const __grid_constant__ params::CrossEntropy p) { backward<T, V>(p); }             \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                       \
      cross_entropy_in_place_##name(const __grid_constant__ params::CrossEntropy p) { forward<T, V, true>(p); }

SAGE_FLOAT_KERNELS(ROWS)

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) mean_loss(const __grid_constant__ params::CrossEntropy p) {
  mean(p);
}

#define FP8_KERNEL(name, T)                                                 \
  extern "C" __global__ void __launch_bounds__(quant::Fp8Tile::THREADS)     \
      cross_entropy_fp8_##name(const __grid_constant__ params::Fp8CrossEntropy p) { quantize_gradient<T>(p); }

FP8_KERNEL(f32, float)
FP8_KERNEL(f16, __half)
FP8_KERNEL(bf16, __nv_bfloat16)

// Scale kernels: from each 16-bit type to the same type and to f32 (in which gradients are accumulated), and from f32
// to each 16-bit type and to f32.
#define SCALE(name, From, To, V)                          \
  extern "C" __global__ void __launch_bounds__(SCALE_THREADS) \
      scale_##name(const __grid_constant__ params::Scale p) { scale<From, To, V>(p); }
#define SCALES(type, T)                                     \
  SCALE(type##_to_##type##_vector, T, T, 16 / sizeof(T))    \
  SCALE(type##_to_##type##_single, T, T, 1)                 \
  SCALE(type##_to_f32_vector, T, float, 16 / sizeof(T))     \
  SCALE(type##_to_f32_single, T, float, 1)                  \
  SCALE(f32_to_##type##_vector, float, T, 16 / sizeof(T))

SCALES(f16, __half)
SCALES(bf16, __nv_bfloat16)
SCALE(f32_to_f32_vector, float, float, 4)
SCALE(f32_to_f32_single, float, float, 1)
