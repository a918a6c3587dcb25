// What crosses from the host for selections, their router, the linear tail and the mixture. Mirrored byte for byte in
// candle-sage/src/cuda/params/sla2.rs: offsets are asserted on both sides.
#pragma once

#include <sage/params/attention.cuh>

namespace sage::params {

// The inverse of a selection's lists.
struct Users {
  Lists lists;
  User* users;            // (key head, query_blocks x (stride - 1))
  uint32_t* first_users;  // (key head, key_blocks + 1)
  uint32_t* counts;       // (key head, key_blocks)
  Shape shape;
};

// The largest scores of each row.
struct Choose {
  const float* scores;  // (key head, block of queries, columns)
  Lists lists;          // written
  Shape shape;
  int32_t columns;
  int32_t most;
};

// Means of blocks, of queries or of keys.
struct Pool {
  View x;
  float* means;  // (key head, block, head_dim)
  Shape shape;
  int32_t query;  // else of keys
  int32_t heads;  // that share a mean
  int32_t pool;   // queries up to a block's first, with a causal mask
  int32_t blocks;
};

// Where dense attention's mass lies.
struct Mass {
  Forward forward;  // q, k, shape
  float* mass;      // (key head, block of queries, columns), zeros before
  int32_t query_blocks;
  int32_t columns;
};

// Linear attention over past blocks.
struct Linear {
  View q;
  View k;
  View v;
  View out;
  View dout;
  View dq;
  View dk;
  View dv;
  void* states;       // (key head, block, D, D) in 16 bit: what lies before a block of queries, divided by its tokens; on the way back
                      // what comes after a block of keys
  float* sums;        // (key head, block, D): the same of the features alone
  float* chunk_sums;  // (key head, segment, chunk, D + 1, D): of chunks of blocks
  float* rows;        // (query head, padded query, 2): on the way back, factors of the output's gradient and of 1
  Shape shape;
  int32_t blocks;        // of all segments
  int32_t chunks;        // of a segment
  int32_t chunk_blocks;
  int32_t backward;
  int32_t add;  // gradients to what is there
  int32_t padding;
};

// a sparse + (1 - a) tail.
struct Blend {
  View sparse;
  View tail;
  View out;  // or dsparse
  View dtail;
  View dout;
  const float* theta;
  float* parts;   // (query head, block of queries): of dtheta
  float* dtheta;
  Lists lists;
  Shape shape;
  int32_t by_count;
  int32_t padding;
};

static_assert(sizeof(Users) == 120 && offsetof(Users, shape) == 64);
static_assert(sizeof(Choose) == 112 && offsetof(Choose, shape) == 48);
static_assert(sizeof(Pool) == 128 && offsetof(Pool, shape) == 56);
static_assert(sizeof(Mass) == 896 && offsetof(Mass, mass) == 832);
static_assert(sizeof(Linear) == 496 && offsetof(Linear, states) == 384 && offsetof(Linear, shape) == 416);
static_assert(sizeof(Blend) == 368 && offsetof(Blend, theta) == 240 && offsetof(Blend, shape) == 304);

}  // namespace sage::params
