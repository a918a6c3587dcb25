// The end of a sum that blocks began, each in a row of its own: columns added up in an order of their own.
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;

namespace {

constexpr int SIDE = 32;

// A block takes SIDE columns. Thread row y adds the parts y, y + SIDE, ..; then the thread rows are added in order.
template <class T>
__device__ void sum(const params::PartialSums& p) {
  __shared__ float sums[SIDE][SIDE + 1];
  int column = blockIdx.x * SIDE + threadIdx.x;
  float sum = 0.0f;
  if (column < p.width) {
#pragma unroll 8
    for (int part = threadIdx.y; part < p.parts; part += SIDE) sum += p.partials[int64_t(part) * p.width + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < p.width) {
    float total = 0.0f;
#pragma unroll
    for (int y = 0; y < SIDE; ++y) total += sums[y][threadIdx.x];
    static_cast<T*>(p.out)[column] = ptx::from_float<T>(total);
  }
}

}  // namespace

#define KERNEL(name, T)                                                  \
  extern "C" __global__ void __launch_bounds__(SIDE* SIDE)               \
      partial_sums_##name(const __grid_constant__ params::PartialSums p) { sum<T>(p); }

KERNEL(f32, float)
KERNEL(f16, __half)
KERNEL(bf16, __nv_bfloat16)
