// Copies heads between tensors of different strides, in packs of 16 bytes. Ranks use this kernel to reorder heads
// before and after an exchange of heads.
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>

using namespace sage;
using elements::Pack;

namespace {

constexpr int THREADS = 256;
constexpr int AT_ONCE = 4;  // packs per thread; all are loaded before the first is stored

template <class T>
__device__ __forceinline__ T* place(const params::CopyHeads& p, const params::Heads& x, int item, int elements) {
  int pack = item % p.packs, row = item / p.packs;
  int head = row % p.heads, token = row / p.heads;
  return static_cast<T*>(x.data) + token / p.sequence * x.batch + token % p.sequence * x.token + head * x.head + pack * elements;
}

template <class T, int V>
__device__ void copy(const params::CopyHeads& p) {
  int items = p.tokens * p.heads * p.packs;  // the host checks that this number fits an int
  int first = blockIdx.x * THREADS * AT_ONCE + threadIdx.x;
  Pack<T, V> packs[AT_ONCE];
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i)
    if (first + i * THREADS < items) packs[i] = Pack<T, V>::load(place<const T>(p, p.x, first + i * THREADS, V));
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i)
    if (first + i * THREADS < items) packs[i].store(place<T>(p, p.out, first + i * THREADS, V));
}

}  // namespace

#define KERNELS(name, T, V)                                \
  extern "C" __global__ void __launch_bounds__(THREADS)    \
      copy_heads_##name(const __grid_constant__ params::CopyHeads p) { copy<T, V>(p); }

SAGE_FLOAT_KERNELS(KERNELS)
