// Arguments that the host passes to the kernels of all ops except attention. candle-sage/build/params.rs generates Rust
// structs from this file, and asserts that the offsets in Rust and C++ are equal. Each field must have its own line.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace sage::params {

// Rows are contiguous.
struct RmsNorm {
  const void* x;
  const void* weight;
  const void* dy;    // backward only
  const void* residual;  // forward: the residual stream, added to x; backward: its gradient, added to dx. May be null
  void* sum;         // forward with a residual: x + residual
  void* out;         // y, or dx
  float* partials;   // (thread blocks, width): the weight's gradient, summed over a thread block's rows; backward only
  int32_t rows;
  int32_t width;
  int32_t lanes;     // threads that share a row
  int32_t weight_type;
  float eps;
  int32_t padding;
};

// Layer normalization: `of` has no residual.
struct LayerNorm {
  RmsNorm of;
  const void* bias;
  float* bias_partials;  // backward only: like RmsNorm::partials, for the bias's gradient
  int32_t bias_type;
  int32_t padding;
};

// Sums of columns: out[c] = sum over parts of partials[part][c].
struct PartialSums {
  const float* partials;
  void* out;
  int32_t parts;
  int32_t width;
};

// sum[c] = parts[0][c] + .. + parts[place - 1][c] + sum[c] + parts[place + 1][c] + .. Neighbouring terms are added in
// pairs, then the sums of neighbouring pairs, and so on.
struct SumInOrder {
  const float* parts;  // (count, width); instead of row `place`, `sum` is read
  float* sum;
  int64_t width;
  int32_t count;
  int32_t place;
};

// A (batch, token, head, channel) tensor; strides are in elements, channels are contiguous.
struct Heads {
  void* data;
  int64_t batch;
  int64_t token;
  int64_t head;
};

struct CopyHeads {
  Heads x;
  Heads out;
  int32_t tokens;    // of all batch entries
  int32_t sequence;
  int32_t heads;
  int32_t packs;     // per head
};

struct Rope {
  Heads x;            // the input of the rotation; with norm, the input of the norm
  Heads dy;           // the output's gradient; only in the backward with norm
  Heads out;          // batch entries are contiguous
  const float* cos;   // (sequence, half)
  const float* sin;
  const void* weight;  // (2 * half); only with norm
  float* partials;     // like RmsNorm::partials; only in the backward with norm
  int32_t tokens;      // of all batch entries
  int32_t sequence;
  int32_t heads;
  int32_t half;        // pairs of channels
  int32_t lanes;       // threads that share a head
  int32_t interleaved;
  int32_t weight_type;
  float eps;
  float direction;     // 1 or -1, multiplies the angle; not used if x is normalized
  int32_t padding;
};

// Rows of `columns` elements. `gate_row`, `up_row` and `out_row` are the distances between the starts of two rows, in
// elements. The rows of `dy` and `y` are contiguous.
struct SwiGlu {
  const void* gate;
  const void* up;
  const void* dy;  // backward only
  void* out;       // y, or dgate
  void* dup;       // backward only
  void* y;         // backward only: the buffer for y, which is computed again; null: y is not stored
  int64_t len;
  int64_t columns;
  int64_t gate_row;
  int64_t up_row;
  int64_t out_row;  // of the rows of `out` and of `dup`
};

// Checks ids of any integer type, and converts them to uint32_t.
struct CheckIds {
  const void* ids;
  uint32_t* places;  // each id as uint32_t; NO_PLACE for an id that is invalid or ignored
  uint32_t* status;  // zeroed before the launch. [0]: 0, or len - (index of first invalid id); [1]: number of valid ids
  int64_t limit;     // valid ids are below `limit`
  int64_t ignored;
  int32_t ignores;   // 1: an id equal to `ignored` is not an error, and is not counted in status[1]
  int32_t len;
};

constexpr uint32_t NO_PLACE = ~0u;

// One pass of a stable radix sort, by the digit that starts at bit `shift`.
struct SortIds {
  const uint32_t* ids;
  const uint32_t* order;  // the original position of each id; null in the first pass
  uint32_t* sorted_ids;
  uint32_t* sorted_order;
  uint32_t* counts;       // (tiles, digits)
  int32_t len;
  int32_t shift;
};

struct Embedding {
  const void* from;         // forward: the embedding table; backward: the output's gradient, contiguous
  const uint32_t* ids;      // forward: in the order of the output's rows; backward: sorted
  const uint32_t* order;    // backward: the original position of each sorted id
  uint32_t* starts;         // backward: (rows + 1), for each row r the index of the first sorted id that is at least r
  float* pieces;            // backward: (len / PIECE, width): gradient sum of PIECE sorted ids; unset if the ids differ
  void* out;
  int64_t row_stride;       // forward: strides of `from`
  int64_t column_stride;
  int32_t len;              // ids
  int32_t rows;             // rows of the table
  int32_t width;
  int32_t lanes;            // threads that share a row
};

struct CrossEntropy {
  const void* logits;       // (rows, classes) without gaps
  void* gradient;           // the gradient (may alias the logits); in the kernel mean_loss, the output: the mean loss
  const uint32_t* targets;  // NO_PLACE for a target that is invalid or ignored
  const uint32_t* status;   // CheckIds::status
  const float* dloss;       // backward only
  float* losses;            // (rows)
  float* lse;               // (rows): natural log-sum-exp
  int32_t rows;
  int32_t classes;
  int32_t lanes;
  float z_loss;  // weight of the z-loss: z_loss lse^2 is added to each row's loss
};

// out = from * factor, or out += from * factor with `accumulate`. The factor is dloss / status[1] (CheckIds: the number
// of valid targets), or 1 if dloss is null.
struct Scale {
  const void* from;
  void* out;
  const float* dloss;
  const uint32_t* status;
  int64_t len;
  int32_t accumulate;
  int32_t padding;
};

// `partials` stores the sum of each thread block, and `out` the sum of `partials`.
struct SumOfSquares {
  const float* x;
  double* partials;
  double* out;
  int64_t len;
  int32_t parts;
  int32_t vector;  // 1: x is 16-byte aligned
};

struct AdamW {
  float* weights;
  float* mean;
  float* square;
  const float* gradient;
  const double* sum_of_squares;  // of the gradient: SumOfSquares::out
  void* copy;      // null, or a 16-bit copy of the weights, in the format `copy_type`
  int64_t len;
  int64_t decayed;  // weight decay applies to the first `decayed` weights
  float factor;    // multiplies the gradient
  float clip;      // largest allowed norm of factor * gradient; infinity: no clipping
  float beta1;
  float beta2;
  float rate;      // lr / (1 - beta1^step)
  float root;      // 1 / (1 - beta2^step)
  float eps;
  float keep;      // 1 - lr * weight decay
  int32_t copy_type;
  int32_t padding;
};

// A matrix of `len` elements. `direction` is in bf16.
struct MuonMomentum {
  float* momentum;
  const float* gradient;
  const double* sum_of_squares;  // of the gradient of all parameters: SumOfSquares::out
  void* direction;
  int64_t len;
  float factor;                  // as in AdamW
  float clip;
  float beta;
  float unit;                    // multiplies the direction
  int32_t nesterov;
  int32_t padding;
};

// Orthogonalized directions: contiguous matrices of (rows, columns), in bf16.
struct MuonRows {
  void* x;
  float* mean_squares;           // running mean squares, one per row; null in muon_scale_rows
  float* factors;                // one per row of x: its mean square, which muon_row_factors replaces by its factor
  const double* sum_of_squares;  // of the gradient of all parameters: SumOfSquares::out
  int32_t rows;
  int32_t columns;
  float beta;
  int32_t padding;
};

// Inverse square roots of the traces of bf16 matrices (size, size).
struct MuonTrace {
  const void* x;
  float* inverse;  // one per matrix; 0 if the matrix's trace is not positive or not finite
  int32_t size;
  int32_t padding;
};

// y = f * (a * I + b * x + c * y) for matrices (size, size) in bf16.
struct MuonCombine {
  const void* x;
  void* y;               // not read if c is 0
  const float* inverse;  // null, or one per matrix: MuonTrace::inverse
  int64_t len;
  int32_t size;
  int32_t power;         // f is this power of `inverse`
  float a;
  float b;
  float c;
  int32_t padding;
};

struct MuonApply {
  float* weights;
  const void* direction;
  const double* sum_of_squares;
  void* copy;         // as in AdamW
  int64_t len;
  float rate;
  float keep;         // 1 - lr * weight decay
  int32_t copy_type;
  int32_t padding;
};

// A matrix quantized to FP8, whose dimensions are multiples of 16.
struct Fp8Codes {
  uint8_t* row_codes;     // null, or (rows, columns)
  uint8_t* column_codes;  // null, or (columns, rows)
  const float* scale;     // a power of two: element = the code's value * scale
  float* used;            // output, or null: the scale that was used. `scale` may change while the codes are in use
  uint32_t* largest;      // the bits of the largest absolute value before quantization, updated by atomic max
  uint32_t* saturated;    // counter of values beyond the range of the FP8 format
  int32_t rows;
  int32_t columns;
  int32_t e5m2;           // 1: codes are E5M2; 0: E4M3
  int32_t padding;
};

// A contiguous matrix (rows, columns). It becomes the columns of `codes` from `first_column` on.
struct Fp8Quantize {
  const void* x;
  Fp8Codes codes;
  int32_t columns;
  int32_t first_column;
};

// The forward writes y only in FP8. The backward writes dx both to `out` and in FP8.
struct Fp8RmsNorm {
  RmsNorm of;
  Fp8Codes codes;
};

// The gradient of QK-norm and rope (`of` has their parameters) in FP8. It is written to the columns of `codes` from
// `first_column` on, with all heads of a token side by side.
struct Fp8Rope {
  Rope of;
  Fp8Codes codes;
  int32_t first_column;
  int32_t padding;
};

// The forward writes y in FP8: (rows, columns). The backward writes dgate and dup in FP8, side by side in one matrix:
// (rows, 2 * columns).
struct Fp8SwiGlu {
  SwiGlu of;
  Fp8Codes codes;
  Fp8Codes again;  // backward only: y, computed again; not written if again.column_codes is null
};

// The gradient of (factor * the sum of the losses), in FP8 with the fixed scale `scale`.
struct Fp8CrossEntropy {
  CrossEntropy of;  // logits, targets and lse
  Fp8Codes codes;
  float factor;
  float scale;
};

struct Fp8Rescale {
  float* scale;
  uint32_t* largest;     // bits of each matrix's largest absolute value
  float* running;        // each matrix's running maximum of `largest`; null: scales are computed from `largest`
  const float* formats;  // one per scale: 1 for E5M2, 0 for E4M3; null: `e5m2` applies to all scales
  int32_t count;
  int32_t e5m2;
  float decay;   // of the running maxima
  float margin;  // with running maxima: scales are computed from margin * running maximum
};

}  // namespace sage::params
