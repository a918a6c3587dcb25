// Arguments of the attention kernels, filled by the host. candle-sage/build/params.rs makes its structs from
// these, a field a line, and asserts the offsets on both sides.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace sage::params {

// A (batch, token, head, channel) tensor of 16-bit elements; strides are in elements.
struct View {
  void* data;
  int64_t batch;
  int64_t token;
  int64_t head;
  int64_t channel;
  int32_t vector;  // 1: 16-byte loads work, as rows start on 16 bytes and channels are neighbours, a multiple of 8
  int32_t mapped;  // 1 in Forward::q: q_map, k_map and v_map are valid; 1 in Backward::dout: dout_map is valid, and q_map if Q
                   // is read in 16 bit
};

// A tensor map (CUtensorMap), made by cuTensorMapEncodeTiled for TMA copies on Hopper: tiles of 64 tokens x 64 channels of one
// head of a (batch, token, head, channel) tensor, with zeros beyond the tensor's ends.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// One packed document. Tokens count from the start of the tensor, tiles from the start of the padded buffers, and blocks of a
// selection from the start of its lists.
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

// The dimensions of the problem: candle-sage/src/shape.rs.
struct Shape {
  const Segment* segments;  // packed documents; null: each batch entry is a segment, of the lengths below
  int32_t segment_count;
  int32_t query_len;    // of the longest segment
  int32_t key_len;      // of the longest segment
  int32_t query_heads;
  int32_t key_heads;
  int32_t head_dim;
  int32_t limit_after;  // 0: a query sees the keys to the segment's end; n: up to n - 1 keys after its own position. 1 is a causal mask
  float softmax_scale;
  int32_t query_tiles;  // tiles of 64 tokens, of all segments
  int32_t key_tiles;
  int32_t heads_at_once;  // (head, segment) pairs whose blocks run side by side: what they share should fit the L2 cache
  int32_t value_dim;      // head_dim of V, O and their gradients; head_dim is that of Q and K
};

// Codes and scales, in padded tiles of 64 tokens: (head, tile, ...). A tile of codes is [64][D], above 128
// channels in panels of 128, or [D][64] where it is transposed, swizzled as in shared memory (layout/swizzle.cuh).
struct Codes {
  int8_t* q;
  int8_t* k;
  int8_t* v_transposed;
  float* q_dequant_scale;  // (head, tile)
  float* k_dequant_scale;
  float* v_dequant_scale;
  float* q_mean;       // (head, tile, D): the mean that was subtracted from Q; null without Q smoothing
  float* k_mean;       // (head, segment, D): the mean that was subtracted from K; null without smoothing. Behind it, with
                       // Forward::smooth_values, the same of V
  float* k_tile_sums;  // (head, tile, D): sums over a tile's tokens, from which k_mean is computed, and behind them the same of V;
                       // null: the means are of a sample
};

// A user of a block of keys: a block of queries whose list has it, and its place in that list.
struct User {
  uint32_t block;
  uint32_t rank;
};

// What queries see beside Shape::limit_after. Of a selection which blocks of 128 keys each block of 128 queries sees
// (candle-sage/src/selection.rs); blocks of all segments are numbered together in these arrays, and from 0 inside a segment in their values.
struct Lists {
  const uint32_t* seen;         // (key head, block of queries, stride): count, then blocks of keys, ascending; null: no selection
  const User* users;            // the inverse: the users of each block of keys, ascending
  const uint32_t* first_users;  // (key head, key_blocks + 1): index of a block's first user in `users`
  int32_t stride;
  int32_t query_blocks;
  int32_t key_blocks;
  int32_t keys_before;          // without a selection, in the kernels for windows: keys that a query sees before its own position
};

// What is done to logits, in the kernels that do it: attention/numerics/score_mod.cuh.
struct ScoreMod {
  const float* alibi_slopes;  // of each query head; null: no ALiBi
  float softcap;              // 0: none
  int32_t heads;              // query heads
};

// A part of the users of a block of keys, which a separate block of threads takes.
struct Part {
  uint32_t segment;
  uint32_t key_head;
  uint32_t block;   // of keys, in the segment
  uint32_t number;  // of the part, from 1 on: the first part is not in the table; 0: none
};

// How a list is cut: into how many parts, whose sums are in which slot. One part: it is not cut.
struct CutList {
  uint32_t slot;
  uint32_t parts;
};

// How the backward cuts long lists of users into parts: attention/query_tiles.cuh.
struct Cuts {
  Part* parts;      // a block of 128 keys each; those that are not used are zeros
  CutList* lists;   // (key head, key_blocks); null: no list is cut
  float* sums;      // (slot, 128 channels, dK or dV, 16 keys, ..): sums of the parts, in the order of the fragments
  int* arrivals;    // (slot, 128 channels, dK or dV, 16 keys): how many parts have added
};

struct Forward {
  View q;
  View k;
  View v;
  View out;
  float* minus_lse2;           // (head, padded token): minus the base-2 log-sum-exp; -inf for padding and for queries that see no
                               // key, so that their P is 0 in the backward. Null: not wanted.
  int32_t* scheduler_counter;  // persistent kernels: work items handed out beyond each block's first; else null
  Codes codes;
  Shape shape;
  View high_precision_out;     // Attn-QAT: O of unquantized P; data null: not wanted
  float* row_sums;             // Attn-QAT, (head, padded token): row sum of P relative to its reference; 1 with p_literal, for
                               // padding and for queries that see no key. Null: not wanted.
  const float* sinks;          // of each query head: a logit of the softmax without a value; null: none
  float p_lift;                // Attn-QAT: P is quantized relative to the reference 2^(ceil(largest logit) - p_lift),
  int32_t p_literal;           // or, with p_literal, 2^(largest logit), and in the backward relative to its row sum
  Lists lists;
  ScoreMod score_mod;
  int32_t key_sample;          // tokens of a segment that k_mean is computed from, where there are no k_tile_sums
  int32_t smooth_values;       // 1: V's mean is subtracted from V, and added to `out`
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
};

// Log-sum-exps outside of the padded layout: (batch, query heads, sequence).
struct LogSumExp {
  Shape shape;
  float* padded;        // Forward::minus_lse2, from which `outside` is made; or Backward::minus_delta, to which it is added
  float* outside;
  int64_t sequence;
  int32_t is_gradient;  // whether it is added
  int32_t padding;
};

// The gradient of the sinks: as of a key whose value is zero.
struct SinkGradient {
  const float* sinks;
  const float* minus_lse2;   // Forward::minus_lse2
  const float* minus_delta;  // Backward::minus_delta
  float* gradient;           // (query heads)
  int64_t rows;              // of a head, in the padded layout
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
  float* minus_delta;         // (head, padded token): -rowsum(dO o O)
  float* dq_accum;            // (head, tile, 64 D) f32: sums of dQ, in the order of attention/dq_layout.cuh
  int8_t* q_transposed;       // (head, tile): [D][64], tokens permuted
  int8_t* dout_transposed;    // the same
  float* dout_dequant_scale;  // (head, tile, D): one a channel
  int32_t* dq_semaphore;      // deterministic: (head, tile), how many blocks of keys have added to dQ; then the counter that
                              // hands out block indices. Else null.
  Codes codes;
  Shape shape;
  int32_t group;              // keys that share a scale of P and dS (for dK), queries that share one of dS (for dQ): 1, 2, .. 64
  int32_t dout_group;         // channels that share a scale of dO
  int32_t dq_parts;           // parts that the channels of a tile of dq_accum are divided into
  const float* row_sums;
  Lists lists;
  ScoreMod score_mod;
  Cuts cuts;
  TensorMap q_map;
  TensorMap dout_map;
};

// Attn-QAT: rounds Q, K and V to NVFP4 values in 16 bit, K after its mean is subtracted.
struct FakeQuantize {
  View q;
  View k;
  View v;
  View q_to;
  View k_to;
  View v_to;
  const float* k_mean;  // as Codes::k_mean
  Shape shape;
  int32_t quantize;       // 0: only rounds to 16 bit
  int32_t value_tokens;   // 1: groups of V lie along the tokens; 0: along the channels
  int32_t smooth_values;  // as in Forward
  int32_t padding;
};

}  // namespace sage::params
