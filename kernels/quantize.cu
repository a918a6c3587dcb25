// SageBwd's quantization kernels. Before the forward: the means that smoothing subtracts from Q, K and V, and INT8
// values and scales of the three (arXiv 2603.02170, section 3). Before the backward: delta, and transposed INT8 values
// of dO and Q.
#include <math_constants.h>
#include <sage/quant/tile.cuh>

using namespace sage;
using attention::Rows;
using attention::Segment;
using attention::segment_of_tile;
using attention::TILE;

namespace {

// The number of heads that have means: all heads of K and, with smooth_values, of V. Heads from key_heads on are of V.
__device__ __forceinline__ int mean_heads(const params::Forward& p) { return p.shape.key_heads * (1 + p.smooth_values); }

// A segment's rows of one head of K or V, from token `first` on. `head` counts all heads of K, then those of V.
template <class T>
__device__ __forceinline__ Rows<T> rows_of(const params::Forward& p, const Segment& segment, int head, int first) {
  const params::Shape& shape = p.shape;
  bool value = head >= shape.key_heads;
  return Rows<T>(value ? p.v : p.k, segment.batch, segment.key_start + first, value ? head - shape.key_heads : head,
                 segment.key_len - first, value ? shape.value_dim : shape.head_dim);
}

// Sums K and V over the tokens of each tile, in order. The sums have the shape (head, tile, channel). A thread block
// loads a whole tile before it sums. If thread blocks read one token at a time from global memory, all of them would
// access the same memory channels of the DRAM at the same time.
template <class T, int D>
__device__ void sum_tiles(const params::Forward& p) {
  constexpr int CHUNKS = D / 8;
  static_assert(quant::TILE_THREADS >= D && TILE * CHUNKS % quant::TILE_THREADS == 0);
  __shared__ uint4 rows[TILE * CHUNKS];
  const params::Shape& shape = p.shape;
  int heads = mean_heads(p), head = blockIdx.x % heads, tile = blockIdx.x / heads;
  Segment segment(shape, segment_of_tile<false>(shape, tile));
  Rows<T> k = rows_of<T>(p, segment, head, (tile - segment.key_tile) * TILE);
#pragma unroll
  for (int i = 0; i < TILE * CHUNKS; i += quant::TILE_THREADS) {
    int at = i + threadIdx.x;
    rows[at] = k.load_8(at / CHUNKS, at % CHUNKS * 8);
  }
  __syncthreads();
  if (threadIdx.x >= D) return;
  float sum = 0.0f;
#pragma unroll 16
  for (int i = 0; i < TILE; ++i)
    sum = __fadd_rn(sum, ptx::to_float(reinterpret_cast<const T*>(rows)[i * D + threadIdx.x]));
  p.codes.k_tile_sums[(int64_t(head) * shape.key_tiles + tile) * D + threadIdx.x] = sum;
}

// Computes the means of K and V, of shape (head, segment, channel): the tiles' sums, added in order, divided by the
// number of tokens. All threads load sums. One thread per channel then adds them, because the order of additions is
// fixed.
constexpr int MEAN_THREADS = 256;
template <int D>
__device__ void mean_of_tiles(const params::Forward& p) {
  constexpr int AT_ONCE = D > 128 ? 32 : 64;
  static_assert(MEAN_THREADS >= D && AT_ONCE * D / 4 % MEAN_THREADS == 0);
  __shared__ float4 shared[AT_ONCE * D / 4];
  const params::Shape& shape = p.shape;
  Segment segment(shape, blockIdx.x);
  const float* sums = p.codes.k_tile_sums + (int64_t(blockIdx.y) * shape.key_tiles + segment.key_tile) * D;
  float total = 0.0f;
  int tiles = segment.key_tiles();
  for (int first = 0; first < tiles; first += AT_ONCE) {
    int count = min(tiles - first, AT_ONCE);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < AT_ONCE * D / 4; i += MEAN_THREADS) {
      int at = i + threadIdx.x;
      if (at < count * D / 4) shared[at] = reinterpret_cast<const float4*>(sums + int64_t(first) * D)[at];
    }
    __syncthreads();
    const float* channel = reinterpret_cast<const float*>(shared) + threadIdx.x % D;
#pragma unroll 16
    for (int i = 0; i < count; ++i) total = __fadd_rn(total, channel[i * D]);
  }
  if (threadIdx.x < D)
    p.codes.k_mean[(int64_t(blockIdx.y) * shape.segment_count + blockIdx.x) * D + threadIdx.x] =
        __fdiv_rn(total, float(max(segment.key_len, 1)));
}

// Computes the means of K and V, of shape (head, segment, channel), over a sample of each segment: the middle tokens of
// `key_sample` equal intervals, or all tokens of a shorter segment. Tokens are added in order. One thread block per
// segment and head loads the rows into shared memory, 64 at a time.
template <class T, int D>
__device__ void mean_of_sample(const params::Forward& p) {
  constexpr int AT_ONCE = 64, CHUNKS = D / 8;
  static_assert(MEAN_THREADS >= D && AT_ONCE * CHUNKS % MEAN_THREADS == 0);
  __shared__ uint4 rows[AT_ONCE * CHUNKS];
  const params::Shape& shape = p.shape;
  Segment segment(shape, blockIdx.x);
  Rows<T> k = rows_of<T>(p, segment, blockIdx.y, 0);
  int count = min(p.key_sample, segment.key_len);
  float total = 0.0f;
  for (int first = 0; first < count; first += AT_ONCE) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < AT_ONCE * CHUNKS; i += MEAN_THREADS) {
      int at = i + threadIdx.x, token = first + at / CHUNKS;
      if (token < count) rows[at] = k.load_8(int((2 * int64_t(token) + 1) * segment.key_len / (2 * count)), at % CHUNKS * 8);
    }
    __syncthreads();
#pragma unroll 16
    for (int i = 0; i < min(count - first, AT_ONCE); ++i)
      total = __fadd_rn(total, ptx::to_float(reinterpret_cast<const T*>(rows)[i * D + threadIdx.x % D]));
  }
  if (threadIdx.x < D)
    p.codes.k_mean[(int64_t(blockIdx.y) * shape.segment_count + blockIdx.x) * D + threadIdx.x] =
        __fdiv_rn(total, float(max(count, 1)));
}

template <class T, int D>
__device__ void quantize_queries(const params::Forward& p, int tile, int head) {
  const params::Shape& shape = p.shape;
  Segment segment(shape, segment_of_tile<true>(shape, tile));
  int first = (tile - segment.query_tile) * TILE, left = segment.query_len - first;
  Rows<T> q(p.q, segment.batch, segment.query_start, head, segment.query_len, shape.head_dim);
  int64_t at = int64_t(head) * shape.query_tiles + tile;
  quant::Tile<D> values;
  values.load(q, first);
  if (D <= 128 && p.codes.q_mean) {  // above head_dim 128, Q is not smoothed
    __shared__ float mean[D];
    if (threadIdx.x < D) {
      float sum = 0.0f;
      for (int i = 0; i < min(left, TILE) && threadIdx.x < shape.head_dim; ++i)
        sum = __fadd_rn(sum, ptx::to_float(*q.at(first + i, threadIdx.x)));
      mean[threadIdx.x] = __fdiv_rn(sum, float(min(left, TILE)));
      p.codes.q_mean[at * D + threadIdx.x] = mean[threadIdx.x];
    }
    __syncthreads();
    values.subtract(mean, left);
  }
  quant::quantize_tile(values, p.codes.q_dequant_scale + at, [&](int row, int channel) {
    return quant::at_swizzled<D>(p.codes.q + at * TILE * D, row, channel);
  });
}

// Loads a tile of K or, with VALUE, of V. If K (or V) is smoothed, subtracts its mean over the segment's tokens.
template <class T, int D, bool VALUE>
__device__ __forceinline__ void load_smoothed(quant::Tile<D>& values, const params::Forward& p, int tile, int head) {
  const params::Shape& shape = p.shape;
  int index = segment_of_tile<false>(shape, tile), mean_head = VALUE ? shape.key_heads + head : head;
  Segment segment(shape, index);
  int first = (tile - segment.key_tile) * TILE;
  values.load(rows_of<T>(p, segment, mean_head, first), 0);
  if (VALUE ? p.smooth_values != 0 : p.codes.k_mean != nullptr)
    values.subtract(p.codes.k_mean + (int64_t(mean_head) * shape.segment_count + index) * D, segment.key_len - first);
}

template <class T, int D>
__device__ void quantize_keys(const params::Forward& p, int tile, int head) {
  int64_t at = int64_t(head) * p.shape.key_tiles + tile;
  quant::Tile<D> values;
  load_smoothed<T, D, false>(values, p, tile, head);
  quant::quantize_tile(values, p.codes.k_dequant_scale + at, [&](int row, int channel) {
    return quant::at_swizzled<D>(p.codes.k + at * TILE * D, row, channel);
  });
}

template <class T, int D>
__device__ void quantize_values(const params::Forward& p, int tile, int head) {
  constexpr int PITCH = D + 16;  // eight neighbouring rows start in eight different groups of four banks
  __shared__ __align__(16) int8_t codes[TILE * PITCH];
  int64_t at = int64_t(head) * p.shape.key_tiles + tile;
  quant::Tile<D> values;
  load_smoothed<T, D, true>(values, p, tile, head);
  quant::quantize_tile(values, p.codes.v_dequant_scale + at, [&](int row, int channel) { return codes + row * PITCH + channel; });
  __syncthreads();
  quant::store_transposed<D, PITCH>(codes, p.codes.v_transposed + at * TILE * D);
}

// One thread block per (tile, head). The first thread blocks process K, from the last tile to the first, because
// sum_tiles has just read K and the end of K is in the L2 cache. The next ones process Q, then V. Neighbouring thread
// blocks process neighbouring heads of one tile, which are often adjacent in memory.
template <class T, int D>
__device__ void quantize(const params::Forward& p) {
  const params::Shape& shape = p.shape;
  int index = blockIdx.x, queries = shape.query_tiles * shape.query_heads, keys = shape.key_tiles * shape.key_heads;
  if (index < keys) {
    index = keys - 1 - index;
    quantize_keys<T, D>(p, index / shape.key_heads, index % shape.key_heads);
  } else if (index < keys + queries) {
    index -= keys;
    quantize_queries<T, D>(p, index / shape.query_heads, index % shape.query_heads);
  } else {
    index -= keys + queries;
    // At head_dim above 128 only S is an INT8 matmul.
    if constexpr (D <= 128) quantize_values<T, D>(p, index / shape.key_heads, index % shape.key_heads);
  }
}

// Runs before a backward, one thread block per (query tile, head): delta = rowsum(dO o O). With QUANTIZE it also writes
// dO and Q, the operands of dV and dK, as transposed INT8 values. `dout_group` neighbouring channels of a tile of dO
// share a scale.
template <class T, int D, bool QUANTIZE>
__device__ void prepare(const params::Backward& p) {
  const params::Shape& shape = p.shape;
  int tile = blockIdx.x / shape.query_heads, head = blockIdx.x % shape.query_heads;
  Segment segment(shape, segment_of_tile<true>(shape, tile));
  int first = (tile - segment.query_tile) * TILE;
  int64_t at = int64_t(head) * shape.query_tiles + tile;
  Rows<T> out(p.out, segment.batch, segment.query_start, head, segment.query_len, shape.value_dim);
  Rows<T> dout(p.dout, segment.batch, segment.query_start, head, segment.query_len, shape.value_dim);
  quant::Tile<D> grads;
  grads.load(dout, first);
#pragma unroll
  for (int i = 0; i < grads.ROWS; ++i) {
    uint4 words = out.load_8(first + grads.row(i), grads.column());
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) sum = fmaf(ptx::to_float(reinterpret_cast<const T*>(&words)[c]), grads.x[i][c], sum);
#pragma unroll
    for (int lanes = 1; lanes < D / 8; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (threadIdx.x % (D / 8) == 0) p.minus_delta[at * TILE + grads.row(i)] = -sum;
  }
  if constexpr (QUANTIZE) {
    constexpr int PITCH = D + 16;
    __shared__ __align__(16) int8_t codes[TILE * PITCH], queries[TILE * PITCH];
    __shared__ uint32_t largest[D];
    __shared__ float quant_scale[D];
    for (int i = threadIdx.x; i < D; i += blockDim.x) largest[i] = 0;
    for (int i = threadIdx.x; i < TILE * D / 16; i += blockDim.x)
      *reinterpret_cast<uint4*>(queries + i / (D / 16) * PITCH + i % (D / 16) * 16) =
          *reinterpret_cast<const uint4*>(quant::at_swizzled<D>(p.codes.q + at * TILE * D, i / (D / 16), i % (D / 16) * 16));
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      uint32_t x = 0;
#pragma unroll
      for (int i = 0; i < grads.ROWS; ++i) x = max(x, quant::abs_bits(grads.x[i][c]));
#pragma unroll
      for (int lanes = D / 8; lanes < 32; lanes *= 2) x = max(x, __shfl_xor_sync(~0u, x, lanes));
      if (threadIdx.x % 32 < D / 8) atomicMax(&largest[grads.column() + c], x);
    }
    __syncthreads();
    if (threadIdx.x < D) {
      uint32_t x = 0;
      int start = threadIdx.x / p.dout_group * p.dout_group;
      for (int i = start; i < min(start + p.dout_group, D); ++i) x = max(x, largest[i]);
      quant::Scale scale = quant::scale_of(x);
      quant_scale[threadIdx.x] = scale.quant;
      p.dout_dequant_scale[at * D + threadIdx.x] = scale.dequant;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < grads.ROWS; ++i) {
      int q[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) q[c] = quant::code(grads.x[i][c], quant_scale[grads.column() + c]);
      *reinterpret_cast<uint2*>(codes + grads.row(i) * PITCH + grads.column()) =
          make_uint2(quant::pack_bytes(q[0], q[1], q[2], q[3]), quant::pack_bytes(q[4], q[5], q[6], q[7]));
    }
    __syncthreads();
    quant::store_transposed<D, PITCH>(codes, p.dout_transposed + at * TILE * D);
    quant::store_transposed<D, PITCH>(queries, p.q_transposed + at * TILE * D);
  }
}

constexpr float LN_2 = 0.69314718f;

// One thread block per (query tile, head). For a forward it writes the log-sum-exps in the caller's layout and units.
// For a backward it adds the caller's gradient of the log-sum-exps, dlse, to the stored -delta. The derivative of a
// log-sum-exp by a logit is the logit's P, so dS = P o (dP - delta + dlse).
__device__ void log_sum_exp(const params::LogSumExp& p) {
  const params::Shape& shape = p.shape;
  int tile = blockIdx.x / shape.query_heads, head = blockIdx.x % shape.query_heads;
  Segment segment(shape, segment_of_tile<true>(shape, tile));
  int row = (tile - segment.query_tile) * TILE + threadIdx.x;
  if (row >= segment.query_len) return;
  float& padded = p.padded[(int64_t(head) * shape.query_tiles + tile) * TILE + threadIdx.x];
  float& outside = p.outside[(int64_t(segment.batch) * shape.query_heads + head) * p.sequence + segment.query_start + row];
  if (p.is_gradient) {
    // For a query that sees no key, the caller's gradient of the log-sum-exp may be NaN.
    if (sees_a_key(p.shape, segment, row)) padded += outside;
  } else {
    // `padded` is the negated log-sum-exp to base 2. For a query that sees no key, `padded` and `outside` are -inf.
    outside = padded == -CUDART_INF_F ? padded : -LN_2 * padded;
  }
}

constexpr int SINK_THREADS = 512;

// One thread block per query head computes the gradient of the head's sink: minus the sum over queries of (the sink's
// probability * delta). The order of the sum depends only on the shape.
__device__ void sink_gradient(const params::SinkGradient& p) {
  __shared__ float partial[SINK_THREADS / 32];
  int64_t first = blockIdx.x * p.rows;
  float sink2 = p.sinks[blockIdx.x] * ptx::LOG2_E, sum = 0.0f;
  for (int64_t row = threadIdx.x; row < p.rows; row += SINK_THREADS) {
    // The probability is 0 for padding and for queries that see no key, whose delta may be NaN.
    float probability = fminf(ptx::exp2(sink2 + p.minus_lse2[first + row]), 1.0f);
    if (probability != 0.0f) sum = fmaf(probability, p.minus_delta[first + row], sum);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < SINK_THREADS / 32; ++warp) sum += partial[warp];
  p.gradient[blockIdx.x] = sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(SINK_THREADS) sink_gradient_of_heads(const __grid_constant__ params::SinkGradient p) { sink_gradient(p); }

extern "C" __global__ void __launch_bounds__(TILE) attention_log_sum_exp(const __grid_constant__ params::LogSumExp p) { log_sum_exp(p); }

#define FORWARD(name, threads, ...) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ params::Forward p) { __VA_ARGS__(p); }
#define BACKWARD(name, ...)                                                                                            \
  extern "C" __global__ void __launch_bounds__(quant::TILE_THREADS) name(const __grid_constant__ params::Backward p) { \
    __VA_ARGS__(p);                                                                                                    \
  }
#define CODES(type, T, D)                                                  \
  FORWARD(sum_tiles_##type##_##D, quant::TILE_THREADS, sum_tiles<T, D>)    \
  FORWARD(mean_of_sample_##type##_##D, MEAN_THREADS, mean_of_sample<T, D>) \
  FORWARD(quantize_##type##_##D, quant::TILE_THREADS, quantize<T, D>)
#define KERNELS(type, T, D)                                           \
  CODES(type, T, D)                                                   \
  BACKWARD(prepare_dense16_##type##_##D, prepare<T, D, false>) \
  BACKWARD(prepare_sagebwd_##type##_##D, prepare<T, D, true>)

KERNELS(bf16, __nv_bfloat16, 64)
KERNELS(bf16, __nv_bfloat16, 128)
KERNELS(f16, __half, 64)
KERNELS(f16, __half, 128)
BACKWARD(prepare_dense16_bf16_256, prepare<__nv_bfloat16, 256, false>)
BACKWARD(prepare_dense16_f16_256, prepare<__half, 256, false>)
FORWARD(mean_of_tiles_64, MEAN_THREADS, mean_of_tiles<64>)
FORWARD(mean_of_tiles_128, MEAN_THREADS, mean_of_tiles<128>)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the only target with INT8 matmuls at head_dim above 128
CODES(bf16, __nv_bfloat16, 256)
CODES(f16, __half, 256)
FORWARD(mean_of_tiles_256, MEAN_THREADS, mean_of_tiles<256>)
#endif
