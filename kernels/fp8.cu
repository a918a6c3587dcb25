// FP8 quantization: quantizes a matrix, finds its largest absolute value, transposes FP8 values, and computes scales.
#include <sage/elements/pack.cuh>
#include <sage/quant/fp8_tile.cuh>

using namespace sage;
using quant::Fp8Tile;

namespace {

constexpr int THREADS = Fp8Tile::THREADS, V = Fp8Tile::V;

template <class T>
__device__ void largest(const params::Fp8Quantize& p) {
  uint32_t own = 0;
  int64_t packs = int64_t(p.codes.rows) * p.columns / V, stride = int64_t(gridDim.x) * THREADS;
  for (int64_t pack = int64_t(blockIdx.x) * THREADS + threadIdx.x; pack < packs; pack += stride) {
    float x[V];
    elements::load_floats(static_cast<const T*>(p.x) + pack * V, x);
#pragma unroll
    for (int i = 0; i < V; ++i) own = max(own, quant::magnitude(x[i]));
  }
  own = __reduce_max_sync(~0u, own);
  if (threadIdx.x % 32 == 0 && own) atomicMax(p.codes.largest, own);
}

template <class T>
__device__ void quantize_matrix(const params::Fp8Quantize& p) {
  quant::quantize_tile(p.codes, *p.codes.scale, {p.first_column, p.columns}, [&](int row, int column, float (&x)[V]) {
    elements::load_floats(static_cast<const T*>(p.x) + int64_t(row) * p.columns + column, x);
  });
}

// Writes the transpose of the FP8 values `x`, and copies their scale.
__device__ void transpose_codes(const params::Fp8Quantize& p) {
  __shared__ Fp8Tile tile;
  int first_row = blockIdx.x * Fp8Tile::ROWS, first_column = blockIdx.y * Fp8Tile::COLUMNS;
  int row = first_row + Fp8Tile::row(), column = first_column + Fp8Tile::column();
  quant::Fp8Codes codes(p.codes);
  if (row < p.codes.rows && column < p.columns) {
    const uint8_t* x = static_cast<const uint8_t*>(p.x) + int64_t(row) * p.columns + column;
#pragma unroll
    for (int i = 0; i < Fp8Tile::LINES; ++i) codes.words[i] = *reinterpret_cast<const uint2*>(x + int64_t(i) * p.columns);
  }
  codes.store(p.codes, tile, first_row, first_column, p.columns);
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) *p.codes.used = codes.scale;
}

// Computes the scales of `count` matrices. With running maxima, running = max(largest since the last call, decay *
// running), and the scale is fp8_scale(margin * running). Without running maxima, the scale is fp8_scale(largest).
__device__ void rescale(const params::Fp8Rescale& p) {
  int n = blockIdx.x * THREADS + threadIdx.x;
  if (n >= p.count) return;
  int e5m2 = p.formats ? p.formats[n] != 0.0f : p.e5m2;
  uint32_t largest = p.largest[n];
  if (!p.running) {
    p.scale[n] = quant::fp8_scale(largest, e5m2);
    return;
  }
  // A maximum that is not finite is ignored.
  float seen = largest < 0x7f800000u ? __uint_as_float(largest) : 0.0f;
  float running = fmaxf(seen, p.running[n] * p.decay);
  p.running[n] = running;
  p.scale[n] = quant::fp8_scale(__float_as_uint(fminf(running, 1e37f) * p.margin), e5m2);
  p.largest[n] = 0;
}

}  // namespace

#define KERNELS(name, T)                                                                                          \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                           \
      fp8_largest_##name(const __grid_constant__ params::Fp8Quantize p) { largest<T>(p); }                        \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                           \
      fp8_quantize_##name(const __grid_constant__ params::Fp8Quantize p) { quantize_matrix<T>(p); }

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)

extern "C" __global__ void __launch_bounds__(THREADS) fp8_transpose(const __grid_constant__ params::Fp8Quantize p) { transpose_codes(p); }
extern "C" __global__ void __launch_bounds__(THREADS) fp8_rescale(const __grid_constant__ params::Fp8Rescale p) { rescale(p); }
