// Arguments of the kernels for selections, their router, the linear tail and the mixture, filled by the host. candle-sage/build/params.rs makes its structs from
// these, a field a line, and asserts the offsets on both sides.
#pragma once

#include <sage/params/attention.cuh>

namespace sage::params {

// Inverts a selection's lists: finds the users of each block of keys, and cuts those of the most wanted blocks into parts.
struct Users {
  Lists lists;
  User* users;            // (key head, query_blocks x (stride - 1))
  uint32_t* first_users;  // (key head, key_blocks + 1)
  uint32_t* counts;       // (key head, key_blocks): the number of users
  uint32_t* used;         // slots and parts that are used, and the number of all users; zeros before
  Shape shape;
  Cuts cuts;              // parts are zeros before; lists null: no list is cut
  uint32_t least_users;   // of a part
  int32_t shares;         // into which all users together would be cut, if all lists were long
  int32_t most_slots;
  int32_t most_parts;
  int32_t slot_floats;    // of a slot's sums
  int32_t slot_pieces;    // that they are divided into, each with the sums of a warp
};

// Writes the lists of a selection: the blocks with the largest scores of each row.
struct Choose {
  const float* scores;  // (key head, block of queries, columns)
  Lists lists;          // written
  Shape shape;
  int32_t columns;
  int32_t most;
  int32_t nearest;  // of these the last candidates, whatever their scores
  int32_t padding;
};

// Means of the tokens of each block of queries, or of keys.
struct Pool {
  View x;
  float* means;  // (key head, block, head_dim)
  Shape shape;
  int32_t query;  // 1: blocks of queries; 0: blocks of keys
  int32_t heads;  // query heads that share a mean; 1 for keys
  int32_t pool;   // causal: the queries of a mean, which end with the block's first query
  int32_t blocks;
};

// Sums the probabilities of dense attention over each block of keys.
struct Mass {
  Forward forward;  // of it the kernel reads q, k and shape
  float* mass;      // (key head, block of queries, columns); zeros before
  int32_t query_blocks;
  int32_t columns;
};

// The mixture a sparse + (1 - a) tail of exact attention over the selected blocks and the linear tail.
struct Mixture {
  const float* theta;  // (query head); null: no mixture
  float* parts;        // (query head, block of queries): sums for dtheta
  Lists lists;
  int32_t by_count;
  int32_t padding;
};

// Linear attention over past blocks, or its mixture with exact attention.
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
  void* states;       // (key head, block, D, D) in 16 bit: H of the tokens before a block of queries in its chunk, times
                      // inverse_blocks(block) / BLOCK; with `backward`, of the queries after a block of keys in its chunk, times 1.
  float* sums;        // (key head, block, D): z, the same sums of the features alone
  float* chunk_sums;  // (key head, segment, chunk, D + 1, D): H and z of each chunk of blocks; then z of all before a chunk
  void* chunk_states; // (key head, segment, chunk, D, D) in 16 bit: H of all tokens before a chunk, or with `backward` after it,
                      // times the factor of the chunk's first block; so is z in chunk_sums
  float* rows;        // (query head, padded query, 2): backward only, the query's factors of dO in H and of 1 in z
  Mixture mixture;
  Shape shape;
  int32_t blocks;        // of all segments
  int32_t chunks;        // of a segment
  int32_t chunk_blocks;
  int32_t backward;
  int32_t add;  // 1: gradients are added to what dq, dk and dv hold
  int32_t padding;
};

// The mixture by itself. `blend_backward_exact` reads and writes no `tail` and `dtail`.
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
