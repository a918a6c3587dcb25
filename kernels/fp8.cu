// Quantization to FP8: the largest absolute value of a matrix, and its codes, row by row and transposed.
#include <cuda_fp8.h>

#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;

namespace {

constexpr int THREADS = 256;
constexpr int V = 8;  // elements that a thread loads at once

// A block's tile. A thread takes LINES rows of V neighbours, so that LINES codes of a column are a word.
constexpr int LINES = 4, COLUMNS = 64, ROWS = 128;
static_assert(THREADS == COLUMNS / V * ROWS / LINES && ROWS == 32 * LINES, "a warp writes a column of the tile, a word a lane");

// The bits of |x|, whose order is that of the values, with NaN above infinity.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

template <class T>
__device__ void largest(const params::Fp8Quantize& p) {
  uint32_t own = 0;
  int64_t packs = int64_t(p.rows) * p.columns / V, stride = int64_t(gridDim.x) * THREADS;
  for (int64_t pack = int64_t(blockIdx.x) * THREADS + threadIdx.x; pack < packs; pack += stride) {
    float x[V];
    elements::load_floats(static_cast<const T*>(p.x) + pack * V, x);
#pragma unroll
    for (int i = 0; i < V; ++i) own = max(own, magnitude(x[i]));
  }
  own = __reduce_max_sync(~0u, own);
  if (threadIdx.x % 32 == 0 && own) atomicMax(p.largest, own);
}

// The least power of two by which divided `largest` does not saturate: `Fp8Format::scale` of candle-sage/src/fp8.rs.
__device__ __forceinline__ float scale_of(uint32_t largest, int e5m2) {
  if (largest == 0 || largest >= 0x7f800000u) return 1.0f;
  int exponent = int(largest >> 23) - 127 - (e5m2 ? 15 : 8);
  exponent += (largest & 0x7fffffu) > 0x600000u;
  return __uint_as_float(uint32_t(min(max(exponent, -126), 126) + 127) << 23);
}

// Two codes, of `low` in the low byte. NaN becomes 0x7f, and values beyond the largest saturate.
__device__ __forceinline__ uint32_t codes_of(float low, float high, int e5m2) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3);
}

template <class T>
__device__ void quantize(const params::Fp8Quantize& p) {
  __shared__ uint32_t turned[COLUMNS][ROWS / LINES + 1];
  float scale = scale_of(*p.largest, p.e5m2), inverse = 1.0f / scale;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.scale = scale;
  int in_row = threadIdx.x % (COLUMNS / V), line = threadIdx.x / (COLUMNS / V);
  int first_row = blockIdx.x * ROWS, first_column = blockIdx.y * COLUMNS;
  int row = first_row + line * LINES, column = first_column + in_row * V;
  // Dimensions are multiples of 16: a thread's rows and columns are all inside, or none is.
  bool inside = row < p.rows && column < p.columns;
  uint32_t codes[LINES][V / 4] = {};
  if (inside) {
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      int64_t at = int64_t(row + i) * p.columns + column;
      float x[V];
      elements::load_floats(static_cast<const T*>(p.x) + at, x);
#pragma unroll
      for (int j = 0; j < V / 4; ++j) {
        uint32_t low = codes_of(x[4 * j] * inverse, x[4 * j + 1] * inverse, p.e5m2);
        uint32_t high = codes_of(x[4 * j + 2] * inverse, x[4 * j + 3] * inverse, p.e5m2);
        codes[i][j] = low | high << 16;
      }
      if (p.row_codes) *reinterpret_cast<uint2*>(p.row_codes + at) = make_uint2(codes[i][0], codes[i][1]);
    }
  }
  if (!p.column_codes) return;
#pragma unroll
  for (int j = 0; j < V / 4; ++j) {
    // The transpose of 4 x 4 bytes.
    uint32_t a = __byte_perm(codes[0][j], codes[1][j], 0x5140), b = __byte_perm(codes[2][j], codes[3][j], 0x5140);
    uint32_t c = __byte_perm(codes[0][j], codes[1][j], 0x7362), d = __byte_perm(codes[2][j], codes[3][j], 0x7362);
    uint32_t* to = &turned[in_row * V + 4 * j][line];
    constexpr int PITCH = ROWS / LINES + 1;
    to[0] = __byte_perm(a, b, 0x5410);
    to[PITCH] = __byte_perm(a, b, 0x7632);
    to[2 * PITCH] = __byte_perm(c, d, 0x5410);
    to[3 * PITCH] = __byte_perm(c, d, 0x7632);
  }
  __syncthreads();
  int lane = threadIdx.x % 32;
  row = first_row + lane * LINES;
  for (int c = threadIdx.x / 32; c < COLUMNS; c += THREADS / 32) {
    column = first_column + c;
    if (row < p.rows && column < p.columns)
      *reinterpret_cast<uint32_t*>(p.column_codes + int64_t(column) * p.rows + row) = turned[c][lane];
  }
}

}  // namespace

#define KERNELS(name, T)                                                                                  \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                   \
      fp8_largest_##name(const __grid_constant__ params::Fp8Quantize p) { largest<T>(p); }                \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                   \
      fp8_quantize_##name(const __grid_constant__ params::Fp8Quantize p) { quantize<T>(p); }

KERNELS(f32, float)
KERNELS(f16, __half)
KERNELS(bf16, __nv_bfloat16)
