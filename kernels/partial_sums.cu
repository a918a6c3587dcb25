// Sums of columns in a fixed order: many short rows, the partial sums of blocks, which it completes; and few long rows, the
// gradients that several GPUs sent.
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;

namespace {

constexpr int SIDE = 32;
constexpr int SUM_THREADS = 256, SUM_VALUES = 4;  // of a thread at once

// A block takes SIDE columns. Thread row y adds parts y, y + SIDE, ..; then one thread a column adds the thread rows' sums in
// order.
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

// Few rows, each as long as the model's parameters: a thread takes four columns and reads every row once.
__device__ void sum_long_rows(const params::SumInOrder& p) {
  constexpr int V = SUM_VALUES;
  elements::each_pack<V>(p.width, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    float own[N], sum[N], x[N];
    elements::load_floats(p.sum + at, own);
    for (int term = 0; term < p.count; ++term) {
      // `sum` holds the rank's own term.
      if (term != p.place) elements::load_floats(p.parts + int64_t(term) * p.width + at, x);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float next = term == p.place ? own[i] : x[i];
        sum[i] = term == 0 ? next : sum[i] + next;
      }
    }
    elements::store_floats(p.sum + at, sum);
  });
}

}  // namespace

#define KERNEL(name, T)                                                  \
  extern "C" __global__ void __launch_bounds__(SIDE* SIDE)               \
      partial_sums_##name(const __grid_constant__ params::PartialSums p) { sum<T>(p); }

KERNEL(f32, float)
KERNEL(f16, __half)
KERNEL(bf16, __nv_bfloat16)

extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_in_order(const __grid_constant__ params::SumInOrder p) {
  sum_long_rows(p);
}
