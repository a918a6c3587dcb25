// y = silu(gate) o up, elementwise. Each thread processes one pack: at full occupancy this is enough loads in flight.
// Gate and up may be adjacent in one tensor, and so may their gradients.
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>
#include <sage/quant/fp8_tile.cuh>

using namespace sage;
using elements::Pack;

namespace {

constexpr int THREADS = 256;

// If the exponential overflows, the result is 0, and its product with a finite x is 0 too.
__device__ __forceinline__ float sigmoid(float x) { return ptx::reciprocal(1.0f + ptx::exp2(-x * ptx::LOG2_E)); }

// The row and column of element `at`. Rows may have gaps between them in memory; `at` does not count the gaps.
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

using quant::Fp8Tile;

// y in FP8. Each thread block quantizes one tile.
template <class T>
__device__ void forward_fp8(const params::Fp8SwiGlu& p) {
  quant::quantize_tile(p.codes, [&](int row, int column, float (&y)[Fp8Tile::V]) {
    float gate[Fp8Tile::V];
    elements::load_floats(static_cast<const T*>(p.of.gate) + row * p.of.gate_row + column, gate);
    elements::load_floats(static_cast<const T*>(p.of.up) + row * p.of.up_row + column, y);
#pragma unroll
    for (int j = 0; j < Fp8Tile::V; ++j) y[j] = gate[j] * sigmoid(gate[j]) * y[j];
  });
}

// Writes dgate and dup in FP8: dup's columns follow dgate's in one matrix. If p.again.column_codes is not null, also
// writes y in FP8, as a separate matrix.
template <class T>
__device__ void backward_fp8(const params::Fp8SwiGlu& p) {
  __shared__ Fp8Tile tile;
  constexpr int N = Fp8Tile::V;
  int columns = p.of.columns, first_row = blockIdx.x * Fp8Tile::ROWS, first_column = blockIdx.y * Fp8Tile::COLUMNS;
  int row = first_row + Fp8Tile::row(), column = first_column + Fp8Tile::column();
  bool is_wanted_again = p.again.column_codes;
  quant::Fp8Codes of_gate(p.codes), of_up(p.codes), of_y(is_wanted_again ? p.again : p.codes);
  if (row < p.codes.rows && column < columns) {
#pragma unroll
    for (int i = 0; i < Fp8Tile::LINES; ++i) {
      float gate[N], up[N], dy[N];
      elements::load_floats(static_cast<const T*>(p.of.gate) + (row + i) * p.of.gate_row + column, gate);
      elements::load_floats(static_cast<const T*>(p.of.up) + (row + i) * p.of.up_row + column, up);
      elements::load_floats(static_cast<const T*>(p.of.dy) + int64_t(row + i) * columns + column, dy);
      float dgate[N], y[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float g = gate[j], s = sigmoid(g);
        dgate[j] = dy[j] * up[j] * s * (1.0f + g * (1.0f - s));
        y[j] = g * s * up[j];
        dy[j] = dy[j] * g * s;
      }
      of_gate.set(i, dgate);
      of_up.set(i, dy);
      if (is_wanted_again) of_y.set(i, y);
    }
  }
  of_gate.store(p.codes, tile, first_row, first_column, columns);
  __syncthreads();
  of_up.store(p.codes, tile, first_row, columns + first_column, 2 * columns);
  of_gate.report(p.codes);
  of_up.report(p.codes);
  if (!is_wanted_again) return;
  __syncthreads();
  of_y.store(p.again, tile, first_row, first_column, columns);
  of_y.report(p.again);
}

}  // namespace

#define FP8_KERNELS(name, T)                                                                                         \
  extern "C" __global__ void __launch_bounds__(Fp8Tile::THREADS)                                                     \
      swiglu_fp8_fwd_##name(const __grid_constant__ params::Fp8SwiGlu p) { forward_fp8<T>(p); }                      \
  extern "C" __global__ void __launch_bounds__(Fp8Tile::THREADS)                                                     \
      swiglu_fp8_bwd_##name(const __grid_constant__ params::Fp8SwiGlu p) { backward_fp8<T>(p); }

FP8_KERNELS(f32, float)
FP8_KERNELS(f16, __half)
FP8_KERNELS(bf16, __nv_bfloat16)

#define KERNELS(name, T, V)                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                  \
      swiglu_fwd_##name(const __grid_constant__ params::SwiGlu p) { forward<T, V>(p); }                  \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                  \
      swiglu_bwd_##name(const __grid_constant__ params::SwiGlu p) { backward<T, V>(p); }

SAGE_FLOAT_KERNELS(KERNELS)
