// WarpgroupScores extends a policy of scores_sm80.cuh for Hopper. A warpgroup computes S^T of 64 keys and a tile of 64
// queries.
//
// In addition to the members in scores_sm80.cuh, a policy has:
// - Sums: the accumulators of S^T.
// - start: issues S^T, with K in shared memory or in registers as KeyFragments, which read_keys loads.
// - load_by_bulk: called by one thread. If S uses INT8 values, issues the bulk copy of a tile's INT8 Q (BULK_BYTES),
//   and the copy of its scale to the address `scale_to`.
// - ARRIVALS: how often the thread that issues bulk copies arrives at a tile's mbarrier. 1, or 2 if S uses INT8 values:
//   the second arrival is for the scale.
// - factor_at: the factor from a tile's sums to base-2 logits. If S uses INT8 values, it includes the scale of Q.
#pragma once

#include <sage/attention/panels.cuh>
#include <sage/attention/numerics/scores_sm80.cuh>

namespace sage::attention {

template <class S>
struct WarpgroupScores;

template <class T, int D>
struct WarpgroupScores<ScoresOfRows<T, D>> : ScoresOfRows<T, D> {
  using Sums = float[8][4];
  static constexpr int BULK_BYTES = 0, ARRIVALS = 1;
  static __device__ __forceinline__ void load_by_bulk(uint32_t, uint32_t, const params::Backward&, const QueryTile&, uint32_t) {}
  template <int KEYS>
  static __device__ __forceinline__ void start(Sums& sums, uint32_t keys, uint32_t q_rows, uint32_t, uint32_t, int warpgroup) {
    multiply_rows<T, D, KEYS, false>(sums, keys + warpgroup * TILE * 128, q_rows);
  }
  using KeyFragments = uint32_t[D / 16][4];
  static __device__ __forceinline__ void read_keys(KeyFragments& k, uint32_t keys, uint32_t, int first) {
    read_rows<128>(k, keys, first);
  }
  static __device__ __forceinline__ void start(Sums& sums, const KeyFragments& k, uint32_t q_rows, uint32_t) {
    multiply_rows<T, false>(sums, k, q_rows);
  }
  static __device__ __forceinline__ float factor_at(float k_factor, const float*) { return k_factor; }
};

template <class T, int D>
struct WarpgroupScores<ScoresOfCodes<T, D>> : ScoresOfCodes<T, D> {
  using Sums = int[8][4];
  static constexpr int BULK_BYTES = TILE * D, ARRIVALS = 2;
  static __device__ __forceinline__ void load_by_bulk(uint32_t to, uint32_t scale_to, const params::Backward& p,
                                                      const QueryTile& tile, uint32_t mbarrier) {
    ptx::cp_async_bulk(to, p.codes.q + int64_t(tile.padded) * BULK_BYTES, BULK_BYTES, mbarrier);
    ptx::cp_async_4(scale_to, p.codes.q_dequant_scale + tile.padded);
    ptx::mbarrier_arrive_on_copies(mbarrier, true);
  }
  template <int KEYS>
  static __device__ __forceinline__ void start(Sums& sums, uint32_t, uint32_t, uint32_t k_codes, uint32_t q_codes, int warpgroup) {
    multiply_codes<D / 32>(sums, code_descriptor<D>(k_codes + warpgroup * TILE * D), code_descriptor<D>(q_codes));
  }
  using KeyFragments = uint32_t[D / 32][4];
  static __device__ __forceinline__ void read_keys(KeyFragments& k, uint32_t, uint32_t k_codes, int first) {
    read_rows<D>(k, k_codes, first);
  }
  static __device__ __forceinline__ void start(Sums& sums, const KeyFragments& k, uint32_t, uint32_t q_codes) {
    multiply_codes<D / 32>(sums, k, code_descriptor<D>(q_codes));
  }
  static __device__ __forceinline__ float factor_at(float k_factor, const float* q_dequant_scale) { return k_factor * *q_dequant_scale; }
};

}  // namespace sage::attention
