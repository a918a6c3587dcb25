// The forward with 16-bit operands and f32 accumulators on Hopper: for unquantized attention; for Attn-QAT, whose
// operands are NVFP4 values stored in 16 bit; and for SageBwd if only S is an INT8 matmul.
#pragma once

#include <sage/attention/mainloop/forward_sm90.cuh>
#include <sage/attention/numerics/score_mod.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, params::Plan PLAN, class P = PlainProbabilities, Operands SOURCE = Operands::ROWS,
          int VALUE_DIM = HEAD_DIM, class Mod = NoScoreMod>
struct Dense16ForwardSm90 {
  using Type = T;
  static constexpr int D = HEAD_DIM, V = VALUE_DIM, OUTPUTS = P::OUTPUTS;
  static constexpr bool CODES = SOURCE == Operands::CODES;
  // The accumulators of Attn-QAT's two outputs, or of head_dim above 128, leave no registers for 128 keys per step.
  static constexpr int TILES = OUTPUTS == 2 || D > 128 ? 1 : 2;
  using Warpgroups = ForwardWarpgroups<TILES, PLAN.rows == 192 ? 32 : 56, PLAN>;
  // Shared memory has room for the queries of two work items if Q has at most 192 channels or is in INT8.
  static constexpr int QUERY_SLOTS = D > 192 && !CODES ? 1 : 2;
  static constexpr int QUERY_ARRIVALS = 1, STEP_ARRIVALS = CODES ? 2 : 1;  // one for copies, a second for K's scales
  static constexpr bool VALUES_FIRST = false, SMOOTHS_VALUES = OUTPUTS == 2;  // OUTPUTS is 2 only in Attn-QAT
  // Whether the steps that need a mask have a separate loop. Kernels for windows have one loop, except kernels for a
  // soft cap and ALiBi: most calls of these have no window.
  template <Hidden HIDDEN>
  static constexpr bool MASKS_APART = HIDDEN != OUTER_KEYS || Mod::MODIFIES;
  // Shared memory: slots of Q; stages, each of K or of V; if S is an INT8 matmul, the scales of each stage's tiles.
  static constexpr int TILE_BYTES = TILE * D * 2, VALUES_TILE_BYTES = TILE * V * 2, Q_TILE_BYTES = CODES ? TILE * D : TILE_BYTES;
  static_assert(V <= D, "a stage has the size of a step's keys");
  static constexpr int Q_BYTES = Warpgroups::CONSUMERS * Q_TILE_BYTES, STAGE_BYTES = TILES * TILE_BYTES;
  static constexpr int CODE_BYTES = TILE * D, SCALE_BYTES = CODES ? TILES * 4 : 0;
  static constexpr int SCALES_AT = QUERY_SLOTS * Q_BYTES + Warpgroups::STAGES * STAGE_BYTES;
  static constexpr int SHARED_BYTES = SCALES_AT + Warpgroups::STAGES * SCALE_BYTES;
  static_assert(PLAN.row_bytes == D * 2 && PLAN.shared_bytes == SHARED_BYTES);
  // A warp stages its output in the memory of its 16 rows of Q's first panel, which have this size.
  static constexpr int STAGING = 16 * (CODES && D < 128 ? D : 128);

  const params::Forward& p;
  const ForwardBlock& block;
  uint32_t shared;
  // Location of a work item's keys and values. In registers, because reading it from shared memory for each stage would
  // delay the producer.
  struct {
    int batch, head, first, count;
  } keys;

  __device__ __forceinline__ Dense16ForwardSm90(const params::Forward& p, const ForwardBlock& b, void* memory)
      : p(p), block(b), shared(ptx::shared_address(memory)),
        keys{b.segment.batch, b.key_head, b.segment.key_start, b.segment.key_len} {}

  __device__ __forceinline__ uint32_t rows_at(int stage) const { return shared + QUERY_SLOTS * Q_BYTES + stage * STAGE_BYTES; }
  __device__ __forceinline__ uint32_t scales_at(int stage) const { return shared + SCALES_AT + stage * SCALE_BYTES; }
  // Each consumer's queries have separate panels.
  __device__ __forceinline__ uint32_t q_rows(int slot, int warpgroup) const {
    return shared + slot * Q_BYTES + warpgroup * Q_TILE_BYTES;
  }

  // The index of a consumer's query tile in the padded buffers. A consumer beyond the segment's end reads the last
  // tile, and its output is not stored.
  __device__ __forceinline__ int64_t query_tile(int warpgroup) const {
    int tile = min(block.first / TILE + warpgroup, block.segment.query_tiles() - 1);
    return int64_t(block.head) * p.shape.query_tiles + block.segment.query_tile + tile;
  }
  // The producer warp issues the copies of a work item's queries. A tile may also contain queries of the next document.
  // The work item does not store their outputs.
  __device__ __forceinline__ void load_queries(int slot, int lane, uint32_t mbarrier) {
    const Segment& s = block.segment;
    if constexpr (CODES) {
      if (!ptx::elect()) return;
      ptx::mbarrier_arrive_expect_tx(mbarrier, Q_BYTES);
#pragma unroll 1
      for (int warpgroup = 0; warpgroup < Warpgroups::CONSUMERS; ++warpgroup)
        ptx::cp_async_bulk(q_rows(slot, warpgroup), p.codes.q + query_tile(warpgroup) * CODE_BYTES, CODE_BYTES, mbarrier);
      return;
    }
    if (!p.q.mapped) {
#pragma unroll 1
      for (int warpgroup = 0; warpgroup < Warpgroups::CONSUMERS; ++warpgroup)
        copy_panels_by_warp<D>(q_rows(slot, warpgroup), Rows<T>(p.q, s.batch, s.query_start, block.head, s.query_len, p.shape.head_dim),
                               block.first + warpgroup * TILE, lane);
      publish_copies();
    }
    if (!ptx::elect()) return;
    ptx::mbarrier_arrive_expect_tx(mbarrier, p.q.mapped ? Q_BYTES : 0);
    if (p.q.mapped)
#pragma unroll 1
      for (int warpgroup = 0; warpgroup < Warpgroups::CONSUMERS; ++warpgroup)
        copy_tile_panels<PLAN.mainloop, OverEnd::HARMLESS, D>(q_rows(slot, warpgroup), p.q_map, s.batch, block.head, s.query_start + block.first + warpgroup * TILE, mbarrier);
  }

  // The producer warp issues the copies of a step's keys or values. A document's last, partial tile of values is
  // copied without the tensor map, with zeros beyond the document's end: P = 0 there, but 0 * infinity would be NaN.
  __device__ __forceinline__ void load(bool values, int step, int stage, int lane, uint32_t mbarrier) {
    if constexpr (CODES) {
      if (!values) return load_codes(step, stage, mbarrier);
    }
    int first = step * Warpgroups::KEYS;
    // The number of tiles that are copied through the tensor map; the remaining tiles are copied without it.
    int mapped = !p.q.mapped ? 0 : values && p.shape.segments ? min(max(keys.count - first, 0) / TILE, TILES) : TILES;
    if (__builtin_expect(mapped < TILES, false)) {
      const params::View& view = values ? p.v : p.k;
#pragma unroll 1
      for (int tile = mapped; tile < TILES; ++tile)
        copy_panels_by_warp<D, TILES * TILE>(rows_at(stage) + tile * TILE * 128,
                                             Rows<T>(view, keys.batch, keys.first, keys.head, keys.count,
                                                     values ? p.shape.value_dim : p.shape.head_dim),
                                             first + tile * TILE, lane);
      publish_copies();
    }
    if (!ptx::elect()) return;
    if (CODES) ptx::mbarrier_arrive(mbarrier);  // V has no scales, but the mbarrier expects an arrival for them
    ptx::mbarrier_arrive_expect_tx(mbarrier, mapped * (values ? VALUES_TILE_BYTES : TILE_BYTES));
    if (V < D && values) copy_through_map<V>(p.v_map, mapped, first, stage, mbarrier);
    else copy_through_map<D>(values ? p.v_map : p.k_map, mapped, first, stage, mbarrier);
  }
  // Copies the first `mapped` tiles of a step's keys or values, by one thread.
  template <int CHANNELS>
  __device__ __forceinline__ void copy_through_map(const params::TensorMap& map, int mapped, int first, int stage, uint32_t mbarrier) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
      if (tile < mapped)
        copy_tile_panels<PLAN.mainloop, OverEnd::HARMLESS, CHANNELS, TILES * TILE>(rows_at(stage) + tile * TILE * 128, map, keys.batch, keys.head,
                                                 keys.first + first + tile * TILE, mbarrier);
  }
  // Issues the copies of a step's INT8 K and its scales. A second tile beyond the segment's end is not copied:
  // the stage keeps its old contents, whose logits the mask hides, and the second scale repeats the first.
  __device__ __forceinline__ void load_codes(int step, int stage, uint32_t mbarrier) {
    if (!ptx::elect()) return;
    int tiles = min(block.segment.key_tiles() - TILES * step, TILES);
    int64_t at = int64_t(keys.head) * p.shape.key_tiles + block.segment.key_tile + TILES * step;
    ptx::mbarrier_arrive_expect_tx(mbarrier, tiles * CODE_BYTES);
    ptx::cp_async_bulk(rows_at(stage), p.codes.k + at * CODE_BYTES, tiles * CODE_BYTES, mbarrier);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
      ptx::cp_async_4(scales_at(stage) + 4 * tile, p.codes.k_dequant_scale + at + min(tile, tiles - 1));
    ptx::mbarrier_arrive_on_copies(mbarrier, true);
  }
  static __device__ __forceinline__ void publish_copies() {
    ptx::cp_async_wait_all();
    ptx::fence_proxy_async();
    __syncwarp();
  }

  struct Consumer {
    const Dense16ForwardSm90& of;
    uint32_t q_rows;
    Softmax<V, 1, WARPGROUP_THREADS, false, OUTPUTS, P::SLACK> softmax;
    float s[TILES][8][4];  // S, then P
    int sums[CODES ? TILES * 8 : 1][4];  // S as s32 sums of INT8 products
    float q_factor, factor[TILES];  // `factor` converts INT8 sums to base-2 logits: q_factor times the key tile's scale
    uint32_t probabilities[OUTPUTS][TILES][4][4];
    typename P::template RowScales<T> scales[2 * TILES];
    [[no_unique_address]] Mod score_mod;
    bool behind;
    bool unseen = false;  // whether no query of the warpgroup sees the second tile of the current step
    float decay[2];

    __device__ __forceinline__ Consumer(const Dense16ForwardSm90& numerics, int slot, int warpgroup)
        : of(numerics), q_rows(of.q_rows(slot, warpgroup)), softmax(nullptr), score_mod(of.p, of.block.head) {
      if constexpr (CODES)
        q_factor = of.p.codes.q_dequant_scale[of.query_tile(warpgroup)] * (of.p.shape.softmax_scale * ptx::LOG2_E);
    }

    __device__ __forceinline__ uint32_t staging() const { return q_rows + threadIdx.x / 32 % 4 * STAGING; }

    // S of all tiles of a step, as the accumulator of one matmul.
    __device__ __forceinline__ float (&columns())[TILES * 8][4] { return reinterpret_cast<float(&)[TILES * 8][4]>(s); }

    __device__ __forceinline__ void start(int stage) {
      if constexpr (CODES) multiply_codes<D / 32>(sums, code_descriptor<D>(q_rows), code_descriptor<D>(of.rows_at(stage)));
      else multiply_rows<T, D, 64, false>(columns(), q_rows, of.rows_at(stage));
    }
    template <int PENDING>
    __device__ __forceinline__ void scored(int stage) {
      if constexpr (CODES) {
#pragma unroll
        for (int t = 0; t < TILES; ++t) factor[t] = logit_factor(q_factor, ptx::load_float(of.scales_at(stage) + 4 * t));
        ptx::wgmma_wait<PENDING * OUTPUTS>(sums);
#pragma unroll
        for (int n = 0; n < TILES * 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) columns()[n][e] = float(sums[n][e]);
      } else {
        ptx::wgmma_wait<PENDING * OUTPUTS>(columns());
      }
    }
    template <Hidden HIDDEN, int PENDING>
    __device__ __forceinline__ void online_softmax(int step, int, const Segment& segment, int first) {
      int lane = threadIdx.x % 32;
      float scale = of.p.shape.softmax_scale * ptx::LOG2_E, offset[2] = {};
      if constexpr (Mod::MODIFIES) {
        float changed = scale;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          float& by = CODES ? factor[t] : changed = scale;
          score_mod.apply(reinterpret_cast<float(&)[1][8][4]>(s[t]), by, offset, segment, first + threadIdx.x / 32 % 4 * 16, step * TILES * TILE, t * TILE, lane);
        }
        scale = changed;
      }
      if constexpr (HIDDEN != NO_KEYS) {
        Sight<HIDDEN> sight(segment, of.p);
        unseen = sight.visible_keys(first + TILE - 1) <= (step * TILES + 1) * TILE;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
          mask(reinterpret_cast<float(&)[1][8][4]>(s[t]), sight, first + threadIdx.x / 32 % 4 * 16, (step * TILES + t) * TILE, lane,
               -CUDART_INF_F);
      }
      float row_max[2], largest[2];  // `largest`: the maximum over this lane's group of 16 keys, if P is quantized
      auto of_lane = [&](float x) { return score_mod.add_of_lane(x, scale); };
      if constexpr (CODES) find_maxima(row_max);
      else if constexpr (TILES == 1) P::maxima(row_max, largest, s, of_lane);
      else P::maxima(row_max, largest, columns(), of_lane);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if constexpr (!CODES) row_max[r] *= scale;
        if constexpr (Mod::MODIFIES) row_max[r] += offset[r];
        row_max[r] = P::reference(of.p, row_max[r]);
      }
      behind = softmax.catch_up(row_max, decay);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float shift = softmax.shift(r), sum = 0.0f;
        if constexpr (Mod::MODIFIES) shift -= offset[r];
        // This exponential comes first, so that `scales[r]` is computed while the other exponentials are in flight.
        if constexpr (TILES == 1) scales[r] = typename P::template RowScales<T>(ptx::exp2(fmaf(largest[r], scale, -shift)));
        if constexpr (Mod::MODIFIES) shift -= score_mod.of_lane;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          // A tile that no query sees needs no exponentials.
          if (HIDDEN != NO_KEYS && t == 1 && unseen) {
#pragma unroll
            for (int n = 0; n < 8; ++n) s[t][n][2 * r] = s[t][n][2 * r + 1] = 0.0f;
            break;
          }
#pragma unroll
          for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              float& x = s[t][n][2 * r + e];
              x = ptx::exp2(fmaf(x, CODES ? factor[t] : scale, -shift));
              sum += x;
            }
        }
        softmax.state(softmax.state.SUM, r) += sum;
      }
    }

    // Only for INT8 Q and K (CODES): computes the largest logit of each row.
    __device__ __forceinline__ void find_maxima(float (&row_max)[2]) const {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[r] = -CUDART_INF_F;
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
          float of_tile = -CUDART_INF_F;
#pragma unroll
          for (int n = 0; n < 8; ++n) of_tile = fmaxf(of_tile, fmaxf(s[t][n][2 * r], s[t][n][2 * r + 1]));
          row_max[r] = fmaxf(row_max[r], of_tile * factor[t]);
        }
        row_max[r] = quad_max(score_mod.add_of_lane(row_max[r], 1.0f));
      }
    }

    __device__ __forceinline__ void add(int stage) { add_tiles<TILES>(stage); }
    // Skips a tile of values that no query of the warpgroup sees: if it contained a NaN, zero times NaN would give NaN.
    __device__ __forceinline__ void add_last(int stage) {
      if (TILES > 1 && unseen) add_tiles<1>(stage);
      else add_tiles<TILES>(stage);
    }
    template <int COUNT>
    __device__ __forceinline__ void add_tiles(int stage) {
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i)
        add_product<T, V, 4 * COUNT, TILES * TILE>(softmax.acc[i], reinterpret_cast<uint32_t(&)[4 * TILES][4]>(probabilities[i]),
                                                   of.rows_at(stage));
    }
    template <int PENDING>
    __device__ __forceinline__ void added() {
      ptx::wgmma_wait<PENDING>(softmax.acc[0]);
      if constexpr (OUTPUTS == 2) ptx::fence_operand(softmax.acc[1]);
    }

    __device__ __forceinline__ void take() {
      if (__builtin_expect(behind, false)) softmax.rescale(decay);
      P::template pack<T, TILES>(probabilities, s, scales);
    }
  };
};

}  // namespace sage::attention
