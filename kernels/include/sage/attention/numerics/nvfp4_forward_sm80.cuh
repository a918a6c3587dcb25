// The forward of Attn-QAT for inference, with NVFP4 matmuls (arXiv 2603.00040, section 3): S = Q K^T and O = P V, with
// P quantized in registers. Its outputs equal those of the forward for training, up to the order of sums (see
// Nvfp4Probabilities).
#pragma once

#include <sage/attention/mainloop/forward_sm80.cuh>
#include <sage/attention/numerics/probabilities.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/layout/nvfp4.cuh>
#include <sage/params/plans.cuh>
#include <sage/ptx/mma_nvfp4.cuh>

namespace sage::attention {

template <class T, int HEAD_DIM, params::Plan PLAN>
struct Nvfp4ForwardSm80 {
  using Type = T;
  using Tile = layout::Nvfp4Tile<HEAD_DIM>;
  static constexpr int D = HEAD_DIM, BLOCKS = 1, STAGES = PLAN.stages;
  static constexpr int THREADS = PLAN.threads, M = FORWARD_QUERIES * 2 / THREADS;
  using RowSoftmax = Softmax<D, M, THREADS, false, 1, Nvfp4Probabilities::SLACK>;
  static constexpr bool COOPERATES = false, SMOOTHS_VALUES = false;
  using Logits = float[M][8][4];
  static constexpr int Q_BYTES = FORWARD_QUERIES / TILE * Tile::BYTES;
  static constexpr int STATE_AT = Q_BYTES + 4 * Tile::BYTES;
  static constexpr int SHARED_BYTES = STATE_AT + RowSoftmax::State::BYTES;
  static_assert(PLAN.mainloop == params::FORWARD_SM80);
  static_assert(PLAN.rows == FORWARD_QUERIES && PLAN.row_bytes == Tile::BYTES / TILE && PLAN.stages == 2 && PLAN.shared_bytes == SHARED_BYTES);

  const params::Forward& p;
  const unsigned char* memory;
  uint32_t shared;
  int warp, query_tiles;
  int64_t first_query_tile, first_key_tile;
  float scale;

  __device__ __forceinline__ Nvfp4ForwardSm80(const params::Forward& p, const ForwardBlock& b, unsigned char* memory)
      : p(p), memory(memory), shared(ptx::shared_address(memory)), warp(threadIdx.x / 32),
        query_tiles(b.segment.query_tiles() - b.first / TILE),
        first_query_tile(int64_t(b.head) * p.shape.query_tiles + b.segment.query_tile + b.first / TILE),
        first_key_tile(int64_t(b.key_head) * p.shape.key_tiles + b.segment.key_tile),
        scale(p.shape.softmax_scale * ptx::LOG2_E) {}

  // The offset of a tile's keys in shared memory; the tile's values follow the keys.
  static __device__ __forceinline__ int keys_at(int tile) { return Q_BYTES + (tile & 1) * 2 * Tile::BYTES; }

  __device__ __forceinline__ void load_queries() {
    // If the second tile does not exist, the first is copied in its place; the copy's outputs are not stored.
    const int8_t* codes = p.codes.q + first_query_tile * Tile::BYTES;
#pragma unroll
    for (int i = 0; i < FORWARD_QUERIES / TILE; ++i)
      copy_tile<Tile::BYTES, THREADS>(shared + i * Tile::BYTES, codes + (i < query_tiles ? i * Tile::BYTES : 0), threadIdx.x);
  }

  __device__ __forceinline__ void load_keys(int tile) {
    copy_tile<Tile::BYTES, THREADS>(shared + keys_at(tile), p.codes.k + (first_key_tile + tile) * Tile::BYTES, threadIdx.x);
  }

  __device__ __forceinline__ void load_values(int tile) {
    copy_tile<Tile::BYTES, THREADS>(shared + keys_at(tile) + Tile::BYTES,
                                    p.codes.v_transposed + (first_key_tile + tile) * Tile::BYTES, threadIdx.x);
  }

  // The four scales of the FP4 values 64 * step to 64 * step + 63 of a row, in a tile of ROWS rows.
  template <int ROWS>
  __device__ __forceinline__ uint32_t scales(int tile_at, int row, int step) const {
    return *reinterpret_cast<const uint32_t*>(memory + tile_at + Tile::CODES_BYTES + Tile::template scales_at<ROWS>(row, step));
  }

  // Computes S of the warp's 16 queries and the keys of `tile`. The 16 queries are all in one tile of queries.
  __device__ __forceinline__ void multiply(int tile, Logits& s) {
    int lane = threadIdx.x % 32, g = lane / 4;
    int q_at = warp * 16 / TILE * Tile::BYTES, q_row = warp * 16 % TILE, k_at = keys_at(tile);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][n][e] = 0.0f;
    layout::ReaderA<Tile::ROW> q_reader(shared + q_at + q_row * Tile::ROW, lane);
    layout::ReaderB<Tile::ROW> k_reader(shared + k_at, lane);
#pragma unroll
    for (int step = 0; step < D / 64; ++step) {
      uint32_t a[4], a_scales = scales<TILE>(q_at, q_row + g + (lane & 1) * 8, step);
      q_reader.load(a, 0, step);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        k_reader.load(b, n * 8, step);
        ptx::mma_nvfp4(s[0][n], a, b[0], b[1], a_scales, scales<TILE>(k_at, n * 8 + g, step));
        ptx::mma_nvfp4(s[0][n + 1], a, b[2], b[3], a_scales, scales<TILE>(k_at, n * 8 + 8 + g, step));
      }
    }
  }

  // Masks S: writes -inf where a query does not see a key.
  template <Hidden HIDDEN>
  static __device__ __forceinline__ void hide(Logits& s, const Sight<HIDDEN>& sight, int first_query, int first_key, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int query = first_query + row_of(h, lane), visible = sight.visible_keys(query) - first_key, first = 0;
      if constexpr (HIDDEN == OUTER_KEYS) first = sight.first_key(query) - first_key;
#pragma unroll
      for (int slot = 0; slot < 16; ++slot)
        if (int key = layout::key_of_slot(slot, lane & 3); key >= visible || (HIDDEN == OUTER_KEYS && key < first)) s[0][slot / 2][2 * h + slot % 2] = -CUDART_INF_F;
    }
  }

  template <Hidden HIDDEN>
  __device__ __forceinline__ void attend(int tile, int, Logits& s, RowSoftmax& softmax, const Segment& segment, int warp_first) {
    int lane = threadIdx.x % 32, v_at = keys_at(tile) + Tile::BYTES;
    if constexpr (HIDDEN != NO_KEYS) hide(s, Sight<HIDDEN>(segment, p), warp_first, tile * TILE, lane);

    // Lane t of the row's four lanes has eight keys of group t / 2 and eight keys of group 2 + t / 2. Lane t ^ 1 has
    // the other eight keys of both groups.
    float largest[2][2], row_max[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float max = -CUDART_INF_F;
#pragma unroll
        for (int n = 4 * half; n < 4 * half + 4; ++n) max = fmaxf(max, fmaxf(s[0][n][2 * h], s[0][n][2 * h + 1]));
        largest[h][half] = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
      }
      float max = fmaxf(largest[h][0], largest[h][1]);
      max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
      row_max[h] = Nvfp4Probabilities::reference(p, max * scale);
    }
    softmax.follow(row_max);

    uint32_t operand[4], own_scales[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float shift = softmax.shift(h), sum = 0.0f;
      uint32_t bytes = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        quant::Nvfp4Scale group = quant::nvfp4_scale_of(ptx::exp2(fmaf(largest[h][half], scale, -shift)));
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          x[i] = ptx::exp2(fmaf(s[0][4 * half + i / 2][2 * h + i % 2], scale, -shift));
          sum += x[i];
          x[i] *= group.quant;
        }
        operand[2 * half + h] = ptx::codes_of_e2m1(x);
        bytes |= ptx::code_of_e4m3(group.dequant) << (16 * half);
      }
      softmax.state(RowSoftmax::State::SUM, h) += sum;
      // The scales of the row's other two groups are in lane `lane ^ 2`.
      own_scales[h] = bytes | __shfl_xor_sync(~0u, bytes, 2) << 8;
    }
    uint32_t p_scales = lane & 1 ? own_scales[1] : own_scales[0];
    layout::ReaderB<Tile::V_ROW> v_reader(shared + v_at, lane);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      v_reader.load(b, n * 8, 0);
      ptx::mma_nvfp4(softmax.acc[0][n], operand, b[0], b[1], p_scales, scales<D>(v_at, n * 8 + lane / 4, 0));
      ptx::mma_nvfp4(softmax.acc[0][n + 1], operand, b[2], b[3], p_scales,
                     scales<D>(v_at, n * 8 + 8 + lane / 4, 0));
    }
  }

  __device__ __forceinline__ void flush_magic(RowSoftmax&) {}
};

}  // namespace sage::attention
