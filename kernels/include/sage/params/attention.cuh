// Arguments that the host passes to the attention kernels. candle-sage/build/params.rs generates Rust structs from this
// file, and asserts that the offsets in Rust and C++ are equal. Each field must have its own line.
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
  int32_t vector;  // 1: 16-byte loads work: rows are 16-byte aligned, channels are contiguous and a multiple of 8
  int32_t mapped;  // 1: tensor maps are valid. Forward::q.mapped refers to q_map, k_map and v_map;
                   // Backward::dout.mapped refers to dout_map and, if Q is read in 16 bit, to q_map
};

// A tensor map (CUtensorMap), encoded by cuTensorMapEncodeTiled for TMA copies on Hopper: tiles of 64 tokens x 64
// channels of one head of a (batch, token, head, channel) tensor, with zeros beyond the tensor's ends.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// One packed document. Tokens are numbered from the start of the tensor. Tiles, and blocks of a selection, are numbered
// from the start of the first document; each document begins a new tile and a new block.
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

// The dimensions of the problem. In Rust: candle-sage/src/shape.rs.
struct Shape {
  const Segment* segments;  // packed documents; null: each batch entry is a segment, with the lengths below
  int32_t segment_count;
  int32_t query_len;    // of the longest segment
  int32_t key_len;      // of the longest segment
  int32_t query_heads;
  int32_t key_heads;
  int32_t head_dim;
  int32_t limit_after;  // 0: a query sees all keys after its own position; n: only the next n - 1 keys. So 1 is causal
  float softmax_scale;
  int32_t query_tiles;  // tiles of 64 tokens, of all segments
  int32_t key_tiles;
  int32_t heads_at_once;  // (head, segment) pairs that run concurrently; their data should fit the L2 cache
  int32_t value_dim;      // channels of V, O and their gradients; Q and K have `head_dim` channels
};

// INT8 values and scales, in padded tiles of 64 tokens: (head, tile, ...). A tile is stored as [64][D], in panels of
// 128 channels if D is above 128; a transposed tile is stored as [D][64]. Tiles are swizzled as in shared memory
// (layout/swizzle.cuh).
struct Codes {
  int8_t* q;
  int8_t* k;
  int8_t* v_transposed;
  float* q_dequant_scale;  // (head, tile)
  float* k_dequant_scale;
  float* v_dequant_scale;
  float* q_mean;       // (head, tile, D): the mean that was subtracted from Q; null without Q smoothing
  float* k_mean;       // (head, segment, D): the mean that was subtracted from K; null without smoothing. With
                       // Forward::smooth_values, the means of V are stored behind the means of K
  float* k_tile_sums;  // (head, tile, D): sums over a tile's tokens, from which k_mean is computed. With
                       // Forward::smooth_values, the sums of V are stored behind the sums of K. If k_tile_sums is null,
                       // the means are computed from Forward::key_sample tokens
};

// A query block that selects a key block, and the index of the key block in the query block's list.
struct User {
  uint32_t block;
  uint32_t rank;
};

// Limits on the keys that queries see, in addition to Shape::limit_after: a selection or a window. A selection is the
// blocks of 128 keys that each block of 128 queries sees (candle-sage/src/selection.rs). `seen` and `first_users` are
// indexed by a block's number among the blocks of all segments. `seen` and `users` store block numbers inside a
// segment.
struct Lists {
  const uint32_t* seen;         // (key head, query block, stride): count, then key blocks, ascending; null: no selection
  const User* users;            // the inverse of `seen`: the query blocks that select each key block, ascending
  const uint32_t* first_users;  // (key head, key_blocks + 1): index of a key block's first entry in `users`
  int32_t stride;
  int32_t query_blocks;
  int32_t key_blocks;
  int32_t keys_before;          // windows only (no selection): keys that a query sees before its own position
};

// Changes to the logits, for kernels that support them: attention/numerics/score_mod.cuh.
struct ScoreMod {
  const float* alibi_slopes;  // one per query head; null: no ALiBi
  float softcap;              // 0: none
  int32_t heads;              // query heads
};

// One part of the list of query blocks that select a key block. No thread block processes two parts.
struct Part {
  uint32_t segment;
  uint32_t key_head;
  uint32_t block;   // key block, numbered in the segment
  uint32_t number;  // the part's number in the list, at least 1: ListSplits::parts omits part 0. 0 in unused elements
};

// How a list of query blocks is split: into `parts` parts (1: not split), which share index `slot` of ListSplits::sums.
struct CutList {
  uint32_t slot;
  uint32_t parts;
};

// How the backward splits long lists of query blocks: attention/query_tiles.cuh. The index `slot` is CutList::slot.
struct ListSplits {
  Part* parts;      // the parts of all split lists, except part 0 of each list; unused elements are zeros
  CutList* lists;   // (key head, key_blocks): how a key block's list of query blocks is split; null: no list is split
  float* sums;      // sums of dK and dV over the parts of a split list: (slot, panel of 128 channels, dK or dV,
                    // strip of 16 keys, accumulator fragment)
  int* arrivals;    // (slot, panel of 128 channels, dK or dV, strip of 16 keys): how many of the split list's
                    // parts were added to `sums`
};

struct Forward {
  View q;
  View k;
  View v;
  View out;
  float* minus_lse2;           // (head, padded token): minus the base-2 log-sum-exp; -inf for padding and for queries that see no
                               // key, so that their P is 0 in the backward. Null: not written.
  int32_t* scheduler_counter;  // persistent kernels: counts the work items that thread blocks take after their first
                               // item. Null for other kernels.
  Codes codes;
  Shape shape;
  View high_precision_out;     // Attn-QAT: O computed from unquantized P. Not written if this view's `data` is null
  float* row_sums;             // Attn-QAT, (head, padded token): the row's sum of 2^(logit - reference), including the
                               // sink; reference = ceil(largest logit of the row) - p_lift. With p_literal: the sum
                               // including the sink divided by the sum without it. 1 for padding and for queries that
                               // see no key. Null: not written.
  const float* sinks;          // one logit per query head; the softmax adds exp(logit) to its denominator; null: no sinks
  float p_lift;                // Attn-QAT: quantizes 2^(logit - ceil(largest logit of the row) + p_lift) instead of P
  int32_t p_literal;           // 1: the forward quantizes 2^(logit - largest logit of the row), and the backward
                               // quantizes the P of a softmax without the sink
  Lists lists;
  ScoreMod score_mod;
  int32_t key_sample;          // if k_tile_sums is null: k_mean is computed from this many tokens per segment
  int32_t smooth_values;       // 1: the mean of V is subtracted from V, and added to `out`
  TensorMap q_map;
  TensorMap k_map;
  TensorMap v_map;
};

// If `is_gradient` is 0, computes the log-sum-exps `outside` from `padded`. If it is 1, adds `outside`, the gradient of
// the log-sum-exps, to `padded`.
struct LogSumExp {
  Shape shape;
  float* padded;        // Forward::minus_lse2; if `is_gradient` is 1, Backward::minus_delta
  float* outside;       // (batch, query heads, sequence)
  int64_t sequence;
  int32_t is_gradient;
  int32_t padding;
};

// The gradient of the sinks. A sink acts like a key whose row of V is zero.
struct SinkGradient {
  const float* sinks;
  const float* minus_lse2;   // Forward::minus_lse2
  const float* minus_delta;  // Backward::minus_delta
  float* gradient;           // (query heads)
  int64_t rows;              // per head, in minus_lse2 and minus_delta
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
  float* dq_accum;            // (head, tile, 64 * D) f32: sums of dQ, in the layout of attention/dq_layout.cuh
  int8_t* q_transposed;       // (head, tile): [D][64], tokens permuted
  int8_t* dout_transposed;    // (head, tile): [D][64], tokens permuted
  float* dout_dequant_scale;  // (head, tile, D): one per channel
  int32_t* dq_semaphore;      // (head, tile): number of thread blocks that added to the tile of dQ. Last element: a
                              // counter that assigns indices to thread blocks. Null unless results are deterministic.
  Codes codes;
  Shape shape;
  int32_t group;              // 1, 2, 4, .. or 64: this many keys share a scale of P in P^T dO, and of dS in dS^T Q.
                              // This many queries share a scale of dS in dS K
  int32_t dout_group;         // channels that share a scale of dO
  int32_t dq_parts;           // parts into which the channels of a tile of dq_accum are divided
  const float* row_sums;
  Lists lists;
  ScoreMod score_mod;
  ListSplits cuts;
  TensorMap q_map;
  TensorMap dout_map;
};

// Attn-QAT: rounds Q, K and V to NVFP4 values stored in 16 bit. The mean of K is subtracted first.
struct FakeQuantize {
  View q;
  View k;
  View v;
  View q_to;
  View k_to;
  View v_to;
  const float* k_mean;  // like Codes::k_mean
  uint32_t* value_max;  // (key head, segment): the bits of the largest |V|. Null: the heads of V are not scaled
  Shape shape;
  int32_t quantize;       // 0: only rounds to 16 bit
  int32_t value_tokens;   // 1: an NVFP4 group of V is 16 tokens of a channel; 0: 16 channels of a token
  int32_t smooth_values;  // as in Forward
  int32_t padding;
};

}  // namespace sage::params
