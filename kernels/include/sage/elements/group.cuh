// The group of threads that shares a row, and reductions over the group.
#pragma once

#include <stdint.h>

namespace sage::elements {

// Number of threads of a thread block that consists of several `Group`s.
constexpr int ROW_THREADS = 256;

// A group is a warp, a part of a warp, or the whole thread block. Its number of lanes is a power of two.
struct Group {
  int lanes, lane, index, count;
  unsigned mask;

  __device__ __forceinline__ explicit Group(int lanes)
      : lanes(lanes), lane(threadIdx.x % lanes), index(threadIdx.x / lanes), count(blockDim.x / lanes) {
    mask = lanes >= 32 ? ~0u : ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
  }

  // Reduces x over the group; all lanes of the group must call this function. All lanes get the same bits, because two
  // lanes that exchange numbers combine the same two numbers.
  template <class X, class Combine>
  __device__ __forceinline__ X reduce(X x, Combine combine) const {
    for (int step = min(lanes, 32) / 2; step > 0; step /= 2) x = combine(x, __shfl_xor_sync(mask, x, step));
    if (lanes > 32) {
      __shared__ X warps[32];
      __syncthreads();  // all threads have read `warps` in the previous call
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

  // Returns x. All lanes of the group must pass the same x. The function exists for quant::Fp8Team, which has the same
  // interface: if a team has several warps, its `any` returns whether x is true in any thread of the thread block.
  __device__ __forceinline__ bool any(bool x) const { return x; }

  // Waits for all lanes of the group, so that what they have read may be overwritten.
  __device__ __forceinline__ void sync() const {
    if (lanes > 32) __syncthreads(); else __syncwarp(mask);
  }
};

// 1 / sqrt(mean(x^2) + eps) over a group's row of `width` elements. `each(f)` calls f(x) for all elements of a lane.
template <class Lanes, class Each>
__device__ __forceinline__ float inverse_rms(Lanes& group, int width, float eps, Each each) {
  float sum = 0.0f;
  each([&](float x) { sum = fmaf(x, x, sum); });
  float mean = group.sum(sum) / width;
  bool is_finite = isfinite(mean);
  if (!group.any(!is_finite)) return 1.0f / sqrtf(mean + eps);
  float first = mean;
  // Squares of elements above 1.8e19 overflow. So the second pass multiplies the row by 2^-80, and then no square of a
  // finite element overflows. If the mean is still infinite, the result is NaN: the row has infinite elements.
  constexpr float SMALL = 1.0f / (1ull << 40) / (1ull << 40);
  sum = 0.0f;
  each([&](float x) { sum = fmaf(x * SMALL, x * SMALL, sum); });
  mean = group.sum(sum) / width;
  return is_finite ? 1.0f / sqrtf(first + eps) : SMALL / sqrtf(mean + (mean - mean));
}

}  // namespace sage::elements
