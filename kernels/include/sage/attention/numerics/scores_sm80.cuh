// Policies for a backward whose matmuls run in 16 bit, possibly except S^T = K Q^T. The operands of S^T are 16-bit rows
// of K and Q, or their INT8 values (SageBwd whose backward computes only S in INT8).
//
// A policy has:
// - KEY_BYTES, TILE_BYTES: bytes of shared memory for the INT8 values of one key, and of one query tile; 0 if S uses
//   the 16-bit rows.
// - load_keys, load: issue the asynchronous copies of the INT8 values.
// - multiply: computes the sums of S^T for a warp's 16 keys and 64 queries.
// - factor: converts a sum to a base-2 logit. k_factor: the part of the factor that does not depend on the
//   tile of queries.
#pragma once

#include <sage/attention/numerics/score_codes_sm80.cuh>

namespace sage::attention {

template <class T, int D>
struct ScoresOfRows {
  static constexpr int KEY_BYTES = 0, TILE_BYTES = 0;

  template <int KEYS, int THREADS>
  static __device__ __forceinline__ void load_keys(uint32_t, const params::Backward&, const BackwardBlock&) {}
  template <int THREADS>
  static __device__ __forceinline__ void load(uint32_t, const params::Backward&, const QueryTile&, int) {}
  static __device__ __forceinline__ void multiply(Scores& s, uint32_t k_rows, uint32_t q_rows, uint32_t, uint32_t, int, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = 0.0f;
    multiply_scores<T, D>(s, k_rows, q_rows, lane);
  }
  static __device__ __forceinline__ float k_factor(const params::Backward& p, const BackwardBlock&, int) {
    return p.shape.softmax_scale * ptx::LOG2_E;
  }
  static __device__ __forceinline__ float factor(const params::Backward& p, const BackwardBlock& block, const QueryTile&, int part) {
    return k_factor(p, block, part);
  }
};

template <class T, int D>
struct ScoresOfCodes {
  static constexpr int KEY_BYTES = D, TILE_BYTES = TILE * D;

  template <int KEYS, int THREADS>
  static __device__ __forceinline__ void load_keys(uint32_t to, const params::Backward& p, const BackwardBlock& block) {
    copy_key_tiles<KEYS / TILE, D, THREADS>(to, p, block);
  }
  template <int THREADS>
  static __device__ __forceinline__ void load(uint32_t to, const params::Backward& p, const QueryTile& tile, int thread) {
    copy_tile<TILE_BYTES, THREADS>(to, p.codes.q + int64_t(tile.padded) * TILE_BYTES, thread);
  }
  static __device__ __forceinline__ void multiply(Scores& s, uint32_t, uint32_t, uint32_t k_codes, uint32_t q_codes, int warp,
                                                  int lane) {
    int x[8][4];
    multiply_score_codes<D>(x, k_codes + warp * 16 * D, q_codes, lane);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = __int_as_float(x[n][e]) - quant::MAGIC;
  }
  static __device__ __forceinline__ float k_factor(const params::Backward& p, const BackwardBlock& block, int part) {
    return k_dequant_of(p, block, part) * (p.shape.softmax_scale * ptx::LOG2_E);
  }
  static __device__ __forceinline__ float factor(const params::Backward& p, const BackwardBlock& block, const QueryTile& tile,
                                                 int part) {
    return __ldg(p.codes.q_dequant_scale + tile.padded) * k_factor(p, block, part);
  }
};

// Subtracts the mean over tokens from the rows of K in shared memory. `at(row, chunk)` is the byte offset of a chunk of
// 8 channels from `memory`.
// Rows beyond the last key do not matter, because their dS is 0. Does nothing for unquantized attention, which has no
// mean. The rows have CHANNELS channels from `first_channel` on.
// Without the subtraction, row i of dQ = dS K would contain (sum of row i of dS) * mean. The sum is not exactly zero if
// O and P are inexact.
template <class T, int KEYS, int D, int THREADS, int CHANNELS = D, class At>
__device__ __forceinline__ void subtract_key_mean(unsigned char* memory, const params::Backward& p, const BackwardBlock& block, At at,
                                                  int first_channel = 0) {
  if (!p.codes.k_mean) return;
  const float* mean = p.codes.k_mean + (int64_t(block.key_head) * p.shape.segment_count + block.segment_index) * D + first_channel;
  for (int i = threadIdx.x; i < KEYS * CHANNELS / 8; i += THREADS) {
    uint4& words = *reinterpret_cast<uint4*>(memory + at(i / (CHANNELS / 8), i % (CHANNELS / 8)));
    float x[8];
    unpack_8<T>(words, x);
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] -= __ldg(mean + i % (CHANNELS / 8) * 8 + c);
    words = pack_8<T>(x);
  }
}

}  // namespace sage::attention
