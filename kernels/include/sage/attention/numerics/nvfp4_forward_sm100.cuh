// The forward of Attn-QAT for inference, with NVFP4 matmuls by tcgen05.mma. It computes the same values as
// nvfp4_forward_sm80.cuh. FP4 values are in shared memory; scales are copied into tensor memory before each matmul.
#pragma once

#include <sage/attention/mainloop/forward_sm100.cuh>
#include <sage/attention/numerics/probabilities.cuh>
#include <sage/layout/nvfp4.cuh>
#include <sage/params/plans.cuh>
#include <sage/ptx/convert_nvfp4.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, params::Plan PLAN>
struct Nvfp4ForwardSm100 {
  using Type = T;
  using Tile = layout::Nvfp4Tile<HEAD_DIM>;
  static constexpr int D = HEAD_DIM, THREADS = PLAN.threads, STAGES = PLAN.stages, BLOCKS = 2;
  static constexpr int STEPS = D / 64;  // MMAs that compute S; each reduces over 64 channels
  // Arrivals at the queries' mbarrier: of the producer, and of each thread that stores a query's scales.
  static constexpr int QUERY_ARRIVALS = 1 + FORWARD_QUERIES;
  // Shared memory: the FP4 values of Q, two buffers of FP4 values of P, stages of K and of V, the scales of Q, and the
  // scales of P.
  static constexpr int Q_BYTES = FORWARD_QUERIES / TILE * Tile::CODES_BYTES, P_BYTES = FORWARD_QUERIES * Tile::V_ROW;
  static constexpr int P_AT = Q_BYTES, KEYS_AT = P_AT + 2 * P_BYTES, VALUES_AT = KEYS_AT + STAGES * Tile::BYTES;
  static constexpr int Q_SCALES_AT = VALUES_AT + STAGES * Tile::BYTES, P_SCALES_AT = Q_SCALES_AT + STEPS * Tile::SCALES_BYTES;
  static constexpr int SHARED_BYTES = P_SCALES_AT + 2 * Tile::SCALES_BYTES;
  static_assert(PLAN.mainloop == params::FORWARD_SM100);
  static_assert(PLAN.rows == FORWARD_QUERIES && PLAN.row_bytes == Tile::BYTES / TILE && PLAN.shared_bytes == SHARED_BYTES);
  // The hardware's swizzle repeats every eight rows.
  static_assert(KEYS_AT % (8 * Tile::ROW) == 0 && Tile::BYTES % (8 * Tile::ROW) == 0 && P_AT % (8 * Tile::V_ROW) == 0);
  // Columns of tensor memory: S, O, and scales. The scales of an MMA's 128 rows use four columns. The scales of K use
  // two columns per step of the reduction of S, because a tile has 64 keys. The scales of P and V have two buffers:
  // those of a tile of keys are copied while MMAs of the previous tile may be in flight.
  static constexpr int SCORES_AT = 0, OUTPUT_AT = 64, SCALE_COLUMNS = 4;
  static constexpr int Q_COLUMNS_AT = OUTPUT_AT + D, K_COLUMNS_AT = Q_COLUMNS_AT + STEPS * SCALE_COLUMNS;
  static constexpr int P_COLUMNS_AT = K_COLUMNS_AT + SCALE_COLUMNS, V_COLUMNS_AT = P_COLUMNS_AT + 2 * SCALE_COLUMNS;
  static_assert(V_COLUMNS_AT + 2 * SCALE_COLUMNS <= FORWARD_SM100_COLUMNS);

  const params::Forward& p;
  uint32_t shared;
  int query_tiles;
  const int8_t *queries, *keys, *values;  // the thread block's first query tile; the segment's first tile of K and V

  __device__ __forceinline__ Nvfp4ForwardSm100(const params::Forward& p, const ForwardBlock& b, unsigned char* memory)
      : p(p), shared(ptx::shared_address(memory)), query_tiles(b.segment.query_tiles() - b.first / TILE) {
    int64_t key_tile = int64_t(b.key_head) * p.shape.key_tiles + b.segment.key_tile;
    int64_t query_tile = int64_t(b.head) * p.shape.query_tiles + b.segment.query_tile + b.first / TILE;
    queries = p.codes.q + query_tile * Tile::BYTES;
    keys = p.codes.k + key_tile * Tile::BYTES, values = p.codes.v_transposed + key_tile * Tile::BYTES;
  }

  // The thread block's query tile number `i`. If tile 1 does not exist, tile 0 is copied instead; the copy's outputs
  // are not stored.
  __device__ __forceinline__ const int8_t* query_tile(int i) const { return queries + (i < query_tiles ? i : 0) * Tile::BYTES; }

  __device__ __forceinline__ void load_queries(uint32_t mbarrier) {
    ptx::mbarrier_arrive_expect_tx(mbarrier, Q_BYTES);
#pragma unroll
    for (int i = 0; i < FORWARD_QUERIES / TILE; ++i)
      ptx::cp_async_bulk(shared + i * Tile::CODES_BYTES, query_tile(i), Tile::CODES_BYTES, mbarrier);
  }

  // Copies the scales of Q to shared memory. Each MMA of S covers 64 channels of the thread block's two query tiles.
  __device__ __forceinline__ void store_queries(uint32_t mbarrier) {
    int query = threadIdx.x;
    const int8_t* scales = query_tile(query / TILE) + Tile::CODES_BYTES;
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      ptx::store_4(shared + Q_SCALES_AT + step * Tile::SCALES_BYTES + Tile::template scales_at<FORWARD_QUERIES>(query, 0),
                   *reinterpret_cast<const uint32_t*>(scales + Tile::template scales_at<TILE>(query % TILE, step)));
    ptx::fence_proxy_async();
    ptx::mbarrier_arrive(mbarrier);
  }

  __device__ __forceinline__ void load_keys(int tile, int stage, uint32_t mbarrier) {
    ptx::mbarrier_arrive_expect_tx(mbarrier, Tile::BYTES);
    ptx::cp_async_bulk(shared + KEYS_AT + stage * Tile::BYTES, keys + int64_t(tile) * Tile::BYTES, Tile::BYTES, mbarrier);
  }

  __device__ __forceinline__ void load_values(int tile, int stage, uint32_t mbarrier) {
    ptx::mbarrier_arrive_expect_tx(mbarrier, Tile::BYTES);
    ptx::cp_async_bulk(shared + VALUES_AT + stage * Tile::BYTES, values + int64_t(tile) * Tile::BYTES, Tile::BYTES, mbarrier);
  }

  // Copies the scales at offset `at` of shared memory into four columns.
  __device__ __forceinline__ void copy_scales(uint32_t columns, int at) const {
    ptx::tcgen05_copy_scales(columns, ptx::tcgen05_rows(shared + at, 16));
  }

  __device__ __forceinline__ void start(uint32_t tensor) const {
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      copy_scales(tensor + Q_COLUMNS_AT + step * SCALE_COLUMNS, Q_SCALES_AT + step * Tile::SCALES_BYTES);
  }

  __device__ __forceinline__ void multiply(uint32_t tensor, int stage) const {
    int keys_at = KEYS_AT + stage * Tile::BYTES;
    copy_scales(tensor + K_COLUMNS_AT, keys_at + Tile::CODES_BYTES);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      ptx::tcgen05_mma_nvfp4(tensor + SCORES_AT, ptx::tcgen05_rows(shared, Tile::ROW) + 2 * step,
                             ptx::tcgen05_rows(shared + keys_at, Tile::ROW) + 2 * step, ptx::tcgen05_nvfp4(TILE),
                             tensor + Q_COLUMNS_AT + step * SCALE_COLUMNS, tensor + K_COLUMNS_AT + step * TILE / 32, step > 0);
  }

  __device__ __forceinline__ void add(uint32_t tensor, int stage, int step) const {
    int buffer = step % 2, values_at = VALUES_AT + stage * Tile::BYTES;
    uint32_t p_columns = tensor + P_COLUMNS_AT + buffer * SCALE_COLUMNS, v_columns = tensor + V_COLUMNS_AT + buffer * SCALE_COLUMNS;
    copy_scales(p_columns, P_SCALES_AT + buffer * Tile::SCALES_BYTES);
    copy_scales(v_columns, values_at + Tile::CODES_BYTES);
    ptx::tcgen05_mma_nvfp4(tensor + OUTPUT_AT, ptx::tcgen05_rows(shared + P_AT + buffer * P_BYTES, Tile::V_ROW),
                           ptx::tcgen05_rows(shared + values_at, Tile::V_ROW), ptx::tcgen05_nvfp4(D), p_columns, v_columns, step > 0);
  }

  struct Row {
    float reference = -CUDART_INF_F, sum = 0.0f;  // sum: of 2^(logit - reference), over the keys so far
    float decay;         // multiplies O when `reference` grows
    float scale;         // converts S to base-2 logits
    float s[TILE];       // S; the logit of key k is s[layout::row_of_key(k)]
    float largest[4];    // largest logit of each of the tile's groups of 16 keys
    uint32_t codes[8], scales;  // of P: FP4 values of keys 0 to 63, and scales of groups 0 to 3

    __device__ __forceinline__ void read(uint32_t tensor) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        ptx::tcgen05_load(reinterpret_cast<float(&)[32]>(s[32 * half]), tensor + SCORES_AT + 32 * half);
    }

    // Unless HIDDEN is NO_KEYS, the query sees only the tile's keys `first` to `visible - 1`.
    template <Hidden HIDDEN>
    __device__ __forceinline__ bool follow(const params::Forward& p, int first, int visible) {
      scale = p.shape.softmax_scale * ptx::LOG2_E;
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        largest[group] = -CUDART_INF_F;
#pragma unroll
        for (int key = 16 * group; key < 16 * group + 16; ++key) {
          float& x = s[layout::row_of_key(key)];
          if ((HIDDEN != NO_KEYS && key >= visible) || (HIDDEN == OUTER_KEYS && key < first)) x = -CUDART_INF_F;
          largest[group] = fmaxf(largest[group], x);
        }
      }
      float max = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      float next = fmaxf(reference, Nvfp4Probabilities::reference(p, max * scale));
      decay = ptx::exp2(reference - (next == -CUDART_INF_F ? 0.0f : next));
      bool behind = next > reference;
      if (behind) reference = next, sum *= decay;
      else decay = 1.0f;
      return behind;
    }

    __device__ __forceinline__ void make_probabilities() {
      // If the query has seen no key yet, its logits and its reference are -inf. With a shift of -inf its probabilities
      // would be NaN; with a shift of 0 they are 2^(-inf - 0) = 0.
      float shift = reference == -CUDART_INF_F ? 0.0f : reference;
      scales = 0;
#pragma unroll
      for (int group = 0; group < 4; ++group) {
        quant::Nvfp4Scale of = quant::nvfp4_scale_of(ptx::exp2(fmaf(largest[group], scale, -shift)));
        scales |= ptx::code_of_e4m3(of.dequant) << (8 * group);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float x[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            x[i] = ptx::exp2(fmaf(s[layout::row_of_key(16 * group + 8 * half + i)], scale, -shift));
            sum += x[i];
            x[i] *= of.quant;
          }
          codes[2 * group + half] = ptx::codes_of_e2m1(x);
        }
      }
    }
  };

  __device__ __forceinline__ void store_probabilities(const Row& row, int step) const {
    int query = threadIdx.x, buffer = step % 2;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk)
      ptx::store_16(shared + P_AT + buffer * P_BYTES + layout::swizzled<Tile::V_ROW>(query, chunk),
                    make_uint4(row.codes[4 * chunk], row.codes[4 * chunk + 1], row.codes[4 * chunk + 2], row.codes[4 * chunk + 3]));
    ptx::store_4(shared + P_SCALES_AT + buffer * Tile::SCALES_BYTES + Tile::template scales_at<FORWARD_QUERIES>(query, 0), row.scales);
  }
};

}  // namespace sage::attention
