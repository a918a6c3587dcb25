// The order of tokens in transposed codes.
//
// A product sums over the reduction in any order, as long as both operands use the same. In an accumulator a lane
// holds columns 8j + 2t, 8j + 2t + 1 (t = lane % 4); an 8-bit operand wants four neighbours at 4t. So inside every 16
// tokens slot 4t + i holds token 8 (i / 2) + 2t + i % 2: four accumulator registers are one operand register.
#pragma once

namespace sage::layout {

// The token in a slot, both 0 to 15.
__host__ __device__ constexpr int token_of_slot(int slot) {
  return 8 * ((slot >> 1) & 1) + 2 * (slot >> 2) + (slot & 1);
}

}  // namespace sage::layout
