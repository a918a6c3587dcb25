// A multi-stage producer/consumer pipeline in shared memory, from Hopper on. Tile (or work item) n = 0, 1, .. uses
// stage n % STAGES. Each stage has two mbarriers: a phase of `full` completes when the tile's copies have arrived, and
// a phase of `empty` completes when all consumers have released the stage.
#pragma once

#include <sage/ptx/memory.cuh>

namespace sage::tile {

template <int STAGES>
struct Pipeline {
  struct Barriers {
    uint64_t full[STAGES], empty[STAGES];
  };
  uint32_t barriers;

  __device__ __forceinline__ explicit Pipeline(const Barriers& at) : barriers(ptx::shared_address(&at)) {}
  // Initializes the mbarriers; one thread calls it. `fetching`: the producer's arrivals at `full` for each tile.
  // `reading`: the consumers' arrivals at `empty` for each tile, one per warp if they call `release`.
  __device__ __forceinline__ void prepare(int fetching, int reading) const {
    for (int n = 0; n < STAGES; ++n) ptx::mbarrier_init(full(n), fetching), ptx::mbarrier_init(empty(n), reading);
  }
  static __device__ __forceinline__ int stage(int n) { return uint32_t(n) % STAGES; }
  static __device__ __forceinline__ int round(int n) { return uint32_t(n) / STAGES; }
  __device__ __forceinline__ uint32_t full(int n) const { return barriers + stage(n) * 8; }
  __device__ __forceinline__ uint32_t empty(int n) const { return barriers + (STAGES + stage(n)) * 8; }

  // A consumer waits until tile n has arrived.
  __device__ __forceinline__ void wait(int n) const { ptx::mbarrier_wait(full(n), round(n)); }
  // The producer waits until the stage of tile n is empty, which is when tile n - STAGES is released.
  __device__ __forceinline__ void wait_empty(int n) const {
    if (n >= STAGES) ptx::mbarrier_wait(empty(n), round(n) - 1);
  }
  // The producer waits until the consumers have released all tiles before tile n.
  __device__ __forceinline__ void drain(int n) const {
    for (int i = 0; i < STAGES; ++i) wait_empty(n + i);
  }
  // Arrives at `full` of tile n for the calling warp, which is one of the producers: its lane 0 arrives once all lanes
  // have written.
  __device__ __forceinline__ void publish(int n) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(full(n));
  }
  // Releases tile n for the calling warp: its lane 0 arrives once all lanes have read.
  __device__ __forceinline__ void release(int n) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty(n));
  }
};

}  // namespace sage::tile
