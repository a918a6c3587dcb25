// include/sage/ptx/mma.cuh on a CPU: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "Matrix Fragments for
// mma.m16n8k32".
#pragma once

#include <sage/ptx/math.cuh>

namespace sage::ptx {

// A row of A or a column of B: two registers from each of the four lanes that hold it.
template <int COUNT>
struct Quad {
  uint32_t word[COUNT];  // the four lanes' values of `first`, then their values of `second`
  __device__ Quad(uint32_t first, uint32_t second, int quad) {
    for (int from = 0; from < 4; ++from) {
      word[from] = __shfl_sync(~0u, first, 4 * quad + from);
      word[4 + from] = __shfl_sync(~0u, second, 4 * quad + from);
    }
  }
};

inline void mma_s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  Quad<8> rows[2] = {{a[0], a[2], g}, {a[1], a[3], g}}, columns[2] = {{b0, b1, 2 * t}, {b0, b1, 2 * t + 1}};
  for (int n = 0; n < 4; ++n) {
    int sum = c[n];
    for (int i = 0; i < 8; ++i) sum = __dp4a(int(rows[n / 2].word[i]), int(columns[n % 2].word[i]), sum);
    d[n] = sum;
  }
}

template <class T>
inline void mma_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  Quad<8> rows[2] = {{a[0], a[2], g}, {a[1], a[3], g}}, columns[2] = {{b0, b1, 2 * t}, {b0, b1, 2 * t + 1}};
  for (int n = 0; n < 4; ++n)
    for (int i = 0; i < 8; ++i)
      for (int h = 0; h < 2; ++h)
        d[n] += half_of<T>(rows[n / 2].word[i], h) * half_of<T>(columns[n % 2].word[i], h);
}

}  // namespace sage::ptx
