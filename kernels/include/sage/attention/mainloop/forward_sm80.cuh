// The forward mainloop for sm_80 and later (mma.sync, cp.async), and what forward_sm90.cuh and forward_sm100.cuh share
// with it: the division into thread blocks, and the epilogue.
//
// A thread block computes the output and the log-sum-exp of 128 queries of one head; each warp keeps the accumulators
// of its queries in registers. The mainloop visits the tiles of 64 keys that the queries see. All warps do the same:
// they copy the next tile of K and V asynchronously into one of two buffers while they compute on the other, and one
// __syncthreads per tile orders copies and reads. With one buffer (STAGES == 1), V is copied while S is computed, and
// the next K while P V is computed; this order needs two barriers per tile. The numerics define how a tile is computed
// (ForwardSm80Numerics below; numerics/*_forward_sm80.cuh).
#pragma once

#include <sage/attention/rows.cuh>
#include <sage/attention/segment.cuh>
#include <sage/attention/softmax.cuh>
#include <sage/layout/fragments.cuh>
#include <sage/params/plans.cuh>

namespace sage::attention {

constexpr int FORWARD_QUERIES = 128;

// The head, segment and queries of a thread block. Thread blocks with the last queries start first: under a causal mask
// they see the most keys, and run longest. Queries are assigned from the end of the segment: if one thread block has
// fewer queries than the others, it has the first queries, which see the fewest keys. The struct is in shared memory,
// because the MMAs need the registers.
struct ForwardBlock {
  int head, key_head, segment_index;
  int first, end;  // the thread block's queries, padded to whole tiles: first to end - 1; none if end <= first
  Segment segment;

  ForwardBlock() = default;
  __device__ __forceinline__ ForwardBlock(const params::Shape& shape, int index, int queries) {
    int blocks = (shape.query_len + queries - 1) / queries;
    Place place(shape, index, shape.query_heads, blocks);
    set_place(shape, place.head, place.segment);
    end = segment.query_tiles() * TILE - place.tile * queries;
    first = max(end - queries, 0);
  }

  // The thread block's last query in [from, from + queries); below `from` if it has no query there.
  __device__ __forceinline__ int last_of(int from, int queries) const {
    return min(min(from + queries, end), segment.query_len) - 1;
  }

  // Sets the query head and the segment, and the members that depend on them.
  __device__ __forceinline__ void set_place(const params::Shape& shape, int of_head, int of_segment) {
    head = of_head, key_head = head / (shape.query_heads / shape.key_heads);
    segment_index = of_segment, segment = Segment(shape, segment_index);
  }
};

// A thread block that visits all keys that its queries see.
struct EveryKey : ForwardBlock {
  static constexpr Hidden HIDDEN = LATER_KEYS;  // which visited keys can be hidden from a query
  static constexpr int skipped = 0;

  EveryKey() = default;
  __device__ __forceinline__ EveryKey(const params::Forward& p, int index, int queries) : ForwardBlock(p.shape, index, queries) {}

  // The number of visited keys that a query sees.
  __device__ __forceinline__ int visible(int query) const { return segment.visible_keys(query); }
  // A step visits TILES key tiles. Returns the first one's index in the segment, divided by TILES.
  template <int TILES>
  __device__ __forceinline__ int number(int step) const { return step; }
};

// A thread block that visits the keys in the windows of its queries. `skipped` is the number of keys before the window
// of its first query, rounded down to a multiple of STEP: the mainloop skips whole steps. Some queries do not see the
// first visited keys.
struct WindowKeys : ForwardBlock {
  static constexpr Hidden HIDDEN = OUTER_KEYS;
  static constexpr int STEP = 2 * TILE;
  int before, after;  // of the window
  int skipped;

  WindowKeys() = default;
  __device__ __forceinline__ WindowKeys(const params::Forward& p, int index, int queries) : ForwardBlock(p.shape, index, queries) {
    Sight<OUTER_KEYS> window(segment, p);
    before = window.before, after = window.after, skipped = window.first_key(first) / STEP * STEP;
  }
  __device__ __forceinline__ Sight<OUTER_KEYS> sight() const { return {segment, before, after}; }

  __device__ __forceinline__ int visible(int query) const { return sight().visible_keys(query) - skipped; }
  // The number of keys that the thread block visits before the first key that `query` attends to.
  __device__ __forceinline__ int hidden(int query) const { return sight().first_key(query) - skipped; }
  template <int TILES>
  __device__ __forceinline__ int number(int step) const { return step + skipped / (TILES * TILE); }
};

// A thread block that has one query block of a selection, and visits the listed key blocks as one contiguous range of
// keys. Only the last listed key block can need a mask: the queries see all other listed key blocks completely.
// `skipped` is the number of unlisted keys before the last listed key block.
struct ListedKeys : ForwardBlock {
  static constexpr Hidden HIDDEN = LATER_KEYS;
  static constexpr int BLOCK_TILES = SELECTION_BLOCK / TILE;
  const uint32_t* list;
  int skipped;
  int count;  // listed blocks

  ListedKeys() = default;
  __device__ __forceinline__ ListedKeys(const params::Forward& p, int index, int) {
    const params::Shape& shape = p.shape;
    Place place(shape, index, shape.query_heads, selection_blocks(shape.query_len));
    set_place(shape, place.head, place.segment);
    int block = selection_blocks(segment.query_len) - 1 - place.tile;
    first = block * SELECTION_BLOCK, end = min(first + SELECTION_BLOCK, segment.query_tiles() * TILE);
    skipped = count = 0;
    if (block < 0) {
      first = end = 0;
      return;
    }
    int64_t row = int64_t(key_head) * p.lists.query_blocks + first_query_block(shape, segment_index) + block;
    list = p.lists.seen + row * p.lists.stride + 1;
    count = list[-1];
    if (count > 0) skipped = (int(list[count - 1]) - (count - 1)) * SELECTION_BLOCK;
  }

  __device__ __forceinline__ int visible(int query) const {
    return min(segment.visible_keys(query) - skipped, count * SELECTION_BLOCK);
  }
  template <int TILES>
  __device__ __forceinline__ int number(int step) const {
    constexpr int STEPS = BLOCK_TILES / TILES;
    return STEPS * int(__ldg(list + step / STEPS)) + step % STEPS;
  }
};

// The epilogue: writes the outputs (O, and in Attn-QAT high_precision_out) and the log-sum-exp. SMOOTHS_VALUES: whether
// the numerics support smoothing of V; if V was smoothed, its original mean is added to O. STAGING: bytes of `staging`
// memory per warp (see store_rows).
template <class T, Hidden HIDDEN, bool SMOOTHS_VALUES, int STAGING = 0, int D, int M, int THREADS, bool SHARED, int OUTPUTS, int SLACK>
__device__ __forceinline__ void store(const params::Forward& p, const ForwardBlock& block,
                                      Softmax<D, M, THREADS, SHARED, OUTPUTS, SLACK>& softmax, uint32_t staging = 0) {
  const params::Shape& shape = p.shape;
  const Segment& segment = block.segment;
  Sight<HIDDEN> sight(segment, p);
  Rows<T> out(p.out, segment.batch, segment.query_start, block.head, min(segment.query_len, block.end), shape.value_dim);
  int64_t padded = (int64_t(block.head) * shape.query_tiles + segment.query_tile) * TILE;
  int lane = threadIdx.x % 32, first = block.first + threadIdx.x / 32 * 16 * M;
  float inverse[2 * M], sums[2 * M], with_sink[2 * M] = {};
#pragma unroll
  for (int r = 0; r < 2 * M; ++r) {
    sums[r] = quad_sum(softmax.state(softmax.state.SUM, r));
    // Only a query that sees no key gets an output of zeros. A sum that is 0 for any other reason gives NaN.
    inverse[r] = sight.visible_keys(first + row_of(r, lane)) == 0 ? 0.0f : 1.0f / sums[r];
  }
  if (p.sinks) {
    float sink2 = __ldg(p.sinks + block.head) * ptx::LOG2_E;
#pragma unroll
    for (int r = 0; r < 2 * M; ++r)
      if (inverse[r] != 0.0f) {
        with_sink[r] = log2_with_sink(sink2, softmax.reference[r] + log2f(sums[r]));
        inverse[r] *= ptx::exp2(-with_sink[r]);
      }
  }
  if constexpr (SMOOTHS_VALUES) {
    if (p.smooth_values) {
      // Adds `sums` times V's mean to O, which is not yet normalized. V's means follow K's means in memory.
      const float* mean = p.codes.k_mean + (int64_t(shape.key_heads + block.key_head) * shape.segment_count + block.segment_index) * D;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float of_channel = __ldg(mean + n * 8 + 2 * (lane & 3) + e);
#pragma unroll
          for (int r = 0; r < 2 * M; ++r) {
            float& acc = softmax.acc[r >> 1][n][2 * (r & 1) + e];
            // If V's mean is not finite, the output of a query that sees no key must still be zeros.
            if (inverse[r] != 0.0f) acc = fmaf(sums[r], of_channel, acc);
          }
        }
    }
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const float factor[2] = {inverse[2 * m], inverse[2 * m + 1]};
    store_rows<STAGING>(out, first + 16 * m, softmax.acc[m], factor, staging, lane);
    if constexpr (OUTPUTS == 2) {
      if (p.high_precision_out.data) {
        Rows<T> second(p.high_precision_out, segment.batch, segment.query_start, block.head,
                       min(segment.query_len, block.end), shape.value_dim);
        store_rows<STAGING>(second, first + 16 * m, softmax.acc[M + m], factor, staging, lane);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2 * M; ++r) {
    int row = first + row_of(r, lane);
    float sum = sums[r];
    if (lane % 4 == 0 && row < block.end) {
      bool real = row < segment.query_len && sight.visible_keys(row) > 0;
      if (p.minus_lse2) p.minus_lse2[padded + row] = real ? -(softmax.reference[r] + log2f(sum) + with_sink[r]) : -CUDART_INF_F;
      // The backward normalizes P over the keys and the sink, multiplies it by the query's entry of row_sums, and
      // quantizes the product. 2^with_sink is the row's sum of exponentials with the sink, divided by the sum without
      // it. Above 2^64 it is capped, and the product is too small.
      if (OUTPUTS == 2 && p.row_sums) p.row_sums[padded + row] = real ? (p.p_literal ? 1.0f : sum) * ptx::exp2(fminf(with_sink[r], 64.0f)) : 1.0f;
    }
  }
}

// What the mainloop requires of its numerics.
template <class N>
concept ForwardSm80Numerics = requires(N numerics, const params::Forward& p, const ForwardBlock& block, unsigned char* shared,
                                       typename N::Logits& logits, typename N::RowSoftmax& softmax) {
  typename N::Type;
  requires N::D % 64 == 0;         // the padded head_dim
  requires N::M * 16 * N::THREADS / 32 == FORWARD_QUERIES;  // a warp has 16 * M queries
  requires N::BLOCKS >= 1;         // thread blocks per multiprocessor, for __launch_bounds__ of the entry point
  requires N::STAGES == 2 || (N::STAGES == 1 && !N::COOPERATES);
  requires N::STATE_AT + N::RowSoftmax::State::BYTES <= N::SHARED_BYTES;  // where the row state is, if it is in shared memory
  N::SMOOTHS_VALUES || true;       // whether smoothing of V is supported
  N::COOPERATES || true;           // whether warps meet at a barrier inside a tile, so that all must compute every tile
  N(p, block, shared);
  // Issue the asynchronous copies of Q, and of a tile of K or V. With two stages, even tiles use one buffer, and odd
  // tiles the other. (Even and odd tiles alternate even if key blocks are skipped, because a key block has two tiles.)
  numerics.load_queries();
  numerics.load_keys(0);
  numerics.load_values(0);
  // Computes S of a tile: logits are a warp's accumulators.
  numerics.multiply(0, logits);
  // attend<HIDDEN>(tile, step, logits, softmax, segment, the warp's first query): computes the online softmax, and adds
  // P V. `step` counts the visited tiles.
  numerics.template attend<OUTER_KEYS>(0, 0, logits, softmax, block.segment, 0);
  numerics.template attend<NO_KEYS>(0, 0, logits, softmax, block.segment, 0);
  // After the last tile: subtracts from O the multiple of quant::MAGIC that it contains, if any.
  numerics.flush_magic(softmax);
};

// Returns how many steps at the start of the loop need a mask for the queries first to first + queries - 1. These steps
// contain keys before the window of the last such query. A step has `keys` keys. Kernels without a window do not call
// this, because the call would make ptxas reorder their instructions.
__device__ __forceinline__ int hidden_steps(const WindowKeys& block, int first, int queries, int keys) {
  return (block.hidden(block.last_of(first, queries)) + keys - 1) / keys;
}

// A step below the result needs no mask. The result is `whole_tiles`, or 0 if the step has keys before the window of a
// query of the warp.
template <class Numerics, class Block>
__device__ __forceinline__ int whole_of(const Block& block, int step, int whole_tiles) {
  if constexpr (Block::HIDDEN == OUTER_KEYS) {
    constexpr int QUERIES = 16 * Numerics::M;
    if (step < hidden_steps(block, block.first + threadIdx.x / 32 * QUERIES, QUERIES, TILE)) return 0;
  }
  return whole_tiles;
}

// The loop over tiles with two buffers. Each buffer holds K and V of one tile. The copy of the first tile, `next`, is
// in flight. The first `whole_tiles` tiles need no mask, except the tiles at a window's start.
template <class Numerics, class Block>
__device__ __forceinline__ void visit_in_two_stages(Numerics& numerics, typename Numerics::RowSoftmax& softmax, const Block& block,
                                                    int key_tiles, int whole_tiles, int next) {
  for (int step = 0; step < key_tiles; ++step) {
    ptx::cp_async_wait<0>();
    // After the barrier all threads' copies of this tile are visible, and all warps have read the previous tile, whose
    // buffer may be overwritten.
    __syncthreads();
    int tile = next;
    if (step + 1 < key_tiles) {
      next = block.template number<1>(step + 1);
      numerics.load_keys(next), numerics.load_values(next);
    }
    ptx::cp_async_commit();
    typename Numerics::Logits logits;
    int whole = whole_of<Numerics>(block, step, whole_tiles);
    // Warps that meet at a barrier inside a tile must all take the same branch.
    if (!Numerics::COOPERATES && __builtin_expect(step < whole, true)) {
      numerics.multiply(tile, logits);
      numerics.template attend<NO_KEYS>(tile, step, logits, softmax, block.segment, 0);
    } else {
      int warp_first = block.first + threadIdx.x / 32 * 16 * Numerics::M;
      if (Numerics::COOPERATES || step * TILE < block.visible(warp_first + 16 * Numerics::M - 1)) {
        numerics.multiply(tile, logits);
        numerics.template attend<Block::HIDDEN>(tile, step, logits, softmax, block.segment, warp_first);
      }
    }
  }
}

// The loop over tiles with one buffer for K and one for V. When it starts, the copy of the first tile's K is in flight.
template <class Numerics, class Block>
__device__ __forceinline__ void visit_in_one_stage(Numerics& numerics, typename Numerics::RowSoftmax& softmax, const Block& block,
                                                   int key_tiles, int whole_tiles) {
  int warp_first = block.first + threadIdx.x / 32 * 16 * Numerics::M;
  int seen_tiles = (block.visible(warp_first + 16 * Numerics::M - 1) + TILE - 1) / TILE;
  for (int step = 0; step < key_tiles; ++step) {
    int tile = block.template number<1>(step);
    ptx::cp_async_wait<0>();
    // After the barrier K is visible, and all warps have read V of the previous tile.
    __syncthreads();
    numerics.load_values(tile);
    ptx::cp_async_commit();
    typename Numerics::Logits logits;
    if (step < seen_tiles) numerics.multiply(tile, logits);
    ptx::cp_async_wait<0>();
    // After the barrier V is visible, and all warps have read K.
    __syncthreads();
    if (step + 1 < key_tiles) numerics.load_keys(block.template number<1>(step + 1));
    ptx::cp_async_commit();
    int whole = whole_of<Numerics>(block, step, whole_tiles);
    if (step < whole) numerics.template attend<NO_KEYS>(tile, step, logits, softmax, block.segment, 0);
    else if (step < seen_tiles) numerics.template attend<Block::HIDDEN>(tile, step, logits, softmax, block.segment, warp_first);
  }
}

template <ForwardSm80Numerics Numerics, class Block = EveryKey>
__device__ __forceinline__ void forward_sm80(const params::Forward& p) {
  static_assert(!params::facts(params::FORWARD_SM80).persistent);
  using T = typename Numerics::Type;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ Block block;
  if (threadIdx.x == 0) block = Block(p, blockIdx.x, FORWARD_QUERIES);
  __syncthreads();
  if (block.first >= block.end) return;
  int key_tiles = (block.visible(block.last_of(block.first, FORWARD_QUERIES)) + TILE - 1) / TILE;
  // The number of visited tiles that the warp's first query, and therefore all of its queries, see completely.
  int whole_tiles = block.visible(block.first + threadIdx.x / 32 * 16 * Numerics::M) / TILE;

  Numerics numerics(p, block, shared);
  typename Numerics::RowSoftmax softmax(shared + Numerics::STATE_AT);
  numerics.load_queries();
  int next = key_tiles > 0 ? block.template number<1>(0) : 0;
  if (key_tiles > 0) numerics.load_keys(next);
  if (Numerics::STAGES == 2 && key_tiles > 0) numerics.load_values(next);
  ptx::cp_async_commit();
  if constexpr (Numerics::STAGES == 1) visit_in_one_stage(numerics, softmax, block, key_tiles, whole_tiles);
  else visit_in_two_stages(numerics, softmax, block, key_tiles, whole_tiles, next);
  numerics.flush_magic(softmax);
  store<T, Block::HIDDEN, Numerics::SMOOTHS_VALUES>(p, block, softmax);
}

}  // namespace sage::attention
