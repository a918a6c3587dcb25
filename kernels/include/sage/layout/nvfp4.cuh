// The layout of NVFP4 in global and in shared memory, in tiles of 64 tokens: swizzled rows of FP4 values (two per
// byte), followed by the rows' scales (one byte for 16 values).
//
// Scales have the layout of tensor memory (PTX ISA, tcgen05.mma, "Block Scaling"): 32 rows of 16 bytes. For a tile of R
// rows, the scale of row r's group g is byte 16 * (r % 32) + 4 * (R / 32) * (g / 4) + 4 * (r / 32) + g % 4. At D = 64
// half of each 16 bytes is unused. For mma.sync, where a lane reads the scales of four groups as one word, the order of
// these words does not matter.
//
// A matmul may sum over keys in any order, as long as both operands use the same order. With mma.sync, a lane has
// columns 8n + 2t and 8n + 2t + 1 of an accumulator (t = lane % 4), but needs keys 8t to 8t + 7 and 32 + 8t to
// 32 + 8t + 7 of the operand P. K's rows are therefore permuted, so that the accumulators of a lane belong to these
// keys, in order. V's keys are not permuted, so that a group of V is 16 neighbouring tokens. With tcgen05 a thread has
// all columns of a row of S, so that any order of K's rows would work; K is permuted as for mma.sync.
#pragma once

#include <sage/layout/swizzle.cuh>

namespace sage::layout {

// The row of a stored tile of K that contains key `key` (0 to 63) of the tile.
__host__ __device__ constexpr int row_of_key(int key) {
  int t = key >> 3 & 3, slot = (key & 7) + 8 * (key >> 5);
  return 8 * (slot >> 1) + 2 * t + (slot & 1);
}

// The key that accumulator `slot` (0 to 15) of a lane belongs to, with t = lane % 4.
__host__ __device__ constexpr int key_of_slot(int slot, int t) { return 8 * t + slot + (slot < 8 ? 0 : 24); }

static_assert(row_of_key(key_of_slot(0, 3)) == 6 && row_of_key(key_of_slot(3, 1)) == 11 && row_of_key(63) == 63);

// Sizes of a tile of D channels, in bytes. A row of Q and K is a token, a row of V is a channel.
template <int D>
struct Nvfp4Tile {
  static constexpr int ROW = D / 2, V_ROW = 32;  // bytes of a row of FP4 values
  static constexpr int GROUPS = D / 16, V_GROUPS = 4;  // scales per row of Q or K, and of V
  static constexpr int CODES_BYTES = 64 * ROW;   // FP4 values of a tile of Q, K or V
  static constexpr int SCALES_BYTES = 512;
  static constexpr int BYTES = CODES_BYTES + SCALES_BYTES;
  static_assert(D * V_ROW == CODES_BYTES && 64 * GROUPS <= SCALES_BYTES && D * V_GROUPS <= SCALES_BYTES);

  // The offset of the four scales for FP4 values 64 * step to 64 * step + 63 of row `row`, from the start of the tile's
  // scales. The tile has ROWS rows.
  template <int ROWS>
  static __host__ __device__ constexpr int scales_at(int row, int step) {
    return row % 32 * 16 + step * (ROWS / 32 * 4) + row / 32 * 4;
  }
};

}  // namespace sage::layout
