// How NVFP4 codes lie in memory and in shared memory, tile by tile of 64 tokens: rows of codes, two a byte, swizzled, and
// behind them a row of scales for each, a byte for 16 codes.
//
// A product sums over keys in any order, as long as both operands use the same. In an accumulator a lane holds columns
// 8n + 2t and 8n + 2t + 1 (t = lane % 4), an operand of P wants keys 8t to 8t + 7 and 32 + 8t to 32 + 8t + 7: so K's rows
// change places, and the accumulators of a lane are its keys, in order. V's keys stay where they are, and groups of 16
// are neighbours.
#pragma once

#include <sage/layout/swizzle.cuh>

namespace sage::layout {

// Where key `key` of a tile's 64 is among its rows.
__host__ __device__ constexpr int row_of_key(int key) {
  int t = key >> 3 & 3, slot = (key & 7) + 8 * (key >> 5);
  return 8 * (slot >> 1) + 2 * t + (slot & 1);
}

// The key that number `slot`, 0 to 15, of a lane's accumulators belongs to.
__host__ __device__ constexpr int key_of_slot(int slot, int t) { return 8 * t + slot + (slot < 8 ? 0 : 24); }

static_assert(row_of_key(key_of_slot(0, 3)) == 6 && row_of_key(key_of_slot(3, 1)) == 11 && row_of_key(63) == 63);

// Tiles of D channels, in bytes. Of Q and K a row is a token, of V a channel.
template <int D>
struct Nvfp4Tile {
  static constexpr int ROW = D / 2, SCALES = D / 16, V_ROW = 32, V_SCALES = 4;
  static constexpr int CODES_BYTES = 64 * ROW;     // of V as many
  static constexpr int SCALES_BYTES = 64 * SCALES;  // of V as many
  static constexpr int BYTES = CODES_BYTES + SCALES_BYTES;
  static_assert(D * V_ROW == CODES_BYTES && D * V_SCALES == SCALES_BYTES);
};

}  // namespace sage::layout
