// The backward walk on Hopper: the same as backward.cuh, with a part for each warpgroup. Two have 64 keys each, and do
// nothing but scores, dV and dK; the third fetches tiles of queries, and adds what they give to dQ. Nobody waits for all:
// a keys' group meets the third at two barriers a tile, one where the tile has come (and the slot of dS that it will be
// written to is free), one where its scores are done. Registers go to those who need them.
#pragma once

#include <sage/attention/backward.cuh>

namespace sage::attention {

constexpr int ROLES_THREADS = 384;

// Barriers for each parity of tiles and each of the two groups; 0 is __syncthreads.
enum Meeting : int { READY = 1, DONE = 5, KEYS_CAME = 9, ADDERS = 10 };
__device__ __forceinline__ int meeting(Meeting kind, int tile, int group) { return kind + (tile & 1) * 2 + group; }

// Numerics has, besides what backward.cuh says: add_dq_alone(tile, slot, sums), by one warpgroup; it loads with 128 threads.
template <class Numerics>
__device__ __forceinline__ void backward_with_roles(const params::Backward& p) {
  using Plan = typename Numerics::Plan;
  extern __shared__ __align__(1024) unsigned char shared[];
  const params::Shape& shape = p.shape;
  BackwardBlock block(shape, backward_index(p), Plan::KEYS);
  if (block.first_key >= block.segment.key_len) return;
  int first_tile, iterations = count_tiles(shape, block, first_tile);
  QueryTile tile(shape, block, first_tile);
  Numerics numerics(p, block, shared);
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

  if (group == 2) {
    ptx::fewer_registers<120>();
    DqSums sums{p.dq_sums, p.turns, block.first_key / Plan::KEYS, 256, 128, ADDERS};
    QueryTile next = tile;  // to be fetched
    int thread = threadIdx.x - 256;
    auto fetch = [&](int number) {
      if (number < iterations) numerics.load(next, number & 1, thread);
      ptx::copy_commit();
      next.advance(shape, block, first_tile);
    };
    fetch(0);
    __syncthreads();  // the keys
    int past = 0;
    for (int i = 0; i <= iterations; ++i) {
      if (i < iterations) {
        ptx::copy_wait<0>();
        ptx::wgmma_publish();
        ptx::arrive(meeting(READY, i, 0), 256);
        ptx::arrive(meeting(READY, i, 1), 256);
      }
      if (i > 0) {
        ptx::barrier(meeting(DONE, i - 1, 0), 256);
        ptx::barrier(meeting(DONE, i - 1, 1), 256);
      }
      fetch(i + 1);
      if (i > 0) {
        sums.wait(past);
        numerics.add_dq_alone(past, i - 1 & 1, sums);
        sums.pass_on(past);
      }
      past = tile.padded;
      tile.advance(shape, block, first_tile);
    }
  } else {
    ptx::more_registers<192>();
    numerics.load_keys();
    ptx::copy_commit();
    ptx::copy_wait<0>();
    ptx::barrier(KEYS_CAME, 256);
    numerics.keys_arrived();
    ptx::wgmma_publish();
    __syncthreads();
    for (int i = 0; i < iterations; ++i) {
      ptx::barrier(meeting(READY, i, group), 256);
      walk_scores(numerics, block, tile, i & 1, i & 1);
      ptx::arrive(meeting(DONE, i, group), 256);
      tile.advance(shape, block, first_tile);
    }
    store_keys(numerics, p, block);
  }
}

}  // namespace sage::attention
