// A row that a norm's kernel reads, partly kept in registers; and column sums over a thread block's rows.
#pragma once

#include <sage/elements/group.cuh>
#include <sage/elements/pack.cuh>

namespace sage::elements {

constexpr int KEEP = 4;
constexpr int MAX_THREADS = 512;
static_assert(MAX_THREADS >= ROW_THREADS);

// Calls body(k, chunk) for each pack of a lane; `chunk` is the pack's index in the row. `k` is 0 to KEEP - 1 for the
// lane's first KEEP packs, which are in registers, and KEEP for all later packs.
template <class Body>
__device__ __forceinline__ void each_chunk(const Group& group, int chunks, Body body) {
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    int chunk = k * group.lanes + group.lane;
    if (chunk < chunks) body(k, chunk);
  }
  for (int chunk = KEEP * group.lanes + group.lane; chunk < chunks; chunk += group.lanes) body(KEEP, chunk);
}

// A row with the first KEEP packs of each thread in registers. Further packs are read from memory at each use.
template <class T, int V>
struct Row {
  const T* data;
  Pack<T, V> kept[KEEP];

  __device__ __forceinline__ Row(const void* rows, int row, const Group& group, int width)
      : data(static_cast<const T*>(rows) + int64_t(row) * width) {
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      int chunk = k * group.lanes + group.lane;
      if (chunk < width / V) kept[k] = Pack<T, V>::load(data + chunk * V);
    }
  }

  __device__ __forceinline__ Pack<T, V> at(int k, int chunk) const {
    return k < KEEP ? kept[k] : Pack<T, V>::load(data + chunk * V);
  }

  // Adds another row, rounds the sum, stores the sum to `sums`, and replaces this row by the sum.
  __device__ __forceinline__ void add(const void* rows, void* sums, int row, const Group& group, int width) {
    const T* other = static_cast<const T*>(rows) + int64_t(row) * width;
    T* sum = static_cast<T*>(sums) + int64_t(row) * width;
    each_chunk(group, width / V, [&](int k, int chunk) {
      Pack<T, V> x = at(k, chunk), y = Pack<T, V>::load(other + chunk * V);
      float out[V];
#pragma unroll
      for (int i = 0; i < V; ++i) out[i] = x[i] + y[i];
      Pack<T, V> rounded = Pack<T, V>::of(out);
      rounded.store(sum + chunk * V);
      if (k < KEEP) kept[k] = rounded;
    });
    data = sum;  // the source of packs that are not in registers; no barrier, because a lane reads only what it wrote
  }

  template <class F>
  __device__ __forceinline__ void each(const Group& group, int width, F f) const {
    each_chunk(group, width / V, [&](int k, int chunk) {
      Pack<T, V> x = at(k, chunk);
#pragma unroll
      for (int i = 0; i < V; ++i) f(x[i]);
    });
  }
};

// For the columns of each lane's first KEEP packs (elements/pack.cuh): stores the sum over all rows of the thread block
// to `to`. `sums` has the lane's columns, summed over the rows of the lane's group.
template <int V>
__device__ __forceinline__ void store_column_sums(const Group& group, int width, const float (&sums)[KEEP][V], float* to) {
  int chunks = width / V;
  if (group.count == 1) {
#pragma unroll
    for (int k = 0; k < KEEP; ++k) {
      int chunk = k * group.lanes + group.lane;
      if (chunk < chunks)
#pragma unroll
        for (int i = 0; i < V; ++i) to[chunk * V + i] = sums[k][i];
    }
    return;
  }
  // With several groups, width <= group.lanes * KEEP * V. So the sums of all groups fit in `all`.
  __shared__ float all[ROW_THREADS * KEEP * V];
#pragma unroll
  for (int k = 0; k < KEEP; ++k) {
    int chunk = k * group.lanes + group.lane;
    if (chunk < chunks)
#pragma unroll
      for (int i = 0; i < V; ++i) all[group.index * width + chunk * V + i] = sums[k][i];
  }
  __syncthreads();
  for (int column = threadIdx.x; column < width; column += blockDim.x) {
    float sum = 0.0f;
    for (int other = 0; other < group.count; ++other) sum += all[other * width + column];
    to[column] = sum;
  }
}

}  // namespace sage::elements
