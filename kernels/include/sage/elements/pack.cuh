// A pack: neighbouring elements of a float type that one instruction loads or stores.
#pragma once

#include <sage/ptx/math.cuh>

namespace sage::elements {

template <int BYTES>
struct Words;
template <>
struct Words<2> {
  using Type = uint16_t;
};
template <>
struct Words<4> {
  using Type = uint32_t;
};
template <>
struct Words<8> {
  using Type = uint2;
};
template <>
struct Words<16> {
  using Type = uint4;
};

// V elements, aligned to V * sizeof(T) bytes.
template <class T, int V>
struct Pack {
  using Word = typename Words<V * sizeof(T)>::Type;
  Word word;

  static __device__ __forceinline__ Pack load(const T* at) { return {*reinterpret_cast<const Word*>(at)}; }
  __device__ __forceinline__ void store(T* at) const { *reinterpret_cast<Word*>(at) = word; }

  static __device__ __forceinline__ Pack of(const float (&x)[V]) {
    Pack pack;
    if constexpr (sizeof(T) == 2 && V % 2 == 0) {
#pragma unroll
      for (int i = 0; i < V / 2; ++i)
        reinterpret_cast<uint32_t*>(&pack.word)[i] = ptx::pack_16<T>(x[2 * i], x[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < V; ++i) reinterpret_cast<T*>(&pack.word)[i] = ptx::from_float<T>(x[i]);
    }
    return pack;
  }

  __device__ __forceinline__ float operator[](int i) const {
    return ptx::to_float(reinterpret_cast<const T*>(&word)[i]);
  }
};

template <int V, class T>
__device__ __forceinline__ void load_floats(const T* at, float (&x)[V]) {
  constexpr int N = V * sizeof(T) < 16 ? V : 16 / sizeof(T);  // elements of one load
#pragma unroll
  for (int i = 0; i < V; i += N) {
    Pack<T, N> pack = Pack<T, N>::load(at + i);
#pragma unroll
    for (int j = 0; j < N; ++j) x[i + j] = pack[j];
  }
}

// V neighbouring elements in registers, in memory order.
template <class T, int V>
struct Packed {
  static constexpr int N = V * sizeof(T) < 16 ? V : 16 / sizeof(T);
  Pack<T, N> packs[V / N] = {};

  __device__ __forceinline__ void load(const T* at) {
#pragma unroll
    for (int i = 0; i < V / N; ++i) packs[i] = Pack<T, N>::load(at + i * N);
  }
  __device__ __forceinline__ float operator[](int i) const { return packs[i / N][i % N]; }
};

template <int V, class T>
__device__ __forceinline__ void store_floats(T* at, const float (&x)[V]) {
  constexpr int N = V * sizeof(T) < 16 ? V : 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < V; i += N) {
    float part[N];
#pragma unroll
    for (int j = 0; j < N; ++j) part[j] = x[i + j];
    Pack<T, N>::of(part).store(at + i);
  }
}

// The element types' numbers, shared with the host: `Float` in candle-sage/src/cuda/floats.rs.
enum Type : int { F32 = 0, F16 = 1, BF16 = 2 };

// Loads elements of a norm's weight or bias, whose type may differ from the type of the norm's input.
template <int V>
__device__ __forceinline__ void load_weight(const void* weight, int type, int at, float (&x)[V]) {
  if (type == F32) {
    load_floats(static_cast<const float*>(weight) + at, x);
  } else if (type == F16) {
    load_floats(static_cast<const __half*>(weight) + at, x);
  } else {
    load_floats(static_cast<const __nv_bfloat16*>(weight) + at, x);
  }
}

// A number as a type, so that a lambda can use it as a constant.
template <int N>
struct Count {
  static constexpr int V = N;
};

// Divides `len` elements into packs of V, one pack per thread. Calls body(at, Count<V>) for a whole pack, and
// body(at, Count<1>) for each element after the last whole pack.
template <int V, class Body>
__device__ __forceinline__ void each_pack(int64_t len, Body body) {
  int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * V;
  if (at + V <= len) {
    body(at, Count<V>());
  } else {
    for (; at < len; ++at) body(at, Count<1>());
  }
}

}  // namespace sage::elements

// Expands KERNEL(name, T, V) for each float type T, with V elements per pack: 16 bytes, or one element.
#define SAGE_FLOAT_KERNELS(KERNEL)  \
  KERNEL(f32_vector, float, 4)          \
  KERNEL(f32_single, float, 1)          \
  KERNEL(f16_vector, __half, 8)         \
  KERNEL(f16_single, __half, 1)         \
  KERNEL(bf16_vector, __nv_bfloat16, 8) \
  KERNEL(bf16_single, __nv_bfloat16, 1)
