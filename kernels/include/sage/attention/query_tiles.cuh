// What a block of a backward works on: its keys, and the tiles of queries that it visits for them.
#pragma once

#include <sage/attention/segment.cuh>

namespace sage::attention {

// The segment, key head and keys of a block, and with a list that is cut into parts the number of its part. Over 128 channels a
// block has some of the channels of dK, dV and dQ, those of its `channel_part`.
struct BackwardBlock {
  int segment_index, key_head, first_key, part, channel_part;
  Segment segment;

  BackwardBlock() = default;
  __device__ __forceinline__ BackwardBlock(const params::Shape& shape, int index, int keys) {
    Place place(shape, index, shape.key_heads, (shape.key_len + keys - 1) / keys);
    key_head = place.head, segment_index = place.segment, first_key = place.tile * keys, part = channel_part = 0;
    segment = Segment(shape, segment_index);
  }
  // The number of the block of keys of a selection, among those of its segment, and of all segments and key heads.
  __device__ __forceinline__ int number() const { return first_key / SELECTION_BLOCK; }
  __device__ __forceinline__ int column(const params::Backward& p) const {
    return key_head * p.lists.key_blocks + first_key_block(p.shape, segment_index) + number();
  }
};

// A tile whose dQ is to be added, and in deterministic mode after how many others: of blocks of keys that visit it too.
struct RankedTile {
  int padded;  // its number in the padded buffers
  int rank;
};

// A tile of 64 queries of one query head.
struct QueryTile {
  int head;
  int tile;    // its number in the segment
  int padded;  // its number in the padded buffers
};

// A block visits, of each query head of the group, all tiles of queries from the first that sees one of its keys.
struct EveryQuery {
  static constexpr bool LISTED = false;
  static constexpr Hidden HIDDEN = LATER_KEYS;  // which keys its queries may not see
  template <int KEYS>
  static constexpr int RANK_BLOCKS = 1;  // blocks of KEYS keys that a rank counts: see RankedTile
  using Tile = QueryTile;
  using Added = int;  // what the mainloop keeps of a tile until its dQ is added: its number in the padded buffers

  const params::Shape& shape;
  const BackwardBlock& block;
  int first, end;  // tiles first .. end of each head
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

// With a window a block visits the tiles up to the last that sees one of its keys.
struct WindowQueries : EveryQuery {
  static constexpr Hidden HIDDEN = OUTER_KEYS;
  using Added = RankedTile;

  Sight<OUTER_KEYS> sight;
  int keys;  // of the block

  __device__ __forceinline__ WindowQueries(const params::Backward& p, const BackwardBlock& block, int keys)
      : EveryQuery(p, block, keys), sight(block.segment, p), keys(keys) {
    int last_key = min(block.first_key + keys, block.segment.key_len) - 1, end_query = sight.end_query(last_key);
    first = sight.first_query(block.first_key) / TILE, end = (end_query + TILE - 1) / TILE;
    count = max(end - first, 0) * (shape.query_heads / shape.key_heads);
  }
  // The blocks of keys that visit a tile begin with the one that has the first key that its first query sees.
  __device__ __forceinline__ Added added(const Tile& tile) const {
    return {tile.padded, block.first_key / keys - sight.first_key(tile.tile * TILE) / keys};
  }
};

// How the users of a block of keys are divided among blocks. Where many list it they are cut into parts, each of which is the
// work of a separate block: else the block with most users would work on when all others have ended. Parts add their shares
// of dK and dV in global memory (key_gradients.cuh).
struct Cut {
  uint32_t from, to;  // all users, as indices into Lists::users
  params::CutList list = {0, 1};

  __device__ __forceinline__ Cut(const params::Backward& p, const BackwardBlock& block) {
    int column = block.column(p);
    const uint32_t* first_users = p.lists.first_users + column + block.key_head;
    from = first_users[0], to = first_users[1];
    if (p.cuts.lists) list = p.cuts.lists[column];
  }
  // The users of a part; no part is empty.
  __device__ __forceinline__ uint32_t of_part() const { return (to - from + list.parts - 1) / list.parts; }
};

// With a selection a block visits the blocks of queries that list its block of keys. With a causal mask the first of them is the
// block at the same position, which always lists it, and the later ones see the keys whole. The tiles can therefore be counted
// from that position without gaps, `first` to `end`: these numbers give the same masks as the tiles' own.
struct ListedQueries {
  struct Tile : QueryTile {
    int position;  // in the list of users, in tiles
    int rank;      // position of the block of keys in the list of the tile's block of queries
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
    // The segment's last block of queries may have one tile only.
    if (tiles > 0) tiles += min(block.segment.query_tiles() - BLOCK_TILES * int(users[length - 1].block + 1), 0);
    first = BLOCK_TILES * (block.number() + before), end = first + tiles;
    count = tiles * (shape.query_heads / shape.key_heads);
  }
  // The first thread blocks take the keys, each with all users of its keys or the first part of them; the others take further
  // parts, those of 128 keys after one another. Of a part that does not exist the keys lie beyond the segment's end.
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
