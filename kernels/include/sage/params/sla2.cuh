// Arguments of the kernels for selections, their router, the linear tail and the mixture, filled by the host.
// candle-sage/build/params.rs generates its structs from this file, one field per line, and asserts the offsets on both
// sides.
#pragma once

#include <sage/params/attention.cuh>

namespace sage::params {

// Inverts a selection's lists: finds the query blocks that select each key block, and splits long lists.
struct InvertedLists {
  Lists lists;
  User* users;            // (key head, lists.query_blocks * (lists.stride - 1))
  uint32_t* first_users;  // (key head, key_blocks + 1)
  uint32_t* counts;       // (key head, key_blocks): number of query blocks that select the key block
  uint32_t* used;         // three counters, zeroed before the launch: used slots of `cuts`; used entries of cuts.parts;
                          // selected (query block, key block) pairs
  Shape shape;
  ListSplits cuts;              // cuts.parts is zeroed before the launch; cuts.lists null: no list is split
  uint32_t least_users;   // a part has at most max(least_users, (selected pairs) / `shares`) query blocks
  int32_t shares;
  int32_t most_slots;
  int32_t most_parts;
  int32_t slot_floats;    // floats of a slot in ListSplits::sums
  int32_t slot_pieces;    // counters of a slot in ListSplits::arrivals
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
  int32_t pool;   // causal: a mean covers the block's first query and up to pool - 1 queries before it
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
  void* states;       // (key head, block, D, D) in 16 bit: the state H (past_linear.cu) for each block. In the forward:
                      // of the tokens before the query block in its chunk, times inverse_blocks(block) / BLOCK. With
                      // `backward`: of the queries after the key block in its chunk
  float* sums;        // (key head, block, D): z, of the same tokens and with the same factor as H in `states`
  float* chunk_sums;  // (key head, segment, chunk, D + 1, D): H and z of a chunk. linear_scan_chunks then writes
                      // into z the sum for the tokens, and with the factor, of chunk_states (next line)
  void* chunk_states; // (key head, segment, chunk, D, D) in 16 bit: H of all tokens before a chunk, times
                      // inverse_blocks(the chunk's first block) / BLOCK; with `backward`, H of all queries after the
                      // chunk, without a factor
  float* rows;        // (query head, padded query, 2), for the H and z of queries after a key block: the factor of a
                      // query's dO in H, and the factor of its phi in z
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
