// The permuted order of tokens in transposed INT8 tiles.
//
// A matmul may sum over the reduction in any order, as long as both operands use the same order. In an accumulator, a
// lane has columns 8j + 2t and 8j + 2t + 1 (t = lane % 4). In an 8-bit operand, it has four neighbouring columns from
// 4t on. So slot 4t + i of every 16 slots stores token 8 * (i / 2) + 2t + i % 2. Four accumulator registers of a lane
// then become one operand register without a shuffle.
#pragma once

#include <stdint.h>

namespace sage::layout {

// The token in `slot`. Tokens and slots are numbered from 0 to 15.
__host__ __device__ constexpr int token_of_slot(int slot) {
  return 8 * ((slot >> 1) & 1) + 2 * (slot >> 2) + (slot & 1);
}

// The bytes of 16 tokens in slot order. `byte_of(token)` reads one token's byte; `token` is 0 to 15.
template <class Read>
__device__ __forceinline__ uint4 gather_tokens(Read byte_of) {
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    words[w] = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) words[w] |= uint32_t(byte_of(token_of_slot(4 * w + b))) << (8 * b);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace sage::layout
