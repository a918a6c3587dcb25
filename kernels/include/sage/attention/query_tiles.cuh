// The work of a thread block in the backward: its keys, and the tiles of queries that it visits.
#pragma once

#include <sage/attention/segment.cuh>

namespace sage::attention {

// The segment, key head and keys of a thread block. With a selection, the thread block visits part number `part` of its
// key block's list of query blocks (see Cut).
// Above 128 channels a thread block computes only part of the channels of dK, dV and dQ: its `channel_part`.
struct BackwardBlock {
  int segment_index, key_head, first_key, part, channel_part;
  Segment segment;

  BackwardBlock() = default;
  __device__ __forceinline__ BackwardBlock(const params::Shape& shape, int index, int keys) {
    Place place(shape, index, shape.key_heads, (shape.key_len + keys - 1) / keys);
    key_head = place.head, segment_index = place.segment, first_key = place.tile * keys, part = channel_part = 0;
    segment = Segment(shape, segment_index);
  }
  // The index of the key block that contains the thread block's keys: in its segment (`number`), and over all segments
  // and key heads (`column`).
  __device__ __forceinline__ int number() const { return first_key / SELECTION_BLOCK; }
  __device__ __forceinline__ int column(const params::Backward& p) const {
    return key_head * p.lists.key_blocks + first_key_block(p.shape, segment_index) + number();
  }
};

// A tile of queries to whose dQ a thread block adds. `rank` is for deterministic mode: the number of key blocks that
// add to this dQ before the thread block's key block.
struct RankedTile {
  int padded;  // the tile's number in padded buffers (see TILE in segment.cuh)
  int rank;
};

// A tile of 64 queries of one query head.
struct QueryTile {
  int head;
  int tile;    // the tile's number in the segment
  int padded;  // the tile's number in padded buffers (see TILE in segment.cuh)
};

// In each query head that shares the thread block's key head, a thread block visits the first query tile that sees one
// of its keys, and all later tiles.
struct EveryQuery {
  static constexpr bool LISTED = false;
  static constexpr Hidden HIDDEN = LATER_KEYS;  // which of the thread block's keys can be hidden from a visited query
  template <int KEYS>
  static constexpr int RANK_BLOCKS = 1;  // thread blocks (of KEYS keys each) that RankedTile::rank counts as one
  using Tile = QueryTile;
  using Added = int;  // what is needed to add a tile's dQ to dq_accum: QueryTile::padded

  const params::Shape& shape;
  const BackwardBlock& block;
  int first, end;  // tiles first to end - 1 of each head
  int count;       // tiles of all heads together

  __device__ __forceinline__ EveryQuery(const params::Backward& p, const BackwardBlock& block, int)
      : shape(p.shape), block(block), end(block.segment.query_tiles()) {
    int first_query = block.segment.first_query(block.first_key);
    first = first_query / TILE;
    int tiles = block.segment.query_len > first_query ? end - first : 0;
    count = tiles * (shape.query_heads / shape.key_heads);
  }
  static __device__ __forceinline__ BackwardBlock take(const params::Backward& p, int index, int keys) {
    return BackwardBlock(p.shape, index, keys);
  }

  __device__ __forceinline__ Tile start() const {
    int head = block.key_head * (shape.query_heads / shape.key_heads);
    return {head, first, head * shape.query_tiles + block.segment.query_tile + first};
  }
  // Advances to the next tile of the same head, or to the first of the next head.
  __device__ __forceinline__ void advance(Tile& tile) const {
    ++tile.tile, ++tile.padded;
    if (tile.tile == end) {
      ++tile.head;
      tile.padded += shape.query_tiles - (tile.tile - first);
      tile.tile = first;
    }
  }
  __device__ __forceinline__ Added added(const Tile& tile) const { return tile.padded; }
};

// With a window, a thread block visits the query tiles from the first to the last that sees one of its keys.
struct WindowQueries : EveryQuery {
  static constexpr Hidden HIDDEN = OUTER_KEYS;
  using Added = RankedTile;

  Sight<OUTER_KEYS> sight;
  int keys;  // of the thread block

  __device__ __forceinline__ WindowQueries(const params::Backward& p, const BackwardBlock& block, int keys)
      : EveryQuery(p, block, keys), sight(block.segment, p), keys(keys) {
    int last_key = min(block.first_key + keys, block.segment.key_len) - 1, end_query = sight.end_query(last_key);
    first = sight.first_query(block.first_key) / TILE, end = (end_query + TILE - 1) / TILE;
    count = max(end - first, 0) * (shape.query_heads / shape.key_heads);
  }
  // RankedTile::rank counts thread blocks, from 0 for the one that has the first key that the tile's first query sees.
  __device__ __forceinline__ Added added(const Tile& tile) const {
    return {tile.padded, block.first_key / keys - sight.first_key(tile.tile * TILE) / keys};
  }
};

// How a key block's list (the query blocks that select it) is divided among thread blocks. A long list is split into
// parts, which separate thread blocks process. Otherwise the thread block of the longest list would still run after all
// others have finished. The thread blocks of a list's parts add up dK and dV in global memory (key_gradients.cuh).
struct Cut {
  uint32_t from, to;  // the key block's list is elements `from` to `to` - 1 of Lists::users
  params::CutList list = {0, 1};

  __device__ __forceinline__ Cut(const params::Backward& p, const BackwardBlock& block) {
    int column = block.column(p);
    const uint32_t* first_users = p.lists.first_users + column + block.key_head;
    from = first_users[0], to = first_users[1];
    if (p.cuts.lists) list = p.cuts.lists[column];
  }
  // The number of query blocks in a part. The last part may have fewer.
  __device__ __forceinline__ uint32_t of_part() const { return (to - from + list.parts - 1) / list.parts; }
};

// With a selection, a thread block visits the query blocks that select its key block. With a causal mask, the first of
// them is at the key block's own position, because each query block selects the key block at its position. The later
// ones see every key of the key block. So the mask may be computed as if the visited tiles were consecutive: the tiles
// `first` to `end` - 1 of the segment.
struct ListedQueries {
  struct Tile : QueryTile {
    int position;  // this is tile position % BLOCK_TILES of query block users[position / BLOCK_TILES].block
    int rank;      // index of this key block among the key blocks that the tile's query block selects
  };
  using Added = RankedTile;
  static constexpr bool LISTED = true;
  static constexpr Hidden HIDDEN = LATER_KEYS;
  template <int KEYS>
  static constexpr int RANK_BLOCKS = SELECTION_BLOCK / KEYS;
  static constexpr int BLOCK_TILES = SELECTION_BLOCK / TILE;

  const params::Shape& shape;
  const BackwardBlock& block;
  const params::User* users;
  int first, end, count;

  __device__ __forceinline__ ListedQueries(const params::Backward& p, const BackwardBlock& block, int) : shape(p.shape), block(block) {
    Cut cut(p, block);
    int before = block.part * int(cut.of_part()), length = min(int(cut.of_part()), int(cut.to - cut.from) - before);
    users = p.lists.users + cut.from + before;
    int tiles = BLOCK_TILES * length;
    // The segment's last query block may have one tile less than BLOCK_TILES.
    if (tiles > 0) tiles += min(block.segment.query_tiles() - BLOCK_TILES * int(users[length - 1].block + 1), 0);
    first = BLOCK_TILES * (block.number() + before), end = first + tiles;
    count = tiles * (shape.query_heads / shape.key_heads);
  }
  // Each of the first `all` thread blocks has `keys` keys. It visits their key block's list of query blocks; if the
  // list is split, only its first part. Each further part is processed by consecutive thread blocks, which divide the
  // 128 keys of the list's key block among themselves.
  // For an unused element of `parts`, `first_key` is the segment's end, and the thread block exits.
  static __device__ __forceinline__ BackwardBlock take(const params::Backward& p, int index, int keys) {
    int all = p.shape.segment_count * p.shape.key_heads * ((p.shape.key_len + keys - 1) / keys);
    if (index < all) return BackwardBlock(p.shape, index, keys);
    int blocks = SELECTION_BLOCK / keys;
    params::Part part = p.cuts.parts[(index - all) / blocks];
    BackwardBlock block;
    block.segment_index = part.segment, block.key_head = part.key_head, block.part = part.number, block.channel_part = 0;
    block.segment = Segment(p.shape, part.segment);
    block.first_key = part.number == 0 ? block.segment.key_len : part.block * SELECTION_BLOCK + (index - all) % blocks * keys;
    return block;
  }

  __device__ __forceinline__ void look_up(Tile& tile) const {
    params::User user = count > 0 ? users[tile.position / BLOCK_TILES] : params::User{0, 0};
    tile.tile = BLOCK_TILES * int(user.block) + tile.position % BLOCK_TILES;
    tile.padded = tile.head * shape.query_tiles + block.segment.query_tile + tile.tile;
    tile.rank = user.rank;
  }
  __device__ __forceinline__ Tile start() const {
    Tile tile;
    tile.head = block.key_head * (shape.query_heads / shape.key_heads), tile.position = 0;
    look_up(tile);
    return tile;
  }
  __device__ __forceinline__ void advance(Tile& tile) const {
    if (++tile.position == end - first) ++tile.head, tile.position = 0;
    look_up(tile);
  }
  __device__ __forceinline__ Added added(const Tile& tile) const { return {tile.padded, tile.rank}; }
};

}  // namespace sage::attention
