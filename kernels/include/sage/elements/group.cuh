// The threads that share a row, and sums over them.
#pragma once

#include <stdint.h>

namespace sage::elements {

// A power of two of lanes: up to a warp with several groups in a block of whole warps, or else the whole block.
struct Group {
  int lanes, lane, index, count;
  unsigned mask;

  __device__ __forceinline__ explicit Group(int lanes)
      : lanes(lanes), lane(threadIdx.x % lanes), index(threadIdx.x / lanes), count(blockDim.x / lanes) {
    mask = lanes >= 32 ? ~0u : ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
  }

  // All lanes get the same bits: partners add the same two numbers. Lanes of a group must come together.
  template <class X, class Combine>
  __device__ __forceinline__ X reduce(X x, Combine combine) const {
    for (int step = min(lanes, 32) / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(mask, x, step));
    if (lanes > 32) {
      __shared__ X warps[32];
      __syncthreads();  // what the last call left has been read
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
      __syncthreads();
      x = warps[0];
      for (int warp = 1; warp < lanes / 32; ++warp) x = combine(x, warps[warp]);
    }
    return x;
  }

  __device__ __forceinline__ float sum(float x) const {
    return reduce(x, [](float a, float b) { return a + b; });
  }
  __device__ __forceinline__ float max(float x) const {
    return reduce(x, [](float a, float b) { return fmaxf(a, b); });
  }

  // What lanes read before is read before any lane goes on.
  __device__ __forceinline__ void sync() const {
    if (lanes > 32) __syncthreads(); else __syncwarp(mask);
  }
};

// 1 / sqrt(mean(x^2) + eps) over a group's row of `width` elements. `each(f)` calls f(x) for all elements of a lane.
template <class Each>
__device__ __forceinline__ float inverse_rms(const Group& group, int width, float eps, Each each) {
  float sum = 0.0f;
  each([&](float x) { sum = fmaf(x, x, sum); });
  float mean = group.sum(sum) / width;
  if (isfinite(mean)) return 1.0f / sqrtf(mean + eps);
  // Squares of elements above 1.8e19 overflow; far below they cannot. (An infinite mean now becomes NaN: there is no row
  // of infinite elements to be normalized.)
  constexpr float SMALL = 1.0f / (1ull << 40) / (1ull << 40);
  sum = 0.0f;
  each([&](float x) { sum = fmaf(x * SMALL, x * SMALL, sum); });
  mean = group.sum(sum) / width;
  return SMALL / sqrtf(mean + (mean - mean));
}

}  // namespace sage::elements
