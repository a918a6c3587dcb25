// The mixture of exact attention over the selected blocks and the linear tail: out = a sparse + (1 - a) tail, with a =
// sigmoid(theta), or with by_count a = sigmoid(theta + log(keys seen exactly / keys left to the tail)); a = 1 where no key is
// left to the tail.
#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/params/sla2.cuh>

using namespace sage;
using attention::pack_8;
using attention::Rows;
using attention::Segment;
using attention::SELECTION_BLOCK;
using attention::selection_blocks;
using attention::unpack_8;

namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;

// A thread block takes a block of queries of a head.
struct Place {
  Segment segment;
  int segment_index, head, first, end;
  float theta;
  bool by_count;
  int past, chosen;  // keys of the candidates, and of the selected ones among them

  __device__ __forceinline__ Place(const params::Blend& p)
      : segment(p.shape, blockIdx.y), segment_index(blockIdx.y), head(blockIdx.z), first(blockIdx.x * SELECTION_BLOCK),
        end(min(first + SELECTION_BLOCK, segment.query_len)), theta(p.theta[head]), by_count(p.by_count) {
    if (first >= end) return;
    int candidates = segment.causal ? segment.visible_keys(first) / SELECTION_BLOCK : selection_blocks(segment.key_len);
    past = min(candidates * SELECTION_BLOCK, segment.key_len);
    int key_head = head / (p.shape.query_heads / p.shape.key_heads);
    int64_t row = int64_t(key_head) * p.lists.query_blocks + attention::first_query_block(p.shape, segment_index) + blockIdx.x;
    const uint32_t* list = p.lists.seen + row * p.lists.stride + 1;
    int count = list[-1];
    chosen = 0;
    // The blocks on the diagonal come last in the list and are no candidates.
    while (count > 0 && int(list[count - 1]) >= candidates) --count;
    if (count > 0) chosen = (count - 1) * SELECTION_BLOCK + min(past - int(list[count - 1]) * SELECTION_BLOCK, SELECTION_BLOCK);
  }

  __device__ __forceinline__ float share(int query) const {
    int left = past - chosen, exact = chosen + segment.visible_keys(query) - past;
    if (left <= 0) return 1.0f;
    float odds = by_count ? logf(float(exact) / float(left)) : 0.0f;
    return 1.0f / (1.0f + expf(-(theta + odds)));
  }
  template <class T>
  __device__ __forceinline__ Rows<T> rows(const params::Blend& p, const params::View& view) const {
    return {view, segment.batch, segment.query_start, head, segment.query_len, p.shape.head_dim};
  }
};

// Sixteen lanes a row, eight channels each.
constexpr int LANES = 16;

template <class T>
__device__ __forceinline__ void blend_forward(const params::Blend& p) {
  Place at(p);
  if (at.first >= at.end) return;
  Rows<T> sparse = at.rows<T>(p, p.sparse), tail = at.rows<T>(p, p.tail), out = at.rows<T>(p, p.out);
  int column = threadIdx.x % LANES * 8;
#pragma unroll 2
  for (int row = at.first + threadIdx.x / LANES; row < at.end; row += THREADS / LANES) {
    uint4 words = sparse.load_8(row, column);
    float a = at.share(row), x[8], y[8];
    if (a < 1.0f) {
      unpack_8<T>(words, x), unpack_8<T>(tail.load_8(row, column), y);
#pragma unroll
      for (int c = 0; c < 8; ++c) x[c] = a * x[c] + (1.0f - a) * y[c];
      words = pack_8<T>(x);
    }
    out.store_8(row, column, words);
  }
}

template <class T>
__device__ __forceinline__ void blend_backward(const params::Blend& p) {
  __shared__ float parts[WARPS];
  Place at(p);
  if (at.first >= at.end) {
    return;
  }
  Rows<T> sparse = at.rows<T>(p, p.sparse), tail = at.rows<T>(p, p.tail), dout = at.rows<T>(p, p.dout);
  Rows<T> dsparse = at.rows<T>(p, p.out), dtail = at.rows<T>(p, p.dtail);
  int column = threadIdx.x % LANES * 8;
  float dtheta = 0.0f;
#pragma unroll 2
  for (int row = at.first + threadIdx.x / LANES; row < at.end; row += THREADS / LANES) {
    uint4 words = dout.load_8(row, column), rest = make_uint4(0, 0, 0, 0);
    float a = at.share(row);
    if (a < 1.0f) {
      float g[8], x[8], y[8];
      unpack_8<T>(words, g), unpack_8<T>(sparse.load_8(row, column), x), unpack_8<T>(tail.load_8(row, column), y);
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
    dtail.store_8(row, column, rest);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) dtheta += __shfl_xor_sync(~0u, dtheta, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = dtheta;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int i = 0; i < WARPS; ++i) sum += parts[i];
    p.parts[int64_t(at.head) * p.lists.query_blocks + attention::first_query_block(p.shape, at.segment_index) + blockIdx.x] = sum;
  }
}

}  // namespace

#define TYPE(type, T)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(THREADS) blend_forward_##type(const __grid_constant__ params::Blend p) {  \
    blend_forward<T>(p);                                                                                              \
  }                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS) blend_backward_##type(const __grid_constant__ params::Blend p) { \
    blend_backward<T>(p);                                                                                             \
  }
TYPE(bf16, __nv_bfloat16)
TYPE(f16, __half)

// A warp sums the parts of a head in a fixed order: each lane sums every 32nd part, then a butterfly of shuffles adds the
// lanes.
extern "C" __global__ void __launch_bounds__(32) blend_sum_theta(const __grid_constant__ params::Blend p) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < p.lists.query_blocks; i += 32) sum += p.parts[int64_t(blockIdx.x) * p.lists.query_blocks + i];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x == 0) p.dtheta[blockIdx.x] = sum;
}
