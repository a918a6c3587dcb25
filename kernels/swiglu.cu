// y = silu(gate) o up, element by element. Each thread takes one pack: the threads of a full GPU then have enough loads in
// flight. Gate and up may lie side by side in one tensor, and so may their gradients.
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;
using elements::Pack;

namespace {

constexpr int THREADS = 256;

// Where the exponential overflows the result is 0, and so is its product with a finite x.
__device__ __forceinline__ float sigmoid(float x) { return ptx::reciprocal(1.0f + ptx::exp2(-x * ptx::LOG2_E)); }

// The row and column of element `at`, counted as if rows had no gaps.
template <class T>
struct Place {
  int64_t row, column;

  __device__ __forceinline__ Place(const params::SwiGlu& p, int64_t at) : row(at / p.columns), column(at - row * p.columns) {}

  __device__ __forceinline__ const T* in(const void* data, int64_t stride) const {
    return static_cast<const T*>(data) + row * stride + column;
  }
  __device__ __forceinline__ T* in(void* data, int64_t stride) const { return static_cast<T*>(data) + row * stride + column; }
};

template <class T, int V>
__device__ void forward(const params::SwiGlu& p) {
  elements::each_pack<V>(p.len, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    Place<T> place(p, at);
    auto gate = Pack<T, N>::load(place.in(p.gate, p.gate_row));
    auto up = Pack<T, N>::load(place.in(p.up, p.up_row));
    float y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) y[i] = gate[i] * sigmoid(gate[i]) * up[i];
    Pack<T, N>::of(y).store(place.in(p.out, p.out_row));
  });
}

template <class T, int V>
__device__ void backward(const params::SwiGlu& p) {
  elements::each_pack<V>(p.len, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    Place<T> place(p, at);
    auto gate = Pack<T, N>::load(place.in(p.gate, p.gate_row));
    auto up = Pack<T, N>::load(place.in(p.up, p.up_row));
    auto dy = Pack<T, N>::load(static_cast<const T*>(p.dy) + at);
    float dgate[N], dup[N], y[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float g = gate[i], s = sigmoid(g);
      dup[i] = dy[i] * g * s;
      y[i] = g * s * up[i];
      dgate[i] = dy[i] * up[i] * s * (1.0f + g * (1.0f - s));
    }
    Pack<T, N>::of(dgate).store(place.in(p.out, p.out_row));
    Pack<T, N>::of(dup).store(place.in(p.dup, p.out_row));
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
