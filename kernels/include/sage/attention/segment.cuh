// A segment is one independent attention problem: a batch entry or a packed document. (In Rust: Segment in
// candle-sage/src/shape.rs.) This file also maps the indices of thread blocks to segments and heads.
#pragma once

#include <sage/params/attention.cuh>

namespace sage::attention {

// The number of tokens in a tile. The tokens of a tile of Q, K or V share an INT8 scale. Padded buffers store each
// segment in whole tiles.
constexpr int TILE = 64;

struct Segment {
  int batch;
  int query_start, query_len, key_start, key_len;
  int query_tile, key_tile;  // the segment's first tile of queries, and of keys, in padded buffers
  bool causal;  // not used by kernels with a window: see Sight<OUTER_KEYS>

  Segment() = default;
  __device__ __forceinline__ Segment(const params::Shape& shape, int index) {
    causal = shape.limit_after;
    if (shape.segments) {
      params::Segment s = shape.segments[index];
      batch = 0;
      query_start = s.query_start, query_len = s.query_len, key_start = s.key_start, key_len = s.key_len;
      query_tile = s.query_tile, key_tile = s.key_tile;
    } else {
      batch = index;
      query_start = key_start = 0;
      query_len = shape.query_len, key_len = shape.key_len;
      query_tile = index * ((query_len + TILE - 1) / TILE), key_tile = index * ((key_len + TILE - 1) / TILE);
    }
  }

  __device__ __forceinline__ int query_tiles() const { return (query_len + TILE - 1) / TILE; }
  __device__ __forceinline__ int key_tiles() const { return (key_len + TILE - 1) / TILE; }

  // Without a window: the number of keys that query `i` attends to, which are the first keys of the segment. The causal
  // mask is aligned at the end, as in FlashAttention: the last query sees all keys.
  __device__ __forceinline__ int visible_keys(int i) const {
    return causal ? min(max(i + 1 + key_len - query_len, 0), key_len) : key_len;
  }

  // The first query that attends to key `j`, at most `query_len`.
  __device__ __forceinline__ int first_query(int j) const {
    return causal ? min(max(j + query_len - key_len, 0), query_len) : 0;
  }
};

// Which keys of a tile can be hidden from a query: none; keys after the last visible key, as with a causal mask or at
// the segment's end; or, with a window, also keys before the first visible key. Kernels for windows are compiled
// separately, so that windows do not slow down other kernels.
enum Hidden { NO_KEYS, LATER_KEYS, OUTER_KEYS };

// The keys that the queries of a segment see. HIDDEN: which keys the kernel can hide. P: the parameters of a forward or
// a backward.
template <Hidden HIDDEN>
struct Sight {
  const Segment& segment;
  template <class P>
  __device__ __forceinline__ Sight(const Segment& segment, const P&) : segment(segment) {}

  __device__ __forceinline__ int visible_keys(int i) const { return segment.visible_keys(i); }
};

// With a window, a query sees the keys from `before` positions before its own to `after` positions after it.
template <>
struct Sight<OUTER_KEYS> {
  const Segment& segment;
  int before, after;
  __device__ __forceinline__ Sight(const Segment& segment, int before, int after) : segment(segment), before(before), after(after) {}
  template <class P>
  __device__ __forceinline__ Sight(const Segment& segment, const P& p)
      : segment(segment), before(p.lists.keys_before),
        after(p.shape.limit_after > 0 ? p.shape.limit_after - 1 : max(p.shape.query_len, p.shape.key_len)) {}

  __device__ __forceinline__ int ahead() const { return segment.key_len - segment.query_len; }  // query i has the position of key i + ahead()
  // Query `i` attends to the keys from `first_key` to `visible_keys` - 1.
  __device__ __forceinline__ int first_key(int i) const { return max(i + ahead() - before, 0); }
  __device__ __forceinline__ int visible_keys(int i) const { return min(max(i + ahead() + after + 1, 0), segment.key_len); }
  // The queries from `first_query` to `end_query` - 1 attend to key `j`.
  __device__ __forceinline__ int first_query(int j) const { return min(max(j - ahead() - after, 0), segment.query_len); }
  __device__ __forceinline__ int end_query(int j) const { return min(max(j - ahead() + before + 1, 0), segment.query_len); }
};

// Whether a query sees at least one key. Works for every mask and window.
__device__ __forceinline__ bool sees_a_key(const params::Shape& shape, const Segment& segment, int query) {
  int position = query + segment.key_len - segment.query_len;
  return segment.key_len > 0 && (shape.limit_after == 0 || position + shape.limit_after > 0);
}

// Tokens of a block of queries or of keys in a selection (candle-sage/src/selection.rs).
constexpr int SELECTION_BLOCK = 128;

__device__ __forceinline__ int selection_blocks(int tokens) { return (tokens + SELECTION_BLOCK - 1) / SELECTION_BLOCK; }

// The index of a segment's first selection block among the blocks of all segments.
__device__ __forceinline__ int first_query_block(const params::Shape& shape, int segment) {
  return shape.segments ? shape.segments[segment].query_block : segment * selection_blocks(shape.query_len);
}
__device__ __forceinline__ int first_key_block(const params::Shape& shape, int segment) {
  return shape.segments ? shape.segments[segment].key_block : segment * selection_blocks(shape.key_len);
}

// The index of the segment that owns a tile of the padded buffers.
template <bool QUERY>
__device__ inline int segment_of_tile(const params::Shape& shape, int tile) {
  if (!shape.segments) return tile / (((QUERY ? shape.query_len : shape.key_len) + TILE - 1) / TILE);
  int low = 0, high = shape.segment_count - 1;  // finds the last segment that starts at or before the tile
  while (low < high) {
    int middle = (low + high + 1) / 2;
    int start = QUERY ? shape.segments[middle].query_tile : shape.segments[middle].key_tile;
    if (start <= tile) low = middle; else high = middle - 1;
  }
  return low;
}

// The head, segment and tile of a thread block. A (head, segment) pair has `tiles` tiles. Thread blocks start in the
// order of their index. The index runs over `heads_at_once` pairs first, then over tiles, then over the next pairs, so
// that concurrent thread blocks read the same few heads, which stay in the L2 cache.
struct Place {
  int head, segment, tile;

  __device__ __forceinline__ Place(const params::Shape& shape, int index, int heads, int tiles) {
    int all = heads * shape.segment_count, at_once = shape.heads_at_once;
    int first = index / (at_once * tiles) * at_once;
    index -= first * tiles;
    at_once = min(at_once, all - first);
    tile = index / at_once;
    int number = first + index % at_once;
    head = number % heads, segment = number / heads;
  }
};

}  // namespace sage::attention
