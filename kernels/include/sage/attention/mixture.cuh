// The weights of the mixture `out = a * sparse + (1 - a) * tail`. Here `sparse` is the output of exact attention over
// the selected blocks, and `tail` is the linear tail's output. The weight is a = sigmoid(theta), or with `by_count`
// a = sigmoid(theta + log(n / m)). Of the keys that the query sees, n are in exact attention, and m are not. In both
// cases a = 1 if m = 0.
#pragma once

#include <sage/attention/segment.cuh>
#include <sage/params/sla2.cuh>

namespace sage::attention {

// SLA2's weights of selected and other keys in the output, for the queries of one query block of one head.
struct MixtureWeights {
  const Segment& segment;
  float theta;
  bool by_count;
  int past, chosen;  // numbers of keys: in all blocks that may be selected, and in the selected blocks

  __device__ __forceinline__ MixtureWeights(const params::Mixture& mixture, const params::Shape& shape, const Segment& segment,
                                            int segment_index, int head, int block)
      : segment(segment), theta(mixture.theta[head]), by_count(mixture.by_count) {
    int candidates = segment.causal ? segment.visible_keys(block * SELECTION_BLOCK) / SELECTION_BLOCK : selection_blocks(segment.key_len);
    past = min(candidates * SELECTION_BLOCK, segment.key_len);
    int key_head = head / (shape.query_heads / shape.key_heads);
    int64_t row = int64_t(key_head) * mixture.lists.query_blocks + first_query_block(shape, segment_index) + block;
    const uint32_t* list = mixture.lists.seen + row * mixture.lists.stride + 1;
    int count = list[-1];
    chosen = 0;
    // The blocks on the diagonal come last in the list and are not candidates.
    while (count > 0 && int(list[count - 1]) >= candidates) --count;
    if (count > 0) chosen = (count - 1) * SELECTION_BLOCK + min(past - int(list[count - 1]) * SELECTION_BLOCK, SELECTION_BLOCK);
  }

  // The weight a of exact attention.
  __device__ __forceinline__ float of_exact(int query) const {
    int left = past - chosen, exact = chosen + segment.visible_keys(query) - past;
    if (left <= 0) return 1.0f;
    float odds = by_count ? logf(float(exact) / float(left)) : 0.0f;
    return 1.0f / (1.0f + expf(-(theta + odds)));
  }
};

// A query block's part of dtheta.
__device__ __forceinline__ float& theta_part(const params::Mixture& mixture, const params::Shape& shape, int segment_index, int head,
                                             int block) {
  return mixture.parts[int64_t(head) * mixture.lists.query_blocks + first_query_block(shape, segment_index) + block];
}

// All threads of WARPS warps call this function with one value each; thread 0 gets the sum. `parts` is shared memory
// for one value per warp. No thread may still read older values in it.
template <int WARPS>
__device__ __forceinline__ float sum_of_block(float x, float* parts) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
  if (threadIdx.x == 0)
    for (int i = 0; i < WARPS; ++i) sum += parts[i];
  return sum;
}

}  // namespace sage::attention
