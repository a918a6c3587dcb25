// The mixture as a separate pass: out = a * sparse + (1 - a) * tail, where a depends on theta (attention/mixture.cuh).
// If one op computes both the tail and the mixture, the tail's kernels (past_linear/) compute `out` and the tail's
// gradients. In this case this file only computes the gradient of `sparse`, dtheta's terms that contain `sparse`, and
// the final sum of dtheta.
#include <sage/attention/mixture.cuh>
#include <sage/attention/rows.cuh>

using namespace sage;
using attention::MixtureWeights;
using attention::pack_8;
using attention::Rows;
using attention::Segment;
using attention::SELECTION_BLOCK;
using attention::unpack_8;

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int SUM_THREADS = 32;

// A thread block processes one block of queries of one head.
struct Place {
  Segment segment;
  int head, first, end;

  __device__ __forceinline__ Place(const params::Blend& p)
      : segment(p.shape, blockIdx.y), head(blockIdx.z), first(blockIdx.x * SELECTION_BLOCK),
        end(min(first + SELECTION_BLOCK, segment.query_len)) {}

  __device__ __forceinline__ MixtureWeights weights(const params::Blend& p) const {
    return {p.mixture, p.shape, segment, int(blockIdx.y), head, int(blockIdx.x)};
  }
  template <class T>
  __device__ __forceinline__ Rows<T> rows(const params::Blend& p, const params::View& view) const {
    return {view, segment.batch, segment.query_start, head, segment.query_len, p.shape.head_dim};
  }
};

// Sixteen lanes per row, eight channels per lane.
constexpr int LANES = 16;

template <class T>
__device__ __forceinline__ void blend_forward(const params::Blend& p) {
  Place at(p);
  if (at.first >= at.end) return;
  MixtureWeights weights = at.weights(p);
  Rows<T> sparse = at.rows<T>(p, p.sparse), tail = at.rows<T>(p, p.tail), out = at.rows<T>(p, p.out);
  int column = threadIdx.x % LANES * 8;
#pragma unroll 2
  for (int row = at.first + threadIdx.x / LANES; row < at.end; row += THREADS / LANES) {
    uint4 words = sparse.load_8(row, column);
    float a = weights.of_exact(row), x[8], y[8];
    if (a < 1.0f) {
      unpack_8<T>(words, x), unpack_8<T>(tail.load_8(row, column), y);
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] = a * x[c] + (1.0f - a) * y[c];
      words = pack_8<T>(x);
    }
    out.store_8(row, column, words);
  }
}

// The gradients of `sparse` and `tail`, and each query block's contribution to the gradient of theta: the sum over its
// queries of a * (1 - a) * dO . (sparse - tail), where a, which depends on theta, is the query's weight of `sparse`.
// Without TAIL, `tail` is taken as zero, and its gradient is not written.
template <class T, bool TAIL>
__device__ __forceinline__ void blend_backward(const params::Blend& p) {
  __shared__ float parts[WARPS];
  Place at(p);
  if (at.first >= at.end) return;
  MixtureWeights weights = at.weights(p);
  Rows<T> sparse = at.rows<T>(p, p.sparse), tail = at.rows<T>(p, p.tail), dout = at.rows<T>(p, p.dout);
  Rows<T> dsparse = at.rows<T>(p, p.out), dtail = at.rows<T>(p, p.dtail);
  int column = threadIdx.x % LANES * 8;
  float dtheta = 0.0f;
#pragma unroll 2
  for (int row = at.first + threadIdx.x / LANES; row < at.end; row += THREADS / LANES) {
    uint4 words = dout.load_8(row, column), rest = make_uint4(0, 0, 0, 0);
    float a = weights.of_exact(row);
    if (a < 1.0f) {
      float g[8], x[8], y[8] = {};
      unpack_8<T>(words, g), unpack_8<T>(sparse.load_8(row, column), x);
      if constexpr (TAIL) unpack_8<T>(tail.load_8(row, column), y);
      float dot = 0.0f;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        dot += g[c] * (x[c] - y[c]);
        y[c] = (1.0f - a) * g[c], x[c] = a * g[c];
      }
      dtheta += a * (1.0f - a) * dot;
      words = pack_8<T>(x), rest = pack_8<T>(y);
    }
    dsparse.store_8(row, column, words);
    if constexpr (TAIL) dtail.store_8(row, column, rest);
  }
  float sum = attention::sum_of_block<WARPS>(dtheta, parts);
  if (threadIdx.x == 0) attention::theta_part(p.mixture, p.shape, blockIdx.y, at.head, blockIdx.x) = sum;
}

}  // namespace

#define KERNEL(name, ...) \
  extern "C" __global__ void __launch_bounds__(THREADS) name(const __grid_constant__ params::Blend p) { __VA_ARGS__(p); }
#define TYPE(type, T)                                         \
  KERNEL(blend_forward_##type, blend_forward<T>)              \
  KERNEL(blend_backward_##type, blend_backward<T, true>)      \
  KERNEL(blend_backward_exact_##type, blend_backward<T, false>)
TYPE(bf16, __nv_bfloat16)
TYPE(f16, __half)

// One warp sums the contributions to a head's dtheta in a fixed order: each lane sums every 32nd contribution, then a
// butterfly of shuffles adds the lanes' sums.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) blend_sum_theta(const __grid_constant__ params::Blend p) {
  float sum = 0.0f;
  int blocks = p.mixture.lists.query_blocks;
  for (int i = threadIdx.x; i < blocks; i += 32) sum += p.mixture.parts[int64_t(blockIdx.x) * blocks + i];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x == 0) p.dtheta[blockIdx.x] = sum;
}
