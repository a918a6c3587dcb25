// Operations of the linear tail on blocks of rows in shared memory: copy them, replace them by their features phi (the
// softmax over channels), scale them, and store results.
#pragma once

#include <math_constants.h>
#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/layout/swizzle.cuh>
#include <sage/ptx/math.cuh>
#include <sage/ptx/memory.cuh>

namespace sage::past_linear {

using attention::pack_8;
using attention::Rows;
using attention::unpack_8;

// Threads per thread block of the kernels in past_linear.cu, except linear_scan_blocks (STATE_THREADS).
constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int BLOCK = attention::SELECTION_BLOCK;

// 1 / blocks, with `blocks` rounded up to a power of two, so that multiplying by the result is exact. The state
// of a query block, H and z (past_linear.cu), sums over at most `blocks` blocks. It is stored times this value and
// 1 / BLOCK, so that H does not overflow f16. Both factors cancel in the output, phi(q) H / (phi(q) . z).
__device__ __forceinline__ float inverse_blocks(int blocks) {
  int exponent = blocks > 1 ? 32 - __clz(blocks - 1) : 0;
  return __int_as_float((127 - exponent) << 23);
}

// row_sum, row_max: the sum and the maximum of x over the LANES lanes that share a row.
template <int LANES>
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
template <int LANES>
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

// How COUNT threads divide the rows of a block: D / 8 lanes per row, eight channels each, as in copy_rows. A thread
// therefore changes only the shared memory that it has copied itself, and a barrier is needed only before matmuls.
template <int D, int COUNT>
struct Share {
  static constexpr int LANES = D / 8, STEP = COUNT / LANES;
  int row = threadIdx.x / LANES, chunk = threadIdx.x % LANES;
};

// Copies 128 rows into shared memory asynchronously. Rows beyond the end of `rows` are zeros.
template <class T, int D, int COUNT = THREADS>
__device__ __forceinline__ void copy_block(uint32_t shared, const Rows<T>& rows, int first) {
  attention::copy_rows<BLOCK, D, COUNT>(shared, rows, first, threadIdx.x);
}

// Replaces a block's rows in shared memory by their features, and rows from `count` on by zeros. Calls f(row, chunk,
// features rounded to T) for each chunk of eight channels.
template <class T, int D, int COUNT = THREADS, class F>
__device__ __forceinline__ void make_features(uint32_t shared, int count, int head_dim, F f) {
  using S = Share<D, COUNT>;
  S at;
#pragma unroll 2
  for (int row = at.row; row < BLOCK; row += S::STEP) {
    uint32_t address = shared + layout::swizzled<D * 2>(row, at.chunk);
    float x[8], largest = -CUDART_INF_F, sum = 0.0f;
    unpack_8<T>(ptx::load_16(address), x);
    if (head_dim < D) {
#pragma unroll
      for (int c = 0; c < 8; ++c)
        if (at.chunk * 8 + c >= head_dim) x[c] = -CUDART_INF_F;
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) largest = fmaxf(largest, x[c]);
    // Rounding the shift multiplies the whole row by a factor. The normalization cancels this factor, which overflows
    // only above |x| = 1e9.
    float shift = -ptx::LOG2_E * row_max<S::LANES>(largest);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      x[c] = ptx::exp2(fmaf(x[c], ptx::LOG2_E, shift));
      sum += x[c];
    }
    sum = row_sum<S::LANES>(sum);
    float inverse = row < count ? ptx::reciprocal(sum) : 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] *= inverse;
    uint4 words = pack_8<T>(x);
    ptx::store_16(address, words);
    unpack_8<T>(words, x);
    f(row, at.chunk, x);
  }
}

// Multiplies each row in shared memory by a factor. `factors` are those of the calling thread's rows (see Share).
template <class T, int D, int COUNT>
__device__ __forceinline__ void scale_rows(uint32_t shared, const float (&factors)[BLOCK / Share<D, COUNT>::STEP]) {
  using S = Share<D, COUNT>;
  S at;
#pragma unroll
  for (int i = 0; i < BLOCK / S::STEP; ++i) {
    uint32_t address = shared + layout::swizzled<D * 2>(at.row + i * S::STEP, at.chunk);
    float x[8];
    unpack_8<T>(ptx::load_16(address), x);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] *= factors[i];
    ptx::store_16(address, pack_8<T>(x));
  }
}

template <class T, int D>
__device__ __forceinline__ float element(const unsigned char* rows, int row, int column) {
  return ptx::to_float(*reinterpret_cast<const T*>(rows + layout::swizzled<D * 2>(row, column / 8) + column % 8 * 2));
}

// Stores two neighbouring channels of one row of results in shared memory, from where store_rows writes whole rows. The
// results of a warp overwrite an operand that only this warp has read.
template <class T, int D>
__device__ __forceinline__ void leave_2(unsigned char* rows, int row, int column, float a, float b) {
  *reinterpret_cast<uint32_t*>(rows + layout::swizzled<D * 2>(row, column / 8) + column % 8 * 2) = ptx::pack_16<T>(a, b);
}
// Copies a warp's 16 rows from shared memory, where they begin at `row`, to `to`, where they begin at `first + row`.
// Before it stores eight channels, it calls change(row of `to`, index of the first channel, the eight values).
template <class T, int D, class F>
__device__ __forceinline__ void change_and_store_rows(const Rows<T>& to, const unsigned char* rows, int row, int first, F change) {
  constexpr int LANES = D / 8;
  __syncwarp();
#pragma unroll 2
  for (int r = row + threadIdx.x % 32 / LANES; r < row + 16; r += 32 / LANES) {
    int chunk = threadIdx.x % LANES;
    float x[8];
    uint4 words = *reinterpret_cast<const uint4*>(rows + layout::swizzled<D * 2>(r, chunk));
    unpack_8<T>(words, x);
    change(first + r, chunk * 8, x);
    to.store_8(first + r, chunk * 8, pack_8<T>(x));
  }
}

// Copies a warp's 16 rows to `to`, like change_and_store_rows. If `add`, adds them to the old values in `to`.
template <class T, int D>
__device__ __forceinline__ void store_rows(const Rows<T>& to, const unsigned char* rows, int row, int first, bool add) {
  change_and_store_rows<T, D>(to, rows, row, first, [&](int r, int column, float(&x)[8]) {
    if (!add) return;
    float y[8];
    unpack_8<T>(to.load_8(r, column), y);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] += y[c];
  });
}

}  // namespace sage::past_linear
