// include/sage/ptx/memory.cuh on a CPU: shared memory is an array, and addresses are offsets into the array. Static
// shared memory of kernels is outside the array.
#pragma once

#include <cuda_on_host.h>

#include <map>

namespace sage::attention {
inline thread_local __attribute__((aligned(1024))) unsigned char shared[227 << 10];
inline size_t shared_bytes = 0;  // requested by the launch
}
namespace sage::past_linear {
inline thread_local __attribute__((aligned(1024))) unsigned char shared[sizeof attention::shared];
}

namespace host {

// An mbarrier. A phase needs `arrivals` arrivals. The current phase still lacks `missing` arrivals and `bytes` bytes.
struct Mbarrier {
  int arrivals = 0, missing = 0, bytes = 0, completed = 0;
  void arrive(int count, int more_bytes) {
    missing -= count, bytes += more_bytes;
    if (missing < 0) fprintf(stderr, "more arrivals than an mbarrier was made for\n"), abort();
    if (missing == 0 && bytes == 0) missing = arrivals, ++completed, ++block.steps;
  }
};
inline std::map<uint32_t, Mbarrier> mbarriers;

// Shared memory as the async proxy sees it, and the stores of each thread since its last fence of the async proxy.
inline unsigned char async_memory[sizeof sage::attention::shared];
inline std::vector<std::pair<uint32_t, int>> unfenced[MOST_THREADS];

// The shared memory of the kernels that run. A program whose kernels are in another namespace than
// sage::attention sets this to the array `shared` of that namespace.
inline unsigned char* memory = sage::attention::shared;

// Runs one thread block with `shared_bytes` of shared memory, filled with NaN. Aborts if a write is beyond these bytes.
inline void run_with_shared(dim3 at, int threads, size_t shared_bytes, std::function<void()> body) {
  sage::attention::shared_bytes = shared_bytes;
  memset(memory, 0xff, sizeof sage::attention::shared);
  mbarriers.clear();
  memset(async_memory, 0xff, sizeof async_memory);
  for (auto& stores : unfenced) stores.clear();
  run(at, threads, std::move(body));
  for (size_t i = shared_bytes; i < sizeof sage::attention::shared; ++i)
    if (memory[i] != 0xff) fprintf(stderr, "block %d wrote beyond its shared memory\n", at.x), abort();
}
inline void run_with_shared(int index, int threads, size_t shared_bytes, std::function<void()> body) {
  run_with_shared(dim3{index, 0, 0}, threads, shared_bytes, std::move(body));
}

}  // namespace host

namespace sage::ptx {

inline uint32_t shared_address(const void* pointer) {
  return uint32_t(static_cast<const unsigned char*>(pointer) - host::memory);
}
// The memory at `address`, a multiple of `aligned`. Its first `aligned` bytes must be in the launch's shared memory.
inline unsigned char* at_shared(uint32_t address, uint32_t aligned) {
  if (address + aligned > attention::shared_bytes || address % aligned) {
    fprintf(stderr, "shared memory has no %u bytes at %u\n", aligned, address);
    abort();
  }
  return host::memory + address;
}
inline void cp_async_16(uint32_t shared, const void* global, bool valid) {
  if (valid) memcpy(at_shared(shared, 16), global, 16);
  else memset(at_shared(shared, 16), 0, 16);
}
inline void cp_async_4(uint32_t shared, const void* global) { memcpy(at_shared(shared, 4), global, 4); }
// A store by the calling thread. The async proxy does not see it before the thread's fence.
inline void store(uint32_t shared, const void* from, int bytes) {
  memcpy(at_shared(shared, bytes), from, bytes);
  host::unfenced[host::block.current].push_back({shared, bytes});
}
inline void store_16(uint32_t shared, uint4 words) { store(shared, &words, 16); }
inline void store_4(uint32_t shared, uint32_t word) { store(shared, &word, 4); }
inline uint4 load_16(uint32_t shared) {
  uint4 words;
  memcpy(&words, at_shared(shared, 16), 16);
  return words;
}
inline void cp_async_commit() {}
template <int PENDING>
inline void cp_async_wait() {}

// PTX ISA, "Warp-level matrix load instruction: ldmatrix": lanes 8i to 8i + 7 provide the addresses of the rows of
// matrix i; lane (g, t) receives bytes 4t to 4t + 3 of row g.
inline void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    uint32_t row = __shfl_sync(~0u, address, 8 * i + lane / 4);
    memcpy(&r[i], at_shared(row, 16) + lane % 4 * 4, 4);
  }
}
// ldmatrix with .trans: lane (g, t) receives the 16-bit elements of rows 2t and 2t + 1 in column g.
inline void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    uint32_t even = __shfl_sync(~0u, address, 8 * i + lane % 4 * 2), odd = __shfl_sync(~0u, address, 8 * i + lane % 4 * 2 + 1);
    uint16_t low, high;
    memcpy(&low, at_shared(even, 16) + lane / 4 * 2, 2), memcpy(&high, at_shared(odd, 16) + lane / 4 * 2, 2);
    r[i] = low | uint32_t(high) << 16;
  }
}
inline void stmatrix(const uint32_t (&r)[4], uint32_t address, int lane) {
  for (int i = 0; i < 4; ++i) {
    uint32_t row = __shfl_sync(~0u, address, 8 * i + lane / 4);
    memcpy(at_shared(row, 16) + lane % 4 * 4, &r[i], 4);
  }
  __syncwarp();
}

inline host::Mbarrier& mbarrier_at(uint32_t address) {
  auto found = host::mbarriers.find(address);
  if (found == host::mbarriers.end()) fprintf(stderr, "no mbarrier was initialized at %u\n", address), abort();
  return found->second;
}
inline bool elect() { return threadIdx.x % 32 == 0; }

inline void mbarrier_init(uint32_t address, int arrivals) { host::mbarriers[address] = {arrivals, arrivals}; }
inline void mbarrier_arrive(uint32_t address) {
  host::synchronizes();
  mbarrier_at(address).arrive(1, 0);
}
inline void mbarrier_arrive_expect_tx(uint32_t address, int bytes) { mbarrier_at(address).arrive(1, bytes); }
inline void mbarrier_wait(uint32_t address, int phase) {
  while (mbarrier_at(address).completed % 2 == (phase & 1)) host::yield();
  host::synchronized();
}
inline void cp_async_bulk(uint32_t shared, const void* global, int bytes, uint32_t address) {
  at_shared(shared + bytes - 16, 16);
  if (bytes % 16 || shared % 16 || reinterpret_cast<uintptr_t>(global) % 16) fprintf(stderr, "a bulk copy is not aligned\n"), abort();
  host::issue(host::Operation::BULK_COPY, [=] {
    memcpy(host::memory + shared, global, bytes), memcpy(host::async_memory + shared, global, bytes);
    mbarrier_at(address).arrive(0, -bytes);
  });
}
inline void fence_proxy_async() {
  for (auto [at, bytes] : host::unfenced[host::block.current]) memcpy(host::async_memory + at, host::memory + at, bytes);
  host::unfenced[host::block.current].clear();
}
inline void cp_async_wait_all() {}
inline void red_add_4(float* at, float a, float b, float c, float d) { at[0] += a, at[1] += b, at[2] += c, at[3] += d; }
inline int load_acquire(const int* at) { return *at; }
inline void add_release(int* at, int value) { *at += value; }
// The kernels that run here need named barriers only if dQ is summed in a fixed order, which no program here requests.
inline void named_barrier_sync(int, int) { fprintf(stderr, "named barriers are not emulated\n"), abort(); }

}  // namespace sage::ptx
