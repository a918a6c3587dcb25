// The backward of 16-bit operands on Hopper, with f32 sums: full precision, and Attn-QAT, whose operands hold NVFP4 values. All products read shared memory as it is: of K, Q, dO and
// dS^T each lies there once, and those who need it the other way round ask for it transposed.
#pragma once

#include <sage/attention/backward_roles.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, class P = PlainProbabilities>
struct FullPrecisionBackwardRoles {
  using Type = T;
  static constexpr int D = HEAD_DIM, STAGES = D == 64 ? 5 : 3;
  // Shared memory: K, V; stages of Q, dO, log-sum-exp, delta; slots of dS^T; dQ on its way.
  static constexpr int K_BYTES = ROLES_KEYS * D * 2, Q_BYTES = TILE * D * 2;
  static constexpr int STATE_AT = 2 * Q_BYTES;
  static constexpr int STAGE_BYTES = 2 * Q_BYTES + 1024;
  static constexpr int DS_AT = 2 * K_BYTES + STAGES * STAGE_BYTES;
  static constexpr int DS_BYTES = ROLES_KEYS * TILE * 2;
  static constexpr int STAGING_AT = DS_AT + 2 * DS_BYTES;
  static constexpr int WARPS_AT = STAGING_AT + STAGING_BYTES<D>;
  static constexpr int SHARED_BYTES = WARPS_AT + ROLES_KEYS / 16 * P::WARP_BYTES;
  static_assert(P::QUERY_VALUES * TILE * 4 <= 1024);

  const params::Backward& p;
  const BackwardBlock& block;
  unsigned char* memory;
  uint32_t shared;

  __device__ __forceinline__ FullPrecisionBackwardRoles(const params::Backward& p, const BackwardBlock& b,
                                                        unsigned char* memory)
      : p(p), block(b), memory(memory), shared(ptx::shared_address(memory)) {}

  static __device__ __forceinline__ int stage_at(int stage) { return 2 * K_BYTES + stage * STAGE_BYTES; }
  __device__ __forceinline__ uint32_t ds_rows(int slot, int group) const {
    return shared + DS_AT + slot * DS_BYTES + group * GROUP_KEYS * TILE * 2;
  }

  __device__ __forceinline__ void load_keys() {
    const Segment& s = block.segment;
    Rows<T> k(p.k, s.batch, s.key_start, block.key_head, s.key_len, p.shape.head_dim);
    Rows<T> v(p.v, s.batch, s.key_start, block.key_head, s.key_len, p.shape.head_dim);
    copy_panels<ROLES_KEYS, D, KEYS_THREADS>(shared, k, block.first_key, threadIdx.x);
    copy_panels<ROLES_KEYS, D, KEYS_THREADS>(shared + K_BYTES, v, block.first_key, threadIdx.x);
  }
  __device__ __forceinline__ void keys_arrived() {}

  // All by one thread, or by all.
  static __device__ __forceinline__ int fetching(const params::Backward& p) { return p.dout.mapped ? 1 : GROUP_THREADS; }
  __device__ __forceinline__ void load(const QueryTile& tile, int stage, int thread, uint32_t landing) {
    const Segment& s = block.segment;
    uint32_t at = shared + stage_at(stage);
    int first = tile.tile * TILE;
    if (p.dout.mapped) {
      int64_t rows = int64_t(tile.padded) * TILE;
      ptx::landing_expect(landing, 2 * Q_BYTES + P::QUERY_VALUES * TILE * 4);
      copy_tile_panels<D>(at, p.q_map, s.batch, tile.head, first, landing);
      copy_tile_panels<D>(at + Q_BYTES, p.dout_map, s.batch, tile.head, first, landing);
      ptx::bulk_copy(at + STATE_AT, p.minus_lse2 + rows, TILE * 4, landing);
      ptx::bulk_copy(at + STATE_AT + TILE * 4, p.minus_delta + rows, TILE * 4, landing);
      if (P::QUERY_VALUES == 3) ptx::bulk_copy(at + STATE_AT + 2 * TILE * 4, p.row_sums + rows, TILE * 4, landing);
    } else {
      Rows<T> q(p.q, s.batch, s.query_start, tile.head, s.query_len, p.shape.head_dim);
      Rows<T> dout(p.dout, s.batch, s.query_start, tile.head, s.query_len, p.shape.head_dim);
      copy_panels<TILE, D, GROUP_THREADS>(at, q, first, thread);
      copy_panels<TILE, D, GROUP_THREADS>(at + Q_BYTES, dout, first, thread);
      copy_row_state<P::QUERY_VALUES>(at + STATE_AT, p, tile, thread);
      ptx::landing_copies(landing, q.vector && dout.vector);
    }
  }

  struct KeysPart {
    const FullPrecisionBackwardRoles& of;
    int group;
    float dv[D / 8][4] = {}, dk[KEYS_ADD<D> ? D / 8 : 1][4] = {};
    Scores s;  // S^T, then P, then dS^T

    __device__ __forceinline__ KeysPart(const FullPrecisionBackwardRoles& numerics, int group) : of(numerics), group(group) {}

    // Registers do not allow S^T of the next tile beside P under way.
    static constexpr bool AHEAD = D == 64;

    __device__ __forceinline__ void start(int stage) {
      if constexpr (AHEAD) multiply(stage);
    }
    __device__ __forceinline__ void multiply(int stage) {
      multiply_rows<T, D, ROLES_KEYS, false>(s, of.shared + group * GROUP_KEYS * 128, of.shared + stage_at(stage));
    }
    __device__ __forceinline__ void end() {
      if constexpr (AHEAD) ptx::wgmma_wait<0>(s);
    }

    template <class Free, class Done, class Ready, class Next>
    __device__ __forceinline__ void scores(int tile, int stage, int slot, bool hides, Free free, Done done, Ready ready,
                                           Next next) {
      int thread = threadIdx.x, lane = thread % 32, row = thread / 32 % 4 * 16;
      uint32_t at = of.shared + stage_at(stage), ds_rows = of.ds_rows(slot, group) + row * TILE * 2;
      const float* minus_lse2 = reinterpret_cast<const float*>(of.memory + stage_at(stage) + STATE_AT);
      if constexpr (!AHEAD) multiply(stage);
      Scores dp;
      set_columns(dp, minus_lse2 + TILE, lane);
      multiply_rows<T, D, ROLES_KEYS, true>(dp, of.shared + K_BYTES + group * GROUP_KEYS * 128, at + Q_BYTES);
      ptx::wgmma_wait<1>(s);
      float scale = of.p.shape.softmax_scale * ptx::LOG2_E;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float2 l = *reinterpret_cast<const float2*>(minus_lse2 + n * 8 + 2 * (lane & 3));
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = fmaf(s[n][e], scale, e & 1 ? l.y : l.x);
      }
      take_exponentials(s, hides, of.block.segment, tile * TILE, of.block.first_key + group * GROUP_KEYS + row, lane);
      // Quantizing takes long: dQ need not wait for it, where there are registers for that.
      constexpr bool QUANTIZES = P::WARP_BYTES > 0, LAST = QUANTIZES && KEYS_ADD<D>;
      void* scales = of.memory + WARPS_AT + thread / 32 * P::WARP_BYTES;
      uint32_t probabilities[4][4], ds[4][4];
      auto pack = [&] { P::template pack_transposed<T>(probabilities, s, scales, lane); };
      P::make_scales(s, minus_lse2 + 2 * TILE, scales, lane);
      if constexpr (QUANTIZES && !LAST) pack();
      // dS = P o (dP - D)
      ptx::wgmma_wait<0>(dp);
      if constexpr (!QUANTIZES) pack();
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) (LAST ? dp : s)[n][e] = s[n][e] * dp[n][e];
      // dV += P^T dO
      auto add_dv = [&] { add_product<T, D>(dv, probabilities, at + Q_BYTES); };
      if constexpr (!LAST) add_dv();
      pack_scores<T>(ds, LAST ? dp : s);
      free();
      store_packed(ds_rows, ds, lane);
      ptx::wgmma_publish();
      done();
      ready();
      if constexpr (LAST) {
        pack();
        add_dv();
      }
      // dK += dS^T Q
      if constexpr (KEYS_ADD<D>) add_product<T, D>(dk, ds, at);
      if constexpr (AHEAD) {
        next();
        ptx::wgmma_wait<1>(dv);
        ptx::hold(dk);
      } else {
        ptx::wgmma_wait<0>(dv);
        next();
      }
    }
  };

  struct SumsPart {
    const FullPrecisionBackwardRoles& of;
    float dk[KEYS_ADD<D> ? 1 : GROUPS][D / 8][4] = {};

    __device__ __forceinline__ explicit SumsPart(const FullPrecisionBackwardRoles& numerics) : of(numerics) {}

    // dK += dS^T Q
    __device__ __forceinline__ void add_keys(int group, int stage, int slot) {
      add_product<T, D>(dk[group], ptx::row_descriptor<128>(of.ds_rows(slot, group)), of.shared + stage_at(stage));
    }
    __device__ __forceinline__ void added() {
      ptx::wgmma_wait<0>(dk[0]);
      ptx::hold(dk[1]);
    }

    // dQ += dS K, channels a chunk at a time: what registers allow.
    static constexpr int CHUNK = KEYS_ADD<D> ? 64 : 32;
    float y[CHUNK / 8][4];
    __device__ __forceinline__ void start(int slot, int chunk = 0) {
      ptx::forget(y);
      ptx::wgmma_fence();
      uint64_t ds = ptx::column_descriptor(of.ds_rows(slot, 0));
      uint64_t keys = ptx::column_descriptor(of.shared + chunk * CHUNK / 64 * ROLES_KEYS * 128) + chunk * CHUNK % 64 * 2 / 16;
      ptx::wgmma_16<T, false, true, true>(y, ds, keys);
#pragma unroll
      for (int step = 1; step < ROLES_KEYS / 16; ++step)
        ptx::wgmma_16<T, true, true, true>(y, ds + step * ptx::COLUMN_STEP, keys + step * ptx::COLUMN_STEP);
      ptx::wgmma_commit();
    }
    template <class Sums, class Read>
    __device__ __forceinline__ void add_dq(int padded_tile, int slot, const Sums& sums, Read read) {
      int lane = threadIdx.x % 32, strip = threadIdx.x / 32 % 4;
      // Not unrolled: chunks side by side would need more registers than there are.
#pragma unroll 1
      for (int chunk = 0; chunk < D / CHUNK; ++chunk) {
        if (chunk > 0) start(slot, chunk);
        ptx::wgmma_wait<0>(y);
        sums.template add<D>(padded_tile, strip, chunk * (CHUNK / 8), lane, y);
      }
      read();
    }
  };
};

}  // namespace sage::attention
