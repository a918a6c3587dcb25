// SageBwd forward on Hopper: what sagebwd_forward.cuh computes, without Q smoothing.
#pragma once

#include <sage/attention/forward_roles.cuh>
#include <sage/quant/codes.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM>
struct SageBwdForwardRoles {
  using Type = T;
  static constexpr int D = HEAD_DIM;
  using Roles = ForwardRoles<D>;
  static constexpr int ARRIVALS = 2;  // of one thread: bulk copies, and scales
  static constexpr int ADDS = D / 64;
  // Shared memory: Q; stages of K, V^T; scales of each stage.
  static constexpr int TILE_BYTES = TILE * D, Q_BYTES = Roles::QUERIES * D;
  static constexpr int SCALES_AT = Q_BYTES + Roles::STAGES * 2 * TILE_BYTES;
  static constexpr int SHARED_BYTES = SCALES_AT + Roles::STAGES * 8;

  const params::Forward& p;
  const ForwardBlock& block;
  unsigned char* memory;
  uint32_t shared;

  __device__ __forceinline__ SageBwdForwardRoles(const params::Forward& p, const ForwardBlock& b, unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)) {}

  __device__ __forceinline__ uint32_t k_tile(int stage) const { return shared + Q_BYTES + stage * 2 * TILE_BYTES; }

  // In the padded buffers; that of a group beyond the end is read from the last tile, and never stored.
  __device__ __forceinline__ int64_t query_tile(int group) const {
    int tile = min(block.first / TILE + group, block.segment.query_tiles() - 1);
    return int64_t(block.head) * p.shape.query_tiles + block.segment.query_tile + tile;
  }

  __device__ __forceinline__ void load_queries(int group, int thread) {
    copy_tile<TILE_BYTES, GROUP_THREADS>(shared + group * TILE_BYTES, p.codes.q + query_tile(group) * TILE_BYTES, thread);
  }

  __device__ __forceinline__ void load(int tile, int stage, int thread, uint32_t landing) {
    if (thread != 0) return;
    int64_t at = int64_t(block.key_head(p.shape)) * p.shape.key_tiles + block.segment.key_tile + tile;
    ptx::landing_expect(landing, 2 * TILE_BYTES);
    ptx::bulk_copy(k_tile(stage), p.codes.k + at * TILE_BYTES, TILE_BYTES, landing);
    ptx::bulk_copy(k_tile(stage) + TILE_BYTES, p.codes.v_transposed + at * TILE_BYTES, TILE_BYTES, landing);
    ptx::copy_4(shared + SCALES_AT + stage * 8, p.codes.k_scale + at);
    ptx::copy_4(shared + SCALES_AT + stage * 8 + 4, p.codes.v_scale + at);
    ptx::landing_copies(landing, true);
  }

  struct Part {
    const SageBwdForwardRoles& of;
    int group;
    float q_factor;  // q dequant_scale * softmax_scale * log2 e
    Softmax<D, 1, GROUP_THREADS, false> rows;
    int x[8][4];           // S
    float s[1][8][4];      // P, in units of its codes
    uint32_t codes[2][4];  // of P under way, one scale a row
    float dequant[2], next_dequant[2];
    int y[D / 64][8][4];  // P V under way
    bool behind;
    float decay[2];

    __device__ __forceinline__ Part(const SageBwdForwardRoles& numerics, int group)
        : of(numerics), group(group),
          q_factor(of.p.codes.q_scale[of.query_tile(group)] * (of.p.shape.softmax_scale * ptx::LOG2_E)), rows(nullptr) {}

    __device__ __forceinline__ void start(int stage) {
      multiply_codes<D / 32>(x, ptx::row_descriptor<D>(of.shared + group * TILE_BYTES), ptx::row_descriptor<D>(of.k_tile(stage)));
    }

    template <bool HIDES, int PENDING>
    __device__ __forceinline__ void softmax(int tile, int stage, const Segment& segment, int first) {
      int lane = threadIdx.x % 32;
      float2 scales = *reinterpret_cast<const float2*>(of.memory + SCALES_AT + stage * 8);
      // A tile of zeros has scale 0; any factor then gives logits of 0, and minus infinity stays what it is.
      float factor = q_factor * scales.x;
      if (factor == 0.0f) factor = 1e-30f;
      ptx::wgmma_wait<PENDING>(x);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[0][n][e] = float(x[n][e]);
      if constexpr (HIDES) mask(s, segment, first + threadIdx.x / 32 % 4 * 16, tile * TILE, lane, -CUDART_INF_F);
      float row_max[2], offset[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (HIDES) {
          float largest = -CUDART_INF_F;
#pragma unroll
          for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fmaxf(s[0][n][2 * r], s[0][n][2 * r + 1]));
          row_max[r] = quad_max(largest) * factor;
        } else {
          int largest = x[0][2 * r];
#pragma unroll
          for (int n = 0; n < 8; ++n) largest = max(max(largest, x[n][2 * r]), x[n][2 * r + 1]);
          row_max[r] = float(quad_max(largest)) * factor;
        }
        // 2^(x factor + offset) is 127 at the row's largest logit.
        offset[r] = HIDES && row_max[r] == -CUDART_INF_F ? 0.0f : quant::LOG2_127 - row_max[r];
      }
      behind = rows.catch_up(row_max, decay);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& p = s[0][n][2 * r + e];
            p = ptx::exp2(fmaf(p, factor, offset[r]));
            sum += p;
          }
        float p_dequant = ptx::exp2(-offset[r] - rows.shift(r));
        if (HIDES && row_max[r] == -CUDART_INF_F) p_dequant = 0.0f;
        // The sum is of the unquantized probabilities.
        rows.state(rows.state.SUM, r) += p_dequant * sum;
        next_dequant[r] = p_dequant * scales.y;
      }
    }

    __device__ __forceinline__ void add(int stage) {
#pragma unroll
      for (int panel = 0; panel < D / 64; ++panel)
        multiply_codes<2>(y[panel], codes, ptx::row_descriptor<TILE>(of.k_tile(stage) + TILE_BYTES + panel * 64 * TILE));
    }
    __device__ __forceinline__ void added() {
      ptx::wgmma_wait<0>(y[0]);
#pragma unroll
      for (int panel = 0; panel < D / 64; ++panel) {
        if (panel > 0) ptx::hold(y[panel]);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& sum = rows.acc[0][panel * 8 + n][e];
            sum = fmaf(float(y[panel][n][e]), dequant[e >> 1], sum);
          }
      }
    }

    __device__ __forceinline__ void take() {
      if (__builtin_expect(behind, false)) rows.rescale(decay);
      dequant[0] = next_dequant[0], dequant[1] = next_dequant[1];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int n = 4 * i + 2 * (j / 2), h = 2 * (j & 1);
          codes[i][j] = quant::codes_up_to_127(s[0][n][h], s[0][n][h + 1], s[0][n + 1][h], s[0][n + 1][h + 1]);
        }
    }
  };
};

}  // namespace sage::attention
