// Tiles, or whatever else is fetched piece by piece, on their way: a pipeline of stages in shared memory, on Hopper. Number n, 0
// and on, goes to stage n % STAGES. Each stage has two barriers: `full` opens when its tile has come, `empty` when all who
// read it are done.
#pragma once

#include <sage/ptx/memory.cuh>

namespace sage::attention {

template <int STAGES>
struct Pipeline {
  struct Barriers {
    uint64_t full[STAGES], empty[STAGES];
  };
  uint32_t barriers;

  __device__ __forceinline__ explicit Pipeline(const Barriers& at) : barriers(ptx::shared_address(&at)) {}
  // By one thread. `fetching`: how many times threads tell of a tile's copies; `reading`: how many times readers say that
  // they are done, once a warp by `release`.
  __device__ __forceinline__ void prepare(int fetching, int reading) const {
    for (int n = 0; n < STAGES; ++n) ptx::mbarrier_init(full(n), fetching), ptx::mbarrier_init(empty(n), reading);
  }
  static __device__ __forceinline__ int stage(int n) { return uint32_t(n) % STAGES; }
  static __device__ __forceinline__ int round(int n) { return uint32_t(n) / STAGES; }
  __device__ __forceinline__ uint32_t full(int n) const { return barriers + stage(n) * 8; }
  __device__ __forceinline__ uint32_t empty(int n) const { return barriers + (STAGES + stage(n)) * 8; }

  // Until the tile has come.
  __device__ __forceinline__ void wait(int n) const { ptx::mbarrier_wait(full(n), round(n)); }
  // Until its stage may be filled.
  __device__ __forceinline__ void wait_empty(int n) const {
    if (n >= STAGES) ptx::mbarrier_wait(empty(n), round(n) - 1);
  }
  // This warp is done with the tile.
  __device__ __forceinline__ void release(int n) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty(n));
  }
};

}  // namespace sage::attention
