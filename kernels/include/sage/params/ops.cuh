// What crosses from the host for all ops but attention. Mirrored byte for byte in candle-sage/src/cuda/ops/params.rs:
// offsets are asserted on both sides.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace sage::params {

// Rows without gaps.
struct RmsNorm {
  const void* x;
  const void* weight;
  const void* dy;    // backward only
  const void* residual;  // null, or what is added: to x before the norm, or to dx
  void* sum;         // forward with a residual: x + residual
  void* out;         // y, or dx
  float* partials;   // (blocks, width): each block's part of the weight's gradient; backward only
  int32_t rows;
  int32_t width;
  int32_t lanes;     // threads of a row
  int32_t weight_type;
  float eps;
  int32_t padding;
};

// A column of sums: out[c] = sum over parts of partials[part][c].
struct PartialSums {
  const float* partials;
  void* out;
  int32_t parts;
  int32_t width;
};

// sum[c] = parts[0][c] + .. + parts[place - 1][c] + sum[c] + parts[place][c] + ..
struct SumInOrder {
  const float* parts;  // (count, width)
  float* sum;
  int64_t width;
  int32_t count;
  int32_t place;
};

// Strides in elements; channels are neighbours.
struct Heads {
  void* data;
  int64_t batch;
  int64_t token;
  int64_t head;
};

struct Rope {
  Heads x;            // what is rotated, or normalized and rotated
  Heads dy;           // with norm, backward only
  Heads out;          // batch entries follow one another
  const float* cos;   // (sequence, half)
  const float* sin;
  const void* weight;  // (2 half); with norm only
  float* partials;     // as in RmsNorm
  int32_t tokens;      // of all batch entries
  int32_t sequence;
  int32_t heads;
  int32_t half;        // pairs of channels
  int32_t lanes;       // threads of a head
  int32_t interleaved;
  int32_t weight_type;
  float eps;
  float direction;     // of the rotation: 1 or -1; without norm only
  int32_t padding;
};

// Rows of so many columns, so many elements apart; dy and y have no gaps.
struct SwiGlu {
  const void* gate;
  const void* up;
  const void* dy;  // backward only
  void* out;       // y, or dgate
  void* dup;       // backward only
  void* y;         // backward only: null, or where y is wanted once more
  int64_t len;
  int64_t columns;
  int64_t gate_row;
  int64_t up_row;
  int64_t out_row;  // of dup too
};

// Ids of any integer type to places in a table.
struct CheckIds {
  const void* ids;
  uint32_t* places;  // NO_PLACE where an id does not count
  uint32_t* status;  // len - the first place of a bad id, 0 for none; how many ids count. Zeros before.
  int64_t limit;     // ids are below
  int64_t ignored;
  int32_t ignores;   // whether there is an ignored id
  int32_t len;
};

constexpr uint32_t NO_PLACE = ~0u;

// One pass of a stable radix sort, by the digit at `shift`.
struct SortIds {
  const uint32_t* ids;
  const uint32_t* order;  // where each came from; null: the first pass
  uint32_t* sorted_ids;
  uint32_t* sorted_order;
  uint32_t* counts;       // (tiles, digits)
  int32_t len;
  int32_t shift;
};

struct Embedding {
  const void* from;         // the table, or the output's gradient without gaps
  const uint32_t* ids;      // forward: in order; backward: sorted
  const uint32_t* order;    // backward: where each sorted id came from
  uint32_t* starts;         // backward: (rows + 1), the first sorted id not below each row
  float* pieces;            // backward: (len / PIECE, width), sums of pieces of one id
  void* out;
  int64_t row_stride;       // forward, of the table
  int64_t column_stride;
  int32_t len;              // ids
  int32_t rows;             // of the table
  int32_t width;
  int32_t lanes;            // threads of a row
};

struct CrossEntropy {
  const void* logits;       // (rows, classes) without gaps
  void* gradient;           // may be the logits; of mean_loss: the mean
  const uint32_t* targets;  // NO_PLACE where a target does not count
  const uint32_t* status;   // of CheckIds
  const float* dloss;       // backward only
  float* losses;            // (rows)
  float* lse;               // (rows): natural log-sum-exp
  int32_t rows;
  int32_t classes;
  int32_t lanes;
  float z_loss;  // z: each row's loss has z lse^2 more
};

// out = (or, to accumulate, +=) from * factor; the factor is dloss / ids that count, or 1 where dloss is null.
struct Scale {
  const void* from;
  void* out;
  const float* dloss;
  const uint32_t* status;
  int64_t len;
  int32_t accumulate;
  int32_t padding;
};

// partials: of each block; out: their sum.
struct SumOfSquares {
  const float* x;
  double* partials;
  double* out;
  int64_t len;
  int32_t parts;
  int32_t vector;  // whether x starts on 16 bytes
};

struct AdamW {
  float* weights;
  float* mean;
  float* square;
  const float* gradient;
  const double* sum_of_squares;  // of the gradient
  void* copy;      // null, or the weights in 16 bits
  int64_t len;
  int64_t decayed;  // the first so many weights decay
  float factor;    // of the gradient
  float clip;      // the largest norm of the gradient times factor; infinity: any
  float beta1;
  float beta2;
  float rate;      // lr / (1 - beta1^step)
  float root;      // 1 / (1 - beta2^step)
  float eps;
  float keep;      // 1 - lr decay
  int32_t copy_type;
  int32_t padding;
};

static_assert(sizeof(RmsNorm) == 80 && offsetof(RmsNorm, rows) == 56 && offsetof(RmsNorm, eps) == 72);
static_assert(sizeof(PartialSums) == 24);
static_assert(sizeof(Heads) == 32);
static_assert(sizeof(Rope) == 168 && offsetof(Rope, out) == 64 && offsetof(Rope, tokens) == 128 &&
              offsetof(Rope, eps) == 156);
static_assert(sizeof(SwiGlu) == 88 && offsetof(SwiGlu, out_row) == 80);
static_assert(sizeof(CheckIds) == 48 && offsetof(CheckIds, ignores) == 40);
static_assert(sizeof(SortIds) == 48 && offsetof(SortIds, len) == 40);
static_assert(sizeof(Embedding) == 80 && offsetof(Embedding, row_stride) == 48 && offsetof(Embedding, len) == 64);
static_assert(sizeof(CrossEntropy) == 72 && offsetof(CrossEntropy, rows) == 56 && offsetof(CrossEntropy, z_loss) == 68);
static_assert(sizeof(SumOfSquares) == 40 && offsetof(SumOfSquares, parts) == 32);
static_assert(sizeof(AdamW) == 104 && offsetof(AdamW, len) == 48 && offsetof(AdamW, factor) == 64 &&
              offsetof(AdamW, copy_type) == 96);
static_assert(sizeof(Scale) == 48 && offsetof(Scale, accumulate) == 40);

}  // namespace sage::params
