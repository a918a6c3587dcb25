// The sums of dQ in global memory are indexed by (tile, one of `parts` parts of the channels, strip of 16 queries,
// fragment of 8 channels, lane, value). Tiles are numbered over all heads and segments; each segment is padded to whole
// tiles. A fragment is 512 contiguous bytes. Mainloops write this layout; `finish` in attn_bwd.cu reads the sums.
#pragma once

#include <sage/attention/segment.cuh>

namespace sage::attention {

template <int D>
struct DqLayout {
  static constexpr int TILE_FLOATS = TILE * D, FRAGMENT_FLOATS = 128;
  int part;  // fragments per part

  __device__ __forceinline__ constexpr explicit DqLayout(int parts) : part(D / 8 / parts) {}

  struct Fragment {
    int strip, n;  // the indices of a strip of 16 queries and of a fragment of 8 channels
  };
  // The fragment that is stored at position `number` of a tile, and the inverse.
  __device__ __forceinline__ constexpr Fragment fragment(int number) const {
    return {number / part % 4, number % part + number / part / 4 * part};
  }
  __device__ __forceinline__ constexpr int number(int strip, int n) const { return (n / part * 4 + strip) * part + n % part; }
};

}  // namespace sage::attention
