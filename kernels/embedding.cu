// Embedding: looks up rows of a table by id. The backward sums, for each row of the table, the gradients of the output
// rows with its id. The ids are stably sorted, so that each table row has a contiguous run of ids. First,
// `embedding_pieces` sums the gradients of each piece (PIECE sorted ids) that lies inside one run. Then `embedding_bwd`
// adds these sums, so that a frequent id causes no long loop.
#include <math_constants.h>
#include <sage/elements/group.cuh>
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;
using elements::Pack;

namespace {

constexpr int THREADS = 256;
static_assert(THREADS >= elements::ROW_THREADS);
constexpr int PIECE = 32;
constexpr int BATCH = 4;  // loads in flight per thread

// A thread's row, and its index among the `lanes` threads that share the row. `lanes` is a power of two.
struct Seat {
  int64_t row;
  int lane;
  __device__ __forceinline__ explicit Seat(int lanes)
      : row(int64_t(blockIdx.x) * (blockDim.x / lanes) + threadIdx.x / lanes), lane(threadIdx.x % lanes) {}
};

template <class T, int V>
__device__ void gather(const params::Embedding& p) {
  Seat seat(p.lanes);
  if (seat.row >= p.len) return;
  uint32_t id = p.ids[seat.row];
  T* to = static_cast<T*>(p.out) + seat.row * p.width;
  if (id == params::NO_PLACE) {
    // The id is not in the table. If the host does not wait for the check of ids (ids.cu), the loss becomes NaN.
    for (int at = seat.lane; at < p.width; at += p.lanes) to[at] = ptx::from_float<T>(CUDART_NAN_F);
    return;
  }
  const T* from = static_cast<const T*>(p.from) + id * p.row_stride;
  for (int at = seat.lane * V; at < p.width; at += p.lanes * V)
    Pack<T, V>::load(from + at * p.column_stride).store(to + at);
}

// Writes, for each row of the table, the index of the first sorted id that is at least the row's number.
__device__ void find_starts(const params::Embedding& p) {
  int row = blockIdx.x * THREADS + threadIdx.x;
  if (row > p.rows) return;
  int low = 0, high = p.len;
  while (low < high) {
    int middle = low + (high - low) / 2;
    if (p.ids[middle] < uint32_t(row)) low = middle + 1; else high = middle;
  }
  p.starts[row] = low;
}

// Adds to `sum` the gradients of the output rows that belong to the sorted ids `ids[begin]` to `ids[end - 1]`.
template <class T, int V>
__device__ __forceinline__ void add_rows(const params::Embedding& p, int begin, int end, int column, float (&sum)[V]) {
  const T* from = static_cast<const T*>(p.from) + column;
#pragma unroll 1
  for (int n = begin; n < end; n += BATCH) {
    Pack<T, V> packs[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
      if (n + b < end) packs[b] = Pack<T, V>::load(from + int64_t(p.order[n + b]) * p.width);
#pragma unroll
    for (int b = 0; b < BATCH; ++b)
      if (n + b < end)
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += packs[b][i];
  }
}

template <class T, int V>
__device__ void sum_pieces(const params::Embedding& p) {
  Seat seat(p.lanes);
  int64_t begin = seat.row * PIECE, end = begin + PIECE;
  if (end > p.len || p.ids[begin] != p.ids[end - 1]) return;
  for (int at = seat.lane * V; at < p.width; at += p.lanes * V) {
    float sum[V] = {};
    add_rows<T, V>(p, begin, end, at, sum);
#pragma unroll
    for (int i = 0; i < V; ++i) p.pieces[seat.row * p.width + at + i] = sum[i];
  }
}

template <class T, int V>
__device__ void sum_rows(const params::Embedding& p) {
  Seat seat(p.lanes);
  if (seat.row >= p.rows) return;
  int begin = p.starts[seat.row], end = p.starts[seat.row + 1];
  int first = (begin + PIECE - 1) / PIECE, last = end / PIECE;  // pieces first to last - 1 lie within [begin, end)
#pragma unroll 1
  for (int at = seat.lane * V; at < p.width; at += p.lanes * V) {
    float sum[V] = {};
    int rest = begin;
    if (first < last) {
      add_rows<T, V>(p, begin, first * PIECE, at, sum);
#pragma unroll 2
      for (int piece = first; piece < last; ++piece) {
        float part[V];
        elements::load_floats(p.pieces + int64_t(piece) * p.width + at, part);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += part[i];
      }
      rest = last * PIECE;
    }
    add_rows<T, V>(p, rest, end, at, sum);
    Pack<T, V>::of(sum).store(static_cast<T*>(p.out) + seat.row * p.width + at);
  }
}

}  // namespace

#define KERNELS(name, T, V)                                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                         \
      embedding_fwd_##name(const __grid_constant__ params::Embedding p) { gather<T, V>(p); }                    \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                         \
      embedding_pieces_##name(const __grid_constant__ params::Embedding p) { sum_pieces<T, V>(p); }             \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                         \
      embedding_bwd_##name(const __grid_constant__ params::Embedding p) { sum_rows<T, V>(p); }

SAGE_FLOAT_KERNELS(KERNELS)

extern "C" __global__ void __launch_bounds__(THREADS) embedding_starts(const __grid_constant__ params::Embedding p) {
  find_starts(p);
}
