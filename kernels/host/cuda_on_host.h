// A part of CUDA on a CPU, for tests of kernels without a GPU. Each thread is a fiber that runs until it reaches a
// barrier; lanes of a warp exchange values through memory. Arithmetic, addresses and the order of barriers are the same
// as on a GPU. Fibers run in a fixed order, and cp.async copies complete immediately, so that a missing wait for such a
// copy or a missing barrier is not detected. With host::late, bulk copies and tcgen05 instructions run as late as the
// kernel's waits allow, in a random order, so that a missing wait gives wrong results. With host::skewed, some warps
// run far ahead of others.
#pragma once

#include <bit>
#include <setjmp.h>
#include <stdint.h>
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

using std::isfinite;

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// All fibers run on one thread of the operating system, and so share thread_local variables.
#define __shared__ thread_local

struct uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { int x, y, z; };
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(uint32_t x) { return same_bits<float>(x); }
inline uint32_t __float_as_uint(float x) { return same_bits<uint32_t>(x); }
inline float __int_as_float(int x) { return same_bits<float>(x); }
inline int __clz(int x) { return std::countl_zero(uint32_t(x)); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fadd_rd(float a, float b) {
  double sum = double(a) + double(b);
  float rounded = float(sum);
  return double(rounded) > sum ? nextafterf(rounded, -INFINITY) : rounded;
}
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <class T>
inline T __ldg(const T* at) { return *at; }
template <class T>
inline T __ldcg(const T* at) { return *at; }
inline void __stcg(float4* at, float4 x) { *at = x; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }

namespace host {

struct Barrier {
  int arrived = 0, phase = 0;
};

constexpr int MOST_THREADS = 1024;
constexpr size_t STACK_BYTES = 256 << 10;

// The thread block that is running. Each of its threads is a fiber. ucontext starts a fiber; setjmp and longjmp, which
// cost no system call, switch between fibers.
struct Block {
  int threads = 0, current = 0;
  std::function<void()> body;
  bool started[MOST_THREADS], done[MOST_THREADS];
  jmp_buf fibers[MOST_THREADS], scheduler;
  Barrier all, warps[MOST_THREADS / 32];
  long steps = 0;  // completed barriers and ended fibers, to detect deadlocks
  uint32_t traded[MOST_THREADS];
};
inline Block block;
inline dim3 thread, place, grid{1, 1, 1};

inline void yield() {
  if (_setjmp(block.fibers[block.current]) == 0) _longjmp(block.scheduler, 1);
}

inline void meet(Barrier& barrier, int count) {
  int phase = barrier.phase;
  if (++barrier.arrived == count) {
    barrier.arrived = 0, ++barrier.phase, ++block.steps;
    return;
  }
  while (barrier.phase == phase) yield();
}

// An asynchronous operation that has been issued.
struct Operation {
  enum Kind { BULK_COPY, SCALES_COPY, PRODUCT, COMMIT } kind;
  uint32_t accumulator;  // of an MMA
  std::function<void()> execute;

  // Whether this operation is ordered after `earlier`, which was issued before it (PTX ISA, "tcgen05 Memory Consistency
  // Model", pipelined instructions). A copy of scales does not wait for MMAs that still read the old scales.
  bool follows(const Operation& earlier) const {
    bool tensor = earlier.kind == SCALES_COPY || earlier.kind == PRODUCT;
    if (kind == COMMIT) return tensor;
    return kind == PRODUCT && (earlier.kind == SCALES_COPY || (earlier.kind == PRODUCT && earlier.accumulator == accumulator));
  }
};
inline bool late = false, skewed = false;
inline std::vector<Operation> pending;
inline uint32_t choice = 1;

inline void issue(Operation::Kind kind, std::function<void()> execute, uint32_t accumulator = 0) {
  if (late) pending.push_back({kind, accumulator, std::move(execute)});
  else execute();
}

inline uint32_t random_below(uint32_t end) {
  choice = choice * 1664525u + 1013904223u;
  return (choice >> 8) % end;
}

// Executes one pending operation that need not wait for another. Returns false if no pending operation is ready.
inline bool execute_one() {
  std::vector<size_t> ready;
  for (size_t i = 0; i < pending.size(); ++i) {
    bool free = true;
    for (size_t before = 0; before < i; ++before) free &= !pending[i].follows(pending[before]);
    if (free) ready.push_back(i);
  }
  if (ready.empty()) return false;
  size_t chosen = ready[random_below(ready.size())];
  Operation operation = std::move(pending[chosen]);
  pending.erase(pending.begin() + chosen);
  operation.execute();
  return true;
}

// The tcgen05 fences that a thread still needs: `before`, ahead of its next synchronization with others, because it has
// accessed tensor memory; `after`, ahead of its next access to tensor memory, because it has synchronized.
struct TensorFences {
  bool before = false, after = false;
};
inline TensorFences tensor_fences[MOST_THREADS];
inline void synchronizes() {
  if (tensor_fences[block.current].before) fprintf(stderr, "thread %d lacks tcgen05.fence::before_thread_sync\n", block.current), abort();
}
inline void synchronized() { tensor_fences[block.current].after = true; }

inline void enter() {
  block.body();
  block.done[block.current] = true, ++block.steps;
  _longjmp(block.scheduler, 1);
}

inline void resume(int fiber) {
  static std::vector<std::unique_ptr<char[]>> stacks(MOST_THREADS);
  static ucontext_t context;
  block.current = fiber, thread.x = fiber;
  if (_setjmp(block.scheduler) != 0) return;
  if (block.started[block.current]) _longjmp(block.fibers[block.current], 1);
  block.started[block.current] = true;
  auto& stack = stacks[block.current];
  if (!stack) stack.reset(new char[STACK_BYTES]);
  getcontext(&context);
  context.uc_stack.ss_sp = stack.get(), context.uc_stack.ss_size = STACK_BYTES;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

inline void run(dim3 at, int threads, std::function<void()> body) {
  block.threads = threads, block.body = std::move(body), block.all = Barrier(), place = at;
  for (Barrier& warp : block.warps) warp = Barrier();
  for (int i = 0; i < threads; ++i) block.started[i] = block.done[i] = false, tensor_fences[i] = {};
  // In a round each thread runs until it waits. With `skewed`, warps skip rounds at random, so that they drift far
  // apart.
  for (bool under_way = true; under_way;) {
    under_way = false;
    bool skipped = false, skips = false;
    long before = block.steps;
    for (int i = 0; i < threads; ++i) {
      if (i % 32 == 0) skips = skewed && random_below(3) == 0;
      if (block.done[i]) continue;
      under_way = true;
      if (skips) skipped = true;
      else resume(i);
    }
    if (skipped) {
      if (random_below(4) == 0) execute_one();
    } else if (under_way && block.steps == before && !execute_one()) {
      fprintf(stderr, "block %d, %d, %d: threads wait at a barrier that other threads never reach\n", at.x, at.y, at.z);
      abort();
    }
  }
  if (!pending.empty()) fprintf(stderr, "block %d ended before its asynchronous operations\n", at.x), abort();
}
inline void run(int index, int threads, std::function<void()> body, int row = 0) { run({index, row, 0}, threads, std::move(body)); }

}  // namespace host

#define threadIdx host::thread
#define blockIdx host::place
#define gridDim host::grid  // for grid-stride loops
#define blockDim dim3{host::block.threads, 1, 1}

inline void __syncthreads() {
  host::synchronizes();
  host::meet(host::block.all, host::block.threads);
  host::synchronized();
}
inline int __syncthreads_or(int value) {
  host::block.traded[host::block.current] = uint32_t(value);
  __syncthreads();
  int any = 0;
  for (int thread = 0; thread < host::block.threads; ++thread) any |= int(host::block.traded[thread]);
  __syncthreads();
  return any;
}
inline void __syncwarp(uint32_t = ~0u) { host::meet(host::block.warps[host::block.current / 32], 32); }

template <class T>
inline T __shfl_sync(uint32_t, T value, int from, int width = 32) {
  int own = host::block.current, lane = own % 32;
  host::block.traded[own] = same_bits<uint32_t>(value);
  __syncwarp();
  uint32_t got = host::block.traded[own - lane + lane / width * width + from % width];
  __syncwarp();
  return same_bits<T>(got);
}
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T value, int lanes) {
  return __shfl_sync(mask, value, host::block.current % 32 ^ lanes);
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value) {
  for (int lanes = 1; lanes < 32; lanes *= 2) value = max(value, __shfl_xor_sync(mask, value, lanes));
  return value;
}
inline uint32_t atomicMax(uint32_t* at, uint32_t value) {
  uint32_t before = *at;
  *at = max(before, value);
  return before;
}
template <class T>
inline T atomicAdd(T* at, T value) {
  T before = *at;
  *at += value;
  return before;
}
inline void __threadfence() {}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  uint32_t all = 0;
  for (int lane = 0; lane < 32; ++lane) all |= __shfl_sync(~0u, uint32_t(value), lane) << lane;
  return all;
}
inline uint32_t __reduce_add_sync(uint32_t, uint32_t value) {
  uint32_t sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += __shfl_sync(~0u, value, lane);
  return sum;
}
inline int __popc(uint32_t x) { return std::popcount(x); }
inline bool __any_sync(uint32_t mask, bool value) {
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) any |= __shfl_sync(mask, uint32_t(value), lane) != 0;
  return any;
}

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selectors) {
  uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(bytes >> (8 * (selectors >> (4 * i) & 7)) & 0xff) << (8 * i);
  return out;
}
inline uint32_t __vsub4(uint32_t a, uint32_t b) {
  uint32_t out = 0;
  for (int i = 0; i < 32; i += 8) out |= (((a >> i) - (b >> i)) & 0xff) << i;
  return out;
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  uint32_t low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff, high = a >> 16 > b >> 16 ? a >> 16 : b >> 16;
  return high << 16 | low;
}
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 32; i += 8) sum += int(int8_t(uint32_t(a) >> i)) * int(int8_t(uint32_t(b) >> i));
  return sum;
}
