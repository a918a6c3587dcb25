// What crosses from the host for attention. Mirrored byte for byte in candle-sage/src/cuda/params.rs: offsets are
// asserted on both sides.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace sage::params {

// A (batch, token, head, channel) tensor of 16-bit elements; strides in elements.
struct View {
  void* data;
  int64_t batch;
  int64_t token;
  int64_t head;
  int64_t channel;
  int32_t vector;  // rows start on 16 bytes, channels are neighbours and come in eights: 16-byte loads work
  int32_t mapped;  // of q in the forward and dout in the backward: TensorMaps of all that is read a tile at a time go along
};

// How a (batch, token, head, channel) tensor is copied a tile at a time, 64 tokens x 64 channels of one head, zeros beyond
// its ends: what cuTensorMapEncodeTiled makes, for Hopper.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// One packed document; tokens count from the start of the tensor, tiles from the start of the padded buffers, blocks of a
// selection from that of its lists.
struct Segment {
  int32_t query_start;
  int32_t query_len;
  int32_t key_start;
  int32_t key_len;
  int32_t query_tile;
  int32_t key_tile;
  int32_t query_block;
  int32_t key_block;
};

// What the tensors are: candle-sage/src/shape.rs.
struct Shape {
  const Segment* segments;  // null: every batch entry is one, of the lengths below
  int32_t segment_count;
  int32_t query_len;    // of the longest segment
  int32_t key_len;      // of the longest segment
  int32_t query_heads;
  int32_t key_heads;
  int32_t head_dim;
  int32_t causal;
  float softmax_scale;
  int32_t query_tiles;  // 64-token tiles of all segments
  int32_t key_tiles;
  int32_t heads_at_once;  // whose blocks run side by side: what they share should stay in the cache
  int32_t padding;
};

// Codes and scales, in padded tiles of 64 tokens: (head, tile, ...). A tile of codes is [64][D], transposed [D][64],
// swizzled as in shared memory (layout/swizzle.cuh).
struct Codes {
  int8_t* q;
  int8_t* k;
  int8_t* v_transposed;
  float* q_dequant_scale;  // dequant_scale, one a tile
  float* k_dequant_scale;
  float* v_dequant_scale;
  float* q_mean;       // (head, tile, D): what was taken out of Q; null without Q smoothing
  float* k_mean;       // (head, segment, D): what was taken out of K; null without smoothing
  float* k_tile_sums;  // (head, tile, D): on the way to the mean
};

// A key block's user: a block of queries that sees it, and which of that one's blocks it is.
struct User {
  uint32_t block;
  uint32_t rank;
};

// Which blocks of 128 keys each block of 128 queries sees: candle-sage/src/selection.rs. Blocks are those of all segments.
struct Lists {
  const uint32_t* seen;         // (key head, block of queries, stride): how many, and which, ascending; null: all
  const User* users;            // the same by blocks of keys, ascending in each
  const uint32_t* first_users;  // (key head, block of keys, and one more): where its users begin
  int32_t stride;
  int32_t query_blocks;
  int32_t key_blocks;
  int32_t padding;
};

struct Forward {
  View q;
  View k;
  View v;
  View out;
  float* minus_lse2;  // (head, padded token): minus the base-2 log-sum-exp, -inf where there is nothing to go back to;
                      // null: not wanted
  int32_t* scheduler_counter;   // with one block a multiprocessor: pieces of work taken beyond the first of each; else null
  Codes codes;
  Shape shape;
  View high_precision_out;  // Attn-QAT: from P that is not quantized; data null: not wanted
  float* row_sums;          // Attn-QAT, (head, padded token): sum of a row's probabilities relative to what they are
                            // quantized to, 1 where there is nothing to go back to; null: not wanted
  float p_lift;             // Attn-QAT: P is relative to 2^(ceil(largest logit) - p_lift),
  int32_t p_literal;        // or to 2^(largest logit), and in the backward to its sum
  Lists lists;
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
};

struct Backward {
  View q;
  View k;
  View v;
  View out;
  View dout;
  View dq;
  View dk;
  View dv;
  const float* minus_lse2;
  float* minus_delta;       // (head, padded token): -rowsum(dO o O)
  float* dq_accum;           // (head, tile, 64 D) f32, in the order of fragments: see DqAccumulator of attention/backward.cuh
  int8_t* q_transposed;     // (head, tile): [D][64], permuted
  int8_t* dout_transposed;  // the same
  float* dout_dequant_scale;        // (head, tile, D): dequant_scale of each channel
  int32_t* dq_semaphore;           // deterministic: (head, tile), how many key tiles have added, then the ticket counter
  Codes codes;
  Shape shape;
  int32_t group;       // keys that share a scale of P and of dS, and queries one of dS: 1, 2, 4, ... 64
  int32_t dout_group;  // channels that share a scale of dO
  int32_t dq_parts;    // of the channels: how dq_accum lies inside a tile, (part, 16 queries, 8 channels)
  const float* row_sums;
  Lists lists;
  TensorMap q_map;
  TensorMap dout_map;
};

// Q, K and V as Attn-QAT's products take them, in 16 bit: less K's mean, and rounded to NVFP4.
struct FakeQuantize {
  View q;
  View k;
  View v;
  View q_to;
  View k_to;
  View v_to;
  const float* k_mean;  // (head, segment, D); null without smoothing
  Shape shape;
  int32_t quantize;      // 0: rounded to 16 bit alone
  int32_t value_tokens;  // groups of V along the tokens, else along the channels
};

static_assert(sizeof(View) == 48 && offsetof(View, vector) == 40);
static_assert(sizeof(Segment) == 32);
static_assert(sizeof(Lists) == 40 && offsetof(Lists, stride) == 24);
static_assert(sizeof(Shape) == 56 && offsetof(Shape, softmax_scale) == 36);
static_assert(sizeof(Codes) == 72);
static_assert(sizeof(Forward) == 832 && offsetof(Forward, q_map) == 448 && offsetof(Forward, minus_lse2) == 192 && offsetof(Forward, shape) == 280 &&
              offsetof(Forward, row_sums) == 384 && offsetof(Forward, lists) == 400);
static_assert(sizeof(FakeQuantize) == 360 && offsetof(FakeQuantize, shape) == 296);
static_assert(sizeof(Backward) == 896 && offsetof(Backward, minus_lse2) == 384 && offsetof(Backward, codes) == 440 &&
              offsetof(Backward, shape) == 512 && offsetof(Backward, group) == 568 && offsetof(Backward, row_sums) == 584 &&
              offsetof(Backward, lists) == 592 && offsetof(Backward, q_map) == 640);

}  // namespace sage::params
