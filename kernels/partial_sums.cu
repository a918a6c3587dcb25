// Column sums in a fixed order. `partial_sums` sums many short rows: the partial sums of thread blocks. `sum_in_order`
// sums a few long rows: gradients that several GPUs sent.
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;

namespace {

constexpr int SIDE = 32;
constexpr int SUM_THREADS = 256, SUM_VALUES = 4;  // of sum_in_order: threads per thread block, columns per thread

// A thread block sums SIDE columns. Threads with threadIdx.y = y add rows y, y + SIDE, ..; then one thread per column
// adds the sums of all y in order.
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

// Sums a few long rows. A thread sums four columns and reads every row once. Rows are added in pairs, then pairs of
// pairs, and so on. `sums[n]` is the sum of 2^n groups of ROWS rows each. It is kept until a second sum of this size
// can be added to it.
constexpr int ROWS = 8, SUM_LEVELS = 8;

__device__ void sum_long_rows(const params::SumInOrder& p) {
  constexpr int V = SUM_VALUES;
  elements::each_pack<V>(p.width, [&](int64_t at, auto count) {
    constexpr int N = decltype(count)::V;
    float sums[SUM_LEVELS][N];
    auto add = [](float(&sum)[N], const float(&x)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += x[i];
    };
    for (int first = 0; first < p.count; first += ROWS) {
      float x[ROWS][N];
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        int term = first + row;
        // `sum` contains this rank's own term.
        const float* from = term == p.place ? p.sum : p.parts + int64_t(term) * p.width;
        if (term < p.count) elements::load_floats(from + at, x[row]);
      }
#pragma unroll
      for (int pair = 1; pair < ROWS; pair *= 2) {
#pragma unroll
        for (int row = 0; row + pair < ROWS; row += 2 * pair)
          if (first + row + pair < p.count) add(x[row], x[row + pair]);
      }
      // Works like a binary counter: each group that completes a pair carries its sum to the next level.
      bool carries = true;
#pragma unroll
      for (int level = 0; level < SUM_LEVELS; ++level) {
        bool full = first / ROWS >> level & 1;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (carries && full) x[0][i] = sums[level][i] + x[0][i];
          if (carries && !full) sums[level][i] = x[0][i];
        }
        carries = carries && full;
      }
    }
    // Adds up the `sums` that were not carried to a higher level.
    int groups = (p.count + ROWS - 1) / ROWS;
    float total[N];
    bool none = true;
#pragma unroll
    for (int level = 0; level < SUM_LEVELS; ++level) {
      if (!(groups >> level & 1)) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) total[i] = none ? sums[level][i] : sums[level][i] + total[i];
      none = false;
    }
    elements::store_floats(p.sum + at, total);
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
