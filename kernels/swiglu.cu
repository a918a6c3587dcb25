// y = silu(gate) o up, element by element; the threads of a full GPU have enough loads in flight, one pack each.
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;
using elements::Pack;

namespace {

constexpr int THREADS = 256;

// 0 where the exponential is infinite, and so is the product with x.
__device__ __forceinline__ float sigmoid(float x) { return ptx::reciprocal(1.0f + ptx::exp2(-x * ptx::LOG2_E)); }

template <class T, int V>
__device__ void forward(const params::SwiGlu& p) {
  elements::each_pack<V>(p.len, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    auto gate = Pack<T, N>::load(static_cast<const T*>(p.gate) + at);
    auto up = Pack<T, N>::load(static_cast<const T*>(p.up) + at);
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = gate[i] * sigmoid(gate[i]) * up[i];
    Pack<T, N>::of(y).store(static_cast<T*>(p.out) + at);
  });
}

template <class T, int V>
__device__ void backward(const params::SwiGlu& p) {
  elements::each_pack<V>(p.len, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    auto gate = Pack<T, N>::load(static_cast<const T*>(p.gate) + at);
    auto up = Pack<T, N>::load(static_cast<const T*>(p.up) + at);
    auto dy = Pack<T, N>::load(static_cast<const T*>(p.dy) + at);
    float dgate[N], dup[N], y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float g = gate[i], s = sigmoid(g);
      dup[i] = dy[i] * g * s;
      y[i] = g * s * up[i];
      dgate[i] = dy[i] * up[i] * s * (1.0f + g * (1.0f - s));
    }
    Pack<T, N>::of(dgate).store(static_cast<T*>(p.out) + at);
    Pack<T, N>::of(dup).store(static_cast<T*>(p.dup) + at);
    if (p.y) Pack<T, N>::of(y).store(static_cast<T*>(p.y) + at);
  });
}

}  // namespace

#define KERNELS(name, T, V)                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                  \
      swiglu_fwd_##name(const __grid_constant__ params::SwiGlu p) { forward<T, V>(p); }                  \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                  \
      swiglu_bwd_##name(const __grid_constant__ params::SwiGlu p) { backward<T, V>(p); }

SAGE_FLOAT_KERNELS(KERNELS)
