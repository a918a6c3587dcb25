// Q smoothing subtracts the mean of each tile of queries from the tile. This file computes the mean's logits, without
// quantization: for each key k, the dot product of the mean and k - mean(K) (arXiv 2603.02170, sections 3 and 6).
#pragma once

#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>

namespace sage::attention {

// out[i * keys + j] = the base-2 logit of the mean of tile `query_tile` + i (an index into `codes.q_mean`) and key
// `first_key` + j. All threads call this function; a barrier must precede reads of `out`.
template <class T, int D>
__device__ __forceinline__ void query_mean_logits(const params::View& view, const params::Codes& codes,
                                                  const params::Shape& shape, const Segment& segment,
                                                  int segment_index, int key_head, int64_t query_tile,
                                                  int query_tiles, int first_key, int keys, float* out) {
  Rows<T> k(view, segment.batch, segment.key_start, key_head, segment.key_len, shape.head_dim);
  const float* k_mean = codes.k_mean + (int64_t(key_head) * shape.segment_count + segment_index) * D;
  for (int i = threadIdx.x; i < query_tiles * keys; i += blockDim.x) {
    const float* q_mean = codes.q_mean + (query_tile + i / keys) * D;
    int key = first_key + i % keys;
    float sum = 0.0f;
    for (int c = 0; c < shape.head_dim && key < k.count; c += 8) {
      uint4 words = k.load_8(key, c);
      const T* elements = reinterpret_cast<const T*>(&words);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (c + j < shape.head_dim) sum = fmaf(ptx::to_float(elements[j]) - k_mean[c + j], q_mean[c + j], sum);
    }
    out[i] = sum * (shape.softmax_scale * ptx::LOG2_E);
  }
}

}  // namespace sage::attention
