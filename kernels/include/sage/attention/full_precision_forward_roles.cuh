// The forward of 16-bit operands on Hopper, with f32 sums: full precision, and Attn-QAT, whose operands hold NVFP4 values.
#pragma once

#include <sage/attention/forward_roles.cuh>
#include <sage/attention/probabilities.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, class P = PlainProbabilities, int GROUPS = USUAL_GROUPS<HEAD_DIM>>
struct FullPrecisionForwardRoles {
  using Type = T;
  static constexpr int D = HEAD_DIM, OUTPUTS = P::OUTPUTS;
  // With two outputs the fetching group gets by with less, and leaves some values in memory.
  using Roles = ForwardRoles<D, 1, OUTPUTS == 2 ? (GROUPS == 3 ? 32 : 56) : (GROUPS == 3 ? 56 : 72), GROUPS>;
  static constexpr int FETCH_THREADS = GROUP_THREADS, QUERY_ARRIVALS = FETCH_THREADS, STEP_ARRIVALS = FETCH_THREADS;
  static constexpr bool ORDINARY_COPIES = true;
  static constexpr bool VALUES_FIRST = false;
  // Shared memory: Q, twice; stages of K and V.
  static constexpr int TILE_BYTES = TILE * D * 2, Q_BYTES = Roles::GROUPS * TILE_BYTES;
  static constexpr int SHARED_BYTES = 2 * Q_BYTES + Roles::STAGES * 2 * TILE_BYTES;

  const params::Forward& p;
  const ForwardBlock& block;
  uint32_t shared;

  __device__ __forceinline__ FullPrecisionForwardRoles(const params::Forward& p, const ForwardBlock& b, void* memory)
      : p(p), block(b), shared(ptx::shared_address(memory)) {}

  __device__ __forceinline__ uint32_t k_tile(int stage) const { return shared + 2 * Q_BYTES + stage * 2 * TILE_BYTES; }
  // Each group's queries in panels of their own.
  __device__ __forceinline__ uint32_t q_rows(int slot, int group) const {
    return shared + slot * Q_BYTES + group * TILE_BYTES;
  }

  __device__ __forceinline__ void load_queries(int slot, int thread, uint32_t landing) {
    const Segment& s = block.segment;
    Rows<T> q(p.q, s.batch, s.query_start, block.head, s.query_len, p.shape.head_dim);
#pragma unroll 1
    for (int group = 0; group < Roles::GROUPS; ++group)
      copy_panels<TILE, D, GROUP_THREADS>(q_rows(slot, group), q, block.first + group * TILE, thread);
    ptx::landing_copies(landing, q.vector);
  }

  __device__ __forceinline__ void load(int tile, int stage, int thread, uint32_t landing) {
    const Segment& s = block.segment;
    int head = block.key_head(p.shape);
    Rows<T> k(p.k, s.batch, s.key_start, head, s.key_len, p.shape.head_dim);
    Rows<T> v(p.v, s.batch, s.key_start, head, s.key_len, p.shape.head_dim);
    copy_panels<TILE, D, GROUP_THREADS>(k_tile(stage), k, tile * TILE, thread);
    copy_panels<TILE, D, GROUP_THREADS>(k_tile(stage) + TILE_BYTES, v, tile * TILE, thread);
    ptx::landing_copies(landing, k.vector && v.vector);
  }

  struct Part {
    const FullPrecisionForwardRoles& of;
    uint32_t q_rows;
    Softmax<D, 1, GROUP_THREADS, false, OUTPUTS, P::SLACK> rows;
    float s[1][8][4];  // S, then P
    uint32_t probabilities[OUTPUTS][1][4][4];
    typename P::template RowScales<T> scales[2];
    bool behind;
    float decay[2];

    __device__ __forceinline__ Part(const FullPrecisionForwardRoles& numerics, int slot, int group)
        : of(numerics), q_rows(of.q_rows(slot, group)), rows(nullptr) {}

    __device__ __forceinline__ void start(int stage) {
      multiply_rows<T, D, 64, false>(s[0], q_rows, of.k_tile(stage));
    }

    template <bool HIDES, int PENDING>
    __device__ __forceinline__ void softmax(int tile, int, const Segment& segment, int first) {
      int lane = threadIdx.x % 32;
      ptx::wgmma_wait<PENDING * OUTPUTS>(s[0]);
      if constexpr (HIDES) mask(s, segment, first + threadIdx.x / 32 % 4 * 16, tile * TILE, lane, -CUDART_INF_F);
      float scale = of.p.shape.softmax_scale * ptx::LOG2_E;
      float row_max[2], largest[2];  // of a row, and of a group of its keys where P is quantized
      P::maxima(row_max, largest, s);
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = P::reference(of.p, row_max[r] * scale);
      behind = rows.catch_up(row_max, decay);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float shift = rows.shift(r), sum = 0.0f;
        // Before the others: scales are made while those are under way.
        scales[r] = typename P::template RowScales<T>(ptx::exp2(fmaf(largest[r], scale, -shift)));
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[0][n][2 * r + e];
            x = ptx::exp2(fmaf(x, scale, -shift));
            sum += x;
          }
        rows.state(rows.state.SUM, r) += sum;
      }
    }

    __device__ __forceinline__ void add(int stage) {
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i) add_product<T, D>(rows.acc[i], probabilities[i][0], of.k_tile(stage) + TILE_BYTES);
    }
    template <int PENDING>
    __device__ __forceinline__ void added() {
      ptx::wgmma_wait<PENDING>(rows.acc[0]);
      if constexpr (OUTPUTS == 2) ptx::hold(rows.acc[1]);
    }

    __device__ __forceinline__ void take() {
      if (__builtin_expect(behind, false)) rows.rescale(decay);
      P::template pack<T, 1>(probabilities, s, scales);
    }
  };
};

}  // namespace sage::attention
