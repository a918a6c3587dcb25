// Attn-QAT's operands (arXiv 2603.00040): Q, K and V rounded to NVFP4 values and stored in 16 bit, which represents
// these values exactly.
#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/quant/codes.cuh>
#include <sage/quant/nvfp4.cuh>

using namespace sage;
using attention::Rows;
using attention::Segment;
using attention::segment_of_tile;
using attention::TILE;

namespace {

// Values per thread: two rows of eight channels keep enough loads in flight to saturate the memory bandwidth, and need
// few registers.
constexpr int VALUES = 16;
template <int D>
constexpr int THREADS = TILE * D / VALUES;

// Threads per multiprocessor, for __launch_bounds__: all 2048 on Hopper, where 32 registers per thread suffice. On
// other GPUs 32 registers would cause spills.
#if __CUDA_ARCH__ == 900
constexpr int AT_ONCE = 2048;
#else
constexpr int AT_ONCE = 1024;
#endif

// The rows and channels of a tile of 64 tokens that a thread processes: ROWS rows of eight neighbouring channels. By
// default neighbouring threads have neighbouring channels of a token. With BY_GROUP, for groups along the tokens, a
// warp has 16 tokens of 32 channels, so that no group crosses a warp.
template <int D, bool BY_GROUP>
struct Place {
  static constexpr int ROWS = 2, CHUNKS = BY_GROUP ? 4 : D / 8, STEP = (BY_GROUP ? 32 : THREADS<D>) / CHUNKS;
  static_assert(ROWS * STEP == (BY_GROUP ? quant::NVFP4_GROUP : TILE));
  int first_row, column;
  __device__ __forceinline__ Place() {
    constexpr int STRIPS = D / 32;
    int thread = BY_GROUP ? threadIdx.x % 32 : threadIdx.x, warp = threadIdx.x / 32;
    first_row = thread / CHUNKS + (BY_GROUP ? warp / STRIPS * quant::NVFP4_GROUP : 0);
    column = thread % CHUNKS * 8 + (BY_GROUP ? warp % STRIPS * 32 : 0);
  }
  __device__ __forceinline__ int row(int i) const { return first_row + i * STEP; }
};

// The next two functions quantize the values times `factor`, a power of two, and divide the results by `factor`.
//
// Quantizes groups of 16 channels: a thread has eight of the channels, and the neighbouring lane has the other eight.
template <int ROWS>
__device__ __forceinline__ void quantize_along_channels(float (&x)[ROWS][8], float factor) {
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    uint32_t largest = 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) largest = max(largest, quant::abs_bits(x[i][c]));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    quant::Nvfp4Scale scale = quant::nvfp4_scale_of(__uint_as_float(largest), factor);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[i][c] = quant::e2m1(x[i][c] * scale.quant) * scale.dequant;
  }
}

// Quantizes groups of 16 tokens. Threads of a warp whose lanes differ by a multiple of CHUNKS have the same channels.
// Together these threads have all tokens of a group.
template <int CHUNKS, int ROWS>
__device__ __forceinline__ void quantize_along_tokens(float (&x)[ROWS][8], float factor) {
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) largest = max(largest, quant::abs_bits(x[i][c]));
#pragma unroll
    for (int lanes = CHUNKS; lanes < 32; lanes *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lanes));
    quant::Nvfp4Scale scale = quant::nvfp4_scale_of(__uint_as_float(largest), factor);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) x[i][c] = quant::e2m1(x[i][c] * scale.quant) * scale.dequant;
  }
}

// Subtracts `mean` (one value per channel), unless it is null, from the tile that starts at token `first`. With
// `quantize`, rounds the result to NVFP4 values.
template <class T, int D, bool BY_GROUP>
__device__ __forceinline__ void round_tile(const Rows<T>& from, const Rows<T>& to, int first, const float* mean, float factor,
                                           bool quantize) {
  using At = Place<D, BY_GROUP>;
  At at;
  uint4 words[At::ROWS];
  float x[At::ROWS][8];
#pragma unroll
  for (int i = 0; i < At::ROWS; ++i) words[i] = from.load_8(first + at.row(i), at.column);
#pragma unroll
  for (int i = 0; i < At::ROWS; ++i)
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      x[i][c] = ptx::to_float(reinterpret_cast<const T*>(&words[i])[c]);
      if (mean && first + at.row(i) < from.count) x[i][c] = __fsub_rn(x[i][c], mean[at.column + c]);
    }
  if (quantize) {
    if constexpr (BY_GROUP) quantize_along_tokens<At::CHUNKS>(x, factor);
    else quantize_along_channels(x, factor);
  }
#pragma unroll
  for (int i = 0; i < At::ROWS; ++i)
    to.store_8(first + at.row(i), at.column, attention::pack_8<T>(x[i]));
}

// Each thread block rounds a tile of 64 tokens of one head. The first thread blocks have K's tiles, the next Q's, the
// last V's. Neighbouring thread blocks have neighbouring heads.
template <class T, int D>
__device__ void fake_quantize(const params::FakeQuantize& p) {
  const params::Shape& shape = p.shape;
  int queries = shape.query_tiles * shape.query_heads, keys = shape.key_tiles * shape.key_heads;
  int index = blockIdx.x;
  bool query = index >= keys && index < keys + queries, value = index >= keys + queries;
  index -= value ? keys + queries : query ? keys : 0;
  int heads = query ? shape.query_heads : shape.key_heads, head = index % heads, tile = index / heads;
  int number = query ? segment_of_tile<true>(shape, tile) : segment_of_tile<false>(shape, tile);
  Segment segment(shape, number);
  int start = query ? segment.query_start : segment.key_start, count = query ? segment.query_len : segment.key_len;
  int first = (tile - (query ? segment.query_tile : segment.key_tile)) * TILE;
  const params::View &from = query ? p.q : value ? p.v : p.k, &to = query ? p.q_to : value ? p.v_to : p.k_to;

  Rows<T> source(from, segment.batch, start, head, count, shape.head_dim);
  Rows<T> target(to, segment.batch, start, head, count, shape.head_dim);
  bool smooth = value ? p.smooth_values : !query && p.k_mean;
  const float* mean = smooth ? p.k_mean + (int64_t(value ? shape.key_heads + head : head) * shape.segment_count + number) * D : nullptr;
  float factor = value && p.value_max ? quant::nvfp4_head_factor(p.value_max[head * shape.segment_count + number]) : 1.0f;
  if (value && p.value_tokens) round_tile<T, D, true>(source, target, first, mean, factor, p.quantize);
  else round_tile<T, D, false>(source, target, first, mean, factor, p.quantize);
}

// Each thread block raises `value_max`, zeroed before the launch, to the largest |V| of a tile of one head.
template <class T, int D>
__device__ void value_maxima(const params::FakeQuantize& p) {
  using At = Place<D, false>;
  const params::Shape& shape = p.shape;
  int head = blockIdx.x % shape.key_heads, tile = blockIdx.x / shape.key_heads;
  int number = segment_of_tile<false>(shape, tile);
  Segment segment(shape, number);
  Rows<T> rows(p.v, segment.batch, segment.key_start, head, segment.key_len, shape.head_dim);
  __shared__ uint32_t of_block;
  if (threadIdx.x == 0) of_block = 0;
  __syncthreads();
  At at;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < At::ROWS; ++i) {
    uint4 words = rows.load_8((tile - segment.key_tile) * TILE + at.row(i), at.column);
#pragma unroll
    for (int c = 0; c < 8; ++c) largest = max(largest, quant::abs_bits(ptx::to_float(reinterpret_cast<const T*>(&words)[c])));
  }
  largest = __reduce_max_sync(~0u, largest);
  if (threadIdx.x % 32 == 0) atomicMax(&of_block, largest);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(&p.value_max[head * shape.segment_count + number], of_block);
}

}  // namespace

#define KERNEL(type, T, D)                                                         \
  extern "C" __global__ void __launch_bounds__(THREADS<D>, AT_ONCE / THREADS<D>)   \
      fake_quantize_##type##_##D(const __grid_constant__ params::FakeQuantize p) { \
    fake_quantize<T, D>(p);                                                        \
  }                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS<D>)                         \
      value_maxima_##type##_##D(const __grid_constant__ params::FakeQuantize p) {  \
    value_maxima<T, D>(p);                                                         \
  }
KERNEL(bf16, __nv_bfloat16, 64)
KERNEL(bf16, __nv_bfloat16, 128)
KERNEL(f16, __half, 64)
KERNEL(f16, __half, 128)
