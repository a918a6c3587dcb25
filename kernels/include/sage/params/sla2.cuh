// Arguments of the kernels for selections, their router, the linear tail and the mixture, filled by the host.
// candle-sage/build/params.rs generates its structs from this file, one field per line, and asserts the offsets on both
// sides.
#pragma once

#include <sage/params/attention.cuh>

namespace sage::params {

// Inverts a selection's lists: finds the query blocks that select each key block, and splits long lists.
struct InvertedLists {
  Lists lists;
  User* users;            // (key head, query_blocks * (stride - 1))
  uint32_t* first_users;  // (key head, key_blocks + 1)
  uint32_t* counts;       // (key head, key_blocks): number of query blocks that select the key block
  uint32_t* used;         // counters, zeroed before the launch: slots in use, parts in use, selected (query block, key block) pairs
  Shape shape;
  ListSplits cuts;              // `parts` is zeroed before the launch; lists null: no list is split
  uint32_t least_users;   // a part has at most max(least_users, selected pairs / shares) query blocks
  int32_t shares;
  int32_t most_slots;
  int32_t most_parts;
  int32_t slot_floats;    // floats of a slot's sums
  int32_t slot_pieces;    // pieces of a slot's sums, one for each counter in ListSplits::arrivals
};

// Writes the lists of a selection: for each query block, the key blocks with the largest scores.
struct Choose {
  const float* scores;  // (key head, query block, columns)
  Lists lists;          // written
  Shape shape;
  int32_t columns;
  int32_t most;
  int32_t nearest;  // the last `nearest` candidates are always selected
  int32_t padding;
};

// Means over the tokens of each query block, or of each key block.
struct Pool {
  View x;
  float* means;  // (key head, block, head_dim)
  Shape shape;
  int32_t query;  // 1: blocks of queries; 0: blocks of keys
  int32_t heads;  // query heads that share a mean; 1 for keys
  int32_t pool;   // causal: a mean covers at most this many queries, which end with the block's first query
  int32_t blocks;
};

// Sums the probabilities of dense attention over each key block.
struct Mass {
  Forward forward;  // the kernel reads only q, k and shape
  float* mass;      // (key head, query block, columns); zeroed before the launch
  int32_t query_blocks;
  int32_t columns;
};

// The mixture a * sparse + (1 - a) * tail: see attention/mixture.cuh.
struct Mixture {
  const float* theta;  // (query head); null: no mixture
  float* parts;        // (query head, query block): each query block's contribution to dtheta
  Lists lists;
  int32_t by_count;
  int32_t padding;
};

// Linear attention over the key blocks before a query block, or its mixture with exact attention.
struct Linear {
  View q;
  View k;
  View v;
  View out;
  View dout;
  View dq;
  View dk;
  View dv;
  View sparse;        // with a mixture: the output of exact attention
  void* states;       // (key head, block, D, D) in 16 bit: H (past_linear.cu) of the tokens before a query block in this block's
                      // chunk, times inverse_blocks(block) / BLOCK; with `backward`, H of the queries after a key block
                      // in this block's chunk
  float* sums;        // (key head, block, D): z of the same tokens, times the same factor
  float* chunk_sums;  // (key head, segment, chunk, D + 1, D): H and z of a chunk; linear_scan_chunks replaces z by z of all earlier chunks
  void* chunk_states; // (key head, segment, chunk, D, D) in 16 bit: H of all tokens before a chunk, or with `backward` after it,
                      // times the factor of the chunk's first block; z in chunk_sums has the same factor
  float* rows;        // (query head, padded query, 2): backward only: the factor of a query's dO in H, and the query's weight in z
  Mixture mixture;
  Shape shape;
  int32_t blocks;        // of all segments
  int32_t chunks;        // of a segment
  int32_t chunk_blocks;
  int32_t backward;
  int32_t add;  // 1: gradients are added to the contents of dq, dk and dv
  int32_t padding;
};

// The mixture as a separate pass. `blend_backward_exact` accesses neither `tail` nor `dtail`.
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
