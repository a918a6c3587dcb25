// Access to rows of the caller's tensors: any strides, any head_dim up to D. Values beyond the last row or
// channel are read as zeros.
#pragma once

#include <sage/layout/fragments.cuh>
#include <sage/layout/swizzle.cuh>
#include <sage/params/attention.cuh>
#include <sage/ptx/math.cuh>
#include <sage/ptx/memory.cuh>

namespace sage::attention {

// Converts eight 16-bit channels, packed in 16 bytes, to floats and back.
template <class T>
__device__ __forceinline__ void unpack_8(const uint4& words, float (&x)[8]) {
#pragma unroll
  for (int c = 0; c < 8; ++c) x[c] = ptx::to_float(reinterpret_cast<const T*>(&words)[c]);
}
template <class T>
__device__ __forceinline__ uint4 pack_8(const float (&x)[8]) {
  return make_uint4(ptx::pack_16<T>(x[0], x[1]), ptx::pack_16<T>(x[2], x[3]), ptx::pack_16<T>(x[4], x[5]),
                    ptx::pack_16<T>(x[6], x[7]));
}

// The tokens of one segment and head, as the rows of a matrix.
template <class T>
struct Rows {
  T* data;
  int64_t token, channel;
  bool vector;
  int count;     // tokens
  int head_dim;  // channels

  __device__ __forceinline__ Rows(const params::View& view, int batch, int start, int head, int count, int head_dim)
      : data(static_cast<T*>(view.data) + batch * view.batch + start * view.token + head * view.head),
        token(view.token), channel(view.channel), vector(view.vector), count(count), head_dim(head_dim) {}

  __device__ __forceinline__ T* at(int row, int column) const { return data + row * token + column * channel; }

  // Drops the first `channels` channels, so that column 0 is channel `channels`.
  __device__ __forceinline__ void skip_channels(int channels) { data += channels * channel, head_dim -= channels; }

  // Reads eight channels from `column` on, as 16 bytes; zeros beyond the ends.
  __device__ __forceinline__ uint4 load_8(int row, int column) const {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (row >= count || column >= head_dim) return words;
    if (vector) return *reinterpret_cast<const uint4*>(at(row, column));
    T* elements = reinterpret_cast<T*>(&words);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (column + i < head_dim) elements[i] = *at(row, column + i);
    return words;
  }

  // Writes eight channels of an output, from `column` on. Rows and channels that the output does not have are dropped.
  __device__ __forceinline__ void store_8(int row, int column, uint4 words) const {
    if (row >= count || column >= head_dim) return;
    if (vector) {
      *reinterpret_cast<uint4*>(at(row, column)) = words;
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < head_dim) *at(row, column + i) = reinterpret_cast<const T*>(&words)[i];
    }
  }

  // Writes two neighbouring channels of an output, rounded to T.
  __device__ __forceinline__ void store_2(int row, int column, float a, float b) const {
    if (row >= count) return;
    if (vector && column < head_dim) {
      *reinterpret_cast<uint32_t*>(at(row, column)) = ptx::pack_16<T>(a, b);
    } else {
      if (column < head_dim) *at(row, column) = ptx::from_float<T>(a);
      if (column + 1 < head_dim) *at(row, column + 1) = ptx::from_float<T>(b);
    }
  }
};

// Writes a warp's 16 rows of an output, from row `first` on. With STAGING bytes of shared memory per warp the rows are
// staged there, so that neighbouring lanes write neighbouring 16-byte chunks.
template <int STAGING, class T, int N>
__device__ __forceinline__ void store_rows(const Rows<T>& out, int first, const float (&acc)[N][4], const float (&factor)[2],
                                           uint32_t staging, int lane) {
  if constexpr (STAGING > 0) {
    constexpr int ROW_BYTES = STAGING / 16, STEPS = ROW_BYTES / 32, CHUNKS = ROW_BYTES / 16;
    if (out.vector) {
      layout::ReaderA<ROW_BYTES> writer(staging, lane);
#pragma unroll
      for (int from = 0; from < N; from += 2 * STEPS) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          uint32_t words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* pair = &acc[from + 2 * step + i / 2][2 * (i & 1)];
            words[i] = ptx::pack_16<T>(pair[0] * factor[i & 1], pair[1] * factor[i & 1]);
          }
          writer.store(words, 0, step, lane);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < CHUNKS / 2; ++i) {
          int row = (i * 32 + lane) / CHUNKS, chunk = lane % CHUNKS;
          out.store_8(first + row, from * 8 + chunk * 8, ptx::load_16(staging + layout::swizzled<ROW_BYTES>(row, chunk)));
        }
        __syncwarp();
      }
      return;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n = 0; n < N; ++n)
      out.store_2(first + lane / 4 + 8 * h, n * 8 + 2 * (lane & 3), acc[n][2 * h] * factor[h], acc[n][2 * h + 1] * factor[h]);
}

// Copies ROWS rows of D channels, from row `first` on, into swizzled shared memory. The copies are asynchronous if
// 16-byte copies work; in either case they are visible after cp_async_wait and a barrier.
template <int ROWS, int D, int THREADS, class T>
__device__ __forceinline__ void copy_rows(uint32_t shared, const Rows<T>& rows, int first, int thread) {
  constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
  int row = thread / CHUNKS, column = thread % CHUNKS * 8;
  // Rows that are eight apart have the same swizzle.
  auto to = [&, first_row = shared + layout::swizzled<D * 2>(row, column / 8)](int i) {
    return STEP % 8 == 0 ? first_row + i * D * 2 : shared + layout::swizzled<D * 2>(row + i, column / 8);
  };
  if (rows.vector) {
    const T* from = rows.at(first + row, column);
    int left = column < rows.head_dim ? rows.count - first - row : 0;
#pragma unroll
    for (int i = 0; i < ROWS; i += STEP, from += STEP * rows.token)
      ptx::cp_async_16(to(i), i < left ? from : rows.data, i < left);
  } else {
#pragma unroll 1
    for (int i = 0; i < ROWS; i += STEP) ptx::store_16(to(i), rows.load_8(first + row + i, column));
  }
}

// Copies a tile of BYTES INT8 values, which has the same layout in global and in shared memory. Writes zeros if the
// tile does not exist.
template <int BYTES, int THREADS>
__device__ __forceinline__ void copy_tile(uint32_t shared, const int8_t* tile, int thread, bool exists = true) {
  shared += thread * 16, tile += thread * 16;
#pragma unroll
  for (int i = 0; i < BYTES; i += THREADS * 16)
    if (i + THREADS * 16 <= BYTES || i + thread * 16 < BYTES) ptx::cp_async_16(shared + i, tile + i, exists);
}

// Copies VALUES values for each query of a tile: the negated log-sum-exp (base 2), the negated delta, and with
// VALUES = 3 the query's entry in `row_sums`.
template <int VALUES = 2, class Tile>
__device__ __forceinline__ void copy_row_state(uint32_t shared, const params::Backward& p, const Tile& tile, int thread) {
  constexpr int CHUNKS = 64 / 4;
  if (thread < VALUES * CHUNKS) {
    const float* from = thread < CHUNKS ? p.minus_lse2 : p.minus_delta - 64;
    if (VALUES == 3 && thread >= 2 * CHUNKS) from = p.row_sums - 128;
    ptx::cp_async_16(shared + thread * 16, from + int64_t(tile.padded) * 64 + thread * 4, true);
  }
}

}  // namespace sage::attention
