// Arguments that the host passes to the kernels for selections and SLA2. The arguments of the attention kernels are in
// attention.cuh. candle-sage/build/params.rs generates Rust structs from this file, and asserts that the offsets in
// Rust and C++ are equal. Each field must have its own line.
#pragma once

#include <sage/params/attention.cuh>

namespace sage::params {

// Inverts a selection's lists: for each key block, lists the query blocks that select it, and splits this list if it is
// long.
struct InvertedLists {
  Lists lists;
  User* users;            // written: the entries of Lists::users; (key head, lists.query_blocks * (lists.stride - 1))
  uint32_t* first_users;  // (key head, key_blocks + 1)
  uint32_t* counts;       // (key head, key_blocks): number of query blocks that select the key block
  uint32_t* used;         // three counters, zeroed before the launch: used slots of cuts.sums; used entries of cuts.parts;
                          // selected (query block, key block) pairs
  Shape shape;
  ListSplits cuts;              // cuts.parts is zeroed before the launch; cuts.lists null: no list is split
  uint32_t least_users;   // most query blocks in a part of a split list: max(least_users, ceil(used[2] / shares))
  int32_t shares;
  int32_t most_slots;
  int32_t most_parts;
  int32_t slot_floats;    // number of elements of ListSplits::sums for one slot
  int32_t slot_pieces;    // number of elements of ListSplits::arrivals for one slot
};

// Writes the lists of a selection: for each query block, the key blocks with the largest scores.
struct Choose {
  const float* scores;  // (key head, query block, `columns` key blocks)
  Lists lists;          // written
  Shape shape;
  int32_t columns;
  int32_t most;
  int32_t nearest;  // the last `nearest` candidates (see selection.cu) are always selected
  int32_t padding;
};

// Means over the tokens of each query block, or of each key block.
struct Pool {
  View x;
  float* means;  // (key head, block, head_dim)
  Shape shape;
  int32_t query;  // 1: x contains queries; 0: x contains keys
  int32_t heads;  // query heads that share a mean; 1 for keys
  int32_t pool;   // if causal, a query block's mean covers only its first query and up to pool - 1 queries before it
  int32_t blocks;
};

// Sums the probabilities of dense attention over the queries of a query block, the keys of a key block, and the query
// heads that share a key head.
struct Mass {
  Forward forward;  // the kernel reads only q, k and shape
  float* mass;      // (key head, query block, `columns` key blocks); zeroed before the launch
  int32_t query_blocks;
  int32_t columns;
};

// The mixture a * sparse + (1 - a) * tail: see attention/mixture.cuh.
struct Mixture {
  const float* theta;  // (query head): determines the weight `a`; null: the output is the tail alone
  float* parts;        // (query head, query block): each query block's contribution to dtheta
  Lists lists;
  int32_t by_count;
  int32_t padding;
};

// Linear attention of each query block over the key blocks before it: the tail in the formula of Mixture.
struct Linear {
  View q;
  View k;
  View v;
  View out;
  View dout;
  View dq;
  View dk;
  View dv;
  View sparse;        // with a mixture: the output of exact attention over the selected blocks
  void* states;       // (key head, block, D, D) in 16 bit: the state H (past_linear.cu) for each block. In the forward:
                      // summed over the chunk's tokens before the query block, times inverse_blocks(block) / BLOCK.
                      // With `backward`: summed over the chunk's queries after the key block
  float* sums;        // (key head, block, D): z (past_linear.cu), with the same tokens and factor as `states`
  float* chunk_sums;  // (key head, segment, chunk, D + 1, D): H and z of a chunk's tokens. linear_scan_chunks replaces
                      // z: the new z is summed over the tokens of `chunk_states`, with the same factor
  void* chunk_states; // (key head, segment, chunk, D, D) in 16 bit. In the forward: H of all tokens before a chunk,
                      // times inverse_blocks(the chunk's first block) / BLOCK (past_linear/block.cuh). In the
                      // backward: H of all queries after the chunk (formula: see `rows`), without a factor
  float* rows;        // (query head, padded query, 2): a query's weights f and w in the backward's sums
                      // H = sum f phi(q)^T dO and z = sum w phi(q)
  Mixture mixture;
  Shape shape;
  int32_t blocks;        // of all segments
  int32_t chunks;        // of a segment
  int32_t chunk_blocks;
  int32_t backward;
  int32_t add;  // 1: gradients are added to the contents of dq, dk and dv
  int32_t padding;
};

// Computes a Mixture of `sparse` and `tail`, or its gradients. `blend_backward_exact` accesses neither `tail`
// nor `dtail`.
struct Blend {
  View sparse;
  View tail;
  View out;  // in the backward: dsparse
  View dtail;
  View dout;
  float* dtheta;
  Mixture mixture;
  Shape shape;
};

}  // namespace sage::params
