// Kernels for selections (candle-sage/src/selection.rs) and SLA2's router. They compute means of Q and K for each
// block, each query block's list of the key blocks with the largest router scores, and each key block's list of the
// query blocks that select it. block_mass sums the probabilities of dense attention for each query block and key block.
#include <sage/attention/numerics/dense16_forward_sm80.cuh>
#include <sage/params/sla2.cuh>

using namespace sage;
using attention::first_key_block;
using attention::first_query_block;
using attention::Segment;
using attention::SELECTION_BLOCK;
using attention::selection_blocks;
using attention::TILE;

namespace {

constexpr int WARPS = 4;
constexpr int POOL_THREADS = 128;

// The number of key blocks that may be chosen for a query block: the leading ones that its first query sees completely.
__device__ __forceinline__ int candidates(const Segment& segment, int block) {
  return segment.causal ? segment.visible_keys(block * SELECTION_BLOCK) / SELECTION_BLOCK : selection_blocks(segment.key_len);
}

// The segment of a query or key block, given the block's number among the blocks of all segments.
template <bool QUERY>
__device__ inline int segment_of_block(const params::Shape& shape, int block) {
  if (!shape.segments) return block / selection_blocks(QUERY ? shape.query_len : shape.key_len);
  int low = 0, high = shape.segment_count - 1;  // searches for the last segment that starts at or before `block`
  while (low < high) {
    int middle = (low + high + 1) / 2;
    int start = QUERY ? shape.segments[middle].query_block : shape.segments[middle].key_block;
    if (start <= block) low = middle; else high = middle - 1;
  }
  return low;
}

// One row of a key head's lists: the key blocks that a query block sees, ascending.
struct List {
  const uint32_t* blocks;
  int count;
  __device__ __forceinline__ List(const params::Lists& lists, int key_head, int row)
      : blocks(lists.seen + (int64_t(key_head) * lists.query_blocks + row) * lists.stride + 1), count(blocks[-1]) {}
  // The index of a key block in the list, or -1.
  __device__ __forceinline__ int find(uint32_t block) const {
    int low = 0, high = count;  // searches for the first entry that is not below `block`
    while (low < high) {
      int middle = (low + high) / 2;
      if (blocks[middle] < block) low = middle + 1; else high = middle;
    }
    return low < count && blocks[low] == block ? low : -1;
  }
};

// One warp finds the query blocks that select key block `block` of a segment, for one key head. Returns their number.
// For the n-th of them, in ascending order from n = 0, one lane calls f(n, query block, index of the key block in the
// query block's list).
template <class F>
__device__ __forceinline__ int each_user(const params::InvertedLists& p, const Segment& segment, int segment_index, int key_head,
                                         int block, F f) {
  int lane = threadIdx.x % 32, all = selection_blocks(segment.query_len), found = 0;
  int first_row = first_query_block(p.shape, segment_index);
  // With a causal mask, query blocks before `block` do not see this key block.
  for (int first = segment.causal ? block / 32 * 32 : 0; first < all; first += 32) {
    int query_block = first + lane, place = -1;
    if (query_block < all) place = List(p.lists, key_head, first_row + query_block).find(block);
    uint32_t users = __ballot_sync(~0u, place >= 0);
    if (place >= 0) f(found + __popc(users & ((1u << lane) - 1)), query_block, place);
    found += __popc(users);
  }
  return found;
}

// A key block has a list of the `count` query blocks that select it. If `count` exceeds 2 * `most`, a warp splits the
// list into parts of at most `most` query blocks, and zeroes the slot of ListSplits::sums that the parts share. If no
// slot is free, the list is not split. ListSplits::parts cannot overflow: the number of selected (query block, key
// block) pairs limits the number of parts.
__device__ __forceinline__ void cut(const params::InvertedLists& p, int segment, int key_head, int block, int column, uint32_t count) {
  int lane = threadIdx.x % 32;
  uint32_t all = p.used[2], most = max(p.least_users, (all + p.shares - 1) / p.shares);
  params::CutList list = {0, 1};
  if (count > 2 * most) {
    if (lane == 0) list.slot = atomicAdd(p.used, 1u);
    list.slot = __shfl_sync(~0u, list.slot, 0);
    if (list.slot < uint32_t(p.most_slots)) list.parts = (count + most - 1) / most;
  }
  if (lane == 0) p.cuts.lists[int64_t(key_head) * p.lists.key_blocks + column] = list;
  if (list.parts == 1) return;
  uint32_t first = 0;
  if (lane == 0) first = atomicAdd(p.used + 1, list.parts - 1);
  first = __shfl_sync(~0u, first, 0);
  for (uint32_t i = lane + 1; i < list.parts; i += 32)
    p.cuts.parts[first + i - 1] = params::Part{uint32_t(segment), uint32_t(key_head), uint32_t(block), i};
  float4* sums = reinterpret_cast<float4*>(p.cuts.sums + int64_t(list.slot) * p.slot_floats);
  for (int i = lane; i < p.slot_floats / 4; i += 32) sums[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int i = lane; i < p.slot_pieces; i += 32) p.cuts.arrivals[list.slot * p.slot_pieces + i] = 0;
}

template <bool FILL>
__device__ __forceinline__ void users(const params::InvertedLists& p) {
  Segment segment(p.shape, blockIdx.y);
  int block = blockIdx.x * WARPS + threadIdx.x / 32, key_head = blockIdx.z, lane = threadIdx.x % 32;
  if (block >= selection_blocks(segment.key_len)) return;
  int column = first_key_block(p.shape, blockIdx.y) + block, columns = p.lists.key_blocks;
  uint32_t* counts = p.counts + int64_t(key_head) * columns;
  if (!FILL) {
    int found = each_user(p, segment, blockIdx.y, key_head, block, [](int, int, int) {});
    if (lane == 0) {
      counts[column] = found;
      if (p.cuts.lists) atomicAdd(p.used + 2, uint32_t(found));
    }
    return;
  }
  uint32_t before = 0;
  for (int i = lane; i < column; i += 32) before += counts[i];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) before += __shfl_xor_sync(~0u, before, step);
  // Each key head has a separate range of `users`.
  uint32_t room = uint32_t(p.lists.query_blocks) * (p.lists.stride - 1), start = key_head * room + before;
  uint32_t* first_users = p.first_users + int64_t(key_head) * (columns + 1);
  if (lane == 0) {
    first_users[column] = start;
    if (column + 1 == columns) first_users[columns] = start + counts[column];
  }
  if (p.cuts.lists) cut(p, blockIdx.y, key_head, block, column, counts[column]);
  each_user(p, segment, blockIdx.y, key_head, block, [&](int number, int query_block, int place) {
    p.users[start + number] = params::User{uint32_t(query_block), uint32_t(place)};
  });
}

// Maps floats to integers of the same order; NaN is the largest.
__device__ __forceinline__ uint32_t ordered(float x) {
  uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return ~0u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A warp writes one query block's list for one key head. It finds the smallest chosen score bit by bit, without sorting
// or extra memory; a last pass over the candidates then writes the list in ascending order.
__device__ __forceinline__ void choose(const params::Choose& p) {
  int row = blockIdx.x * WARPS + threadIdx.x / 32, key_head = blockIdx.y, lane = threadIdx.x % 32;
  if (row >= p.lists.query_blocks) return;
  const params::Shape& shape = p.shape;
  int index = segment_of_block<true>(shape, row);
  Segment segment(shape, index);
  int block = row - first_query_block(shape, index), count = candidates(segment, block), most = min(p.most, count);
  int64_t line = int64_t(key_head) * p.lists.query_blocks + row;
  const float* scores = p.scores + line * p.columns + (shape.segments ? first_key_block(shape, index) : 0);
  uint32_t* list = const_cast<uint32_t*>(p.lists.seen) + line * p.lists.stride + 1;

  // The last p.nearest candidates rank highest, then the ones with a NaN score, then the others by score.
  auto key_of = [&](int i) { return i >= count - p.nearest ? ~0u : min(ordered(scores[i]), ~0u - 1); };
  auto count_from = [&](uint32_t least) {
    int n = 0;
    for (int i = lane; i < count; i += 32) n += key_of(i) >= least;
    return __reduce_add_sync(~0u, n);
  };
  uint32_t least = 0;
  if (most < count) {
    for (int bit = 31; bit >= 0; --bit)
      if (int(count_from(least | 1u << bit)) >= most) least |= 1u << bit;
  }
  int above = least == ~0u || most == count ? 0 : count_from(least + 1);
  int equal = most - above, written = 0;  // equal: how many blocks to select whose score is `least`
  for (int first = 0; first < count; first += 32) {
    int i = first + lane;
    uint32_t key = i < count ? key_of(i) : 0;
    bool same = i < count && (most == count || key == least);
    uint32_t sames = __ballot_sync(~0u, same);
    bool taken = i < count && (most == count || key > least || (same && __popc(sames & ((1u << lane) - 1)) < equal));
    uint32_t all = __ballot_sync(~0u, taken);
    if (taken) list[written + __popc(all & ((1u << lane) - 1))] = i;
    written += __popc(all);
    if (most < count) equal -= min(equal, __popc(sames));
  }
  // The key blocks on the diagonal are always in the list.
  int last = min((block + 1) * SELECTION_BLOCK, segment.query_len) - 1;
  int end = selection_blocks(segment.visible_keys(last));
  for (int i = count + lane; i < end; i += 32) list[written + i - count] = i;
  written += max(end - count, 0);
  if (lane == 0) list[-1] = written;
}

// A thread block computes one row of `means`: each thread sums eight channels of every eighth token, then the threads'
// sums are added in order through shared memory.
template <class T>
__device__ __forceinline__ void pool(const params::Pool& p) {
  constexpr int THREADS = 128, MOST_CHUNKS = 16;
  __shared__ float parts[THREADS][8];
  const params::Shape& shape = p.shape;
  int row = blockIdx.x, key_head = blockIdx.y;
  int segment_index = p.query ? segment_of_block<true>(shape, row) : segment_of_block<false>(shape, row);
  Segment segment(shape, segment_index);
  int first_block = p.query ? first_query_block(shape, segment_index) : first_key_block(shape, segment_index);
  int first = (row - first_block) * SELECTION_BLOCK, len = p.query ? segment.query_len : segment.key_len;
  int end = min(first + SELECTION_BLOCK, len);
  if (p.query && segment.causal) end = first + 1, first = max(first + 1 - p.pool, 0);

  int chunks = (shape.head_dim + 7) / 8, rows = THREADS / MOST_CHUNKS, chunk = threadIdx.x % MOST_CHUNKS;
  float sum[8] = {};
  if (chunk < chunks)
    for (int head = key_head * p.heads; head < (key_head + 1) * p.heads; ++head) {
      attention::Rows<T> x(p.x, segment.batch, p.query ? segment.query_start : segment.key_start, head, len, shape.head_dim);
      for (int token = first + threadIdx.x / MOST_CHUNKS; token < end; token += rows) {
        uint4 words = x.load_8(token, chunk * 8);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] += ptx::to_float(reinterpret_cast<const T*>(&words)[c]);
      }
    }
#pragma unroll
  for (int c = 0; c < 8; ++c) parts[threadIdx.x][c] = sum[c];
  __syncthreads();
  for (int c = threadIdx.x; c < shape.head_dim; c += THREADS) {
    float all = 0.0f;
    for (int r = 0; r < rows; ++r) all += parts[r * MOST_CHUNKS + c / 8][c % 8];
    p.means[(int64_t(key_head) * p.blocks + row) * shape.head_dim + c] = all / float(p.heads * (end - first));
  }
}

// Updates `reference`, the running maximum of the logits of a lane's row `r`, with the row's logits of a tile (`s`).
// Rescales `sum`, the lane's part of the row's sum of 2^(logit - reference), to the new `reference`.
template <int M>
__device__ __forceinline__ void raise_reference(const float (&s)[M][8][4], int r, float scale, float& reference, float& sum) {
  float largest = -CUDART_INF_F;
#pragma unroll
  for (int n = 0; n < 8; ++n) largest = fmaxf(largest, fmaxf(s[r >> 1][n][2 * (r & 1)], s[r >> 1][n][2 * (r & 1) + 1]));
  float next = fmaxf(reference, attention::quad_max(largest) * scale);
  sum *= ptx::exp2(reference - (next == -CUDART_INF_F ? 0.0f : next));
  reference = next;
}

// The sum of 2^(logit - reference) over this lane's part of a row's logits in a tile.
template <int M>
__device__ __forceinline__ float sum_of_exponentials(const float (&s)[M][8][4], int r, float scale, float reference) {
  float shift = reference == -CUDART_INF_F ? 0.0f : reference, sum = 0.0f;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) sum += ptx::exp2(fmaf(s[r >> 1][n][2 * (r & 1) + e], scale, -shift));
  return sum;
}

// Adds the `probabilities` of all threads to the mass of the key block that contains `tile`.
// The warps' sums are stored in `parts` and added in order.
template <int PARTS>
__device__ __forceinline__ void add_mass(float probabilities, float (&parts)[PARTS], float* mass, int tile) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) probabilities += __shfl_xor_sync(~0u, probabilities, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = probabilities;
  __syncthreads();
  if (threadIdx.x == 0) {
    float all = 0.0f;
    for (int i = 0; i < PARTS; ++i) all += parts[i];
    mass[tile / 2] += all;
  }
}

// A thread block processes one block of queries, of all query heads that share a key head. For each of these heads it
// reads the keys twice: first for the log-sum-exps, then for the sum of probabilities over each key block.
template <class T, int D>
__device__ __forceinline__ void block_mass(const params::Mass& p) {
  using Numerics = attention::Dense16ForwardSm80<T, D, params::plan("block_mass", D, params::LISTED)>;
  constexpr int M = Numerics::M, PARTS = Numerics::THREADS / 32;
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ attention::ForwardBlock block;
  __shared__ float parts[PARTS];
  const params::Shape& shape = p.forward.shape;
  int group = shape.query_heads / shape.key_heads, key_head = blockIdx.z;
  Segment segment(shape, blockIdx.y);
  int number = blockIdx.x, first = number * SELECTION_BLOCK;
  if (first >= segment.query_len) return;
  int past = candidates(segment, number) * (SELECTION_BLOCK / TILE);
  int tiles = (segment.visible_keys(min(first + SELECTION_BLOCK, segment.query_len) - 1) + TILE - 1) / TILE;
  past = min(past, tiles);
  float* mass = p.mass + (int64_t(key_head) * p.query_blocks + first_query_block(shape, blockIdx.y) + number) * p.columns +
                (shape.segments ? first_key_block(shape, blockIdx.y) : 0);
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_first = first + warp * 16 * M;
  for (int head = key_head * group; head < (key_head + 1) * group; ++head) {
    __syncthreads();
    if (threadIdx.x == 0) {
      block.set_place(shape, head, blockIdx.y);
      block.first = first, block.end = first + SELECTION_BLOCK;
    }
    __syncthreads();
    Numerics numerics(p.forward, block, shared);
    numerics.load_queries();
    float reference[2 * M], sum[2 * M];
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) reference[r] = -CUDART_INF_F, sum[r] = 0.0f;
    for (int sweep = 0; sweep < 2; ++sweep) {
      int end = sweep == 0 ? tiles : past;
      float of_block = 0.0f;
      if (end > 0) numerics.load_keys(0);
      ptx::cp_async_commit();
      for (int tile = 0; tile < end; ++tile) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        if (tile + 1 < end) numerics.load_keys(tile + 1);
        ptx::cp_async_commit();
        typename Numerics::Logits s;
        numerics.multiply(tile, s);
        attention::mask(s, attention::Sight<attention::LATER_KEYS>(segment, p), warp_first, tile * TILE, lane, -CUDART_INF_F);
#pragma unroll
        for (int r = 0; r < 2 * M; ++r) {
          if (sweep == 0) raise_reference(s, r, numerics.scale, reference[r], sum[r]);
          float of_tile = sum_of_exponentials(s, r, numerics.scale, reference[r]);
          if (sweep == 0) sum[r] += of_tile;
          else if (warp_first + attention::row_of(r, lane) < segment.query_len) of_block += of_tile;
        }
        if (sweep == 1 && (tile % 2 == 1 || tile + 1 == end)) {
          add_mass(of_block, parts, mass, tile);
          of_block = 0.0f;
        }
      }
      __syncthreads();
      if (sweep == 0) {
        // The references become log-sum-exps, so that the second pass computes normalized probabilities.
#pragma unroll
        for (int r = 0; r < 2 * M; ++r) {
          float all = attention::quad_sum(sum[r]);
          if (all > 0.0f) reference[r] += log2f(all);
        }
      }
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(WARPS * 32) count_users(const __grid_constant__ params::InvertedLists p) { users<false>(p); }
extern "C" __global__ void __launch_bounds__(WARPS * 32) fill_users(const __grid_constant__ params::InvertedLists p) { users<true>(p); }
extern "C" __global__ void __launch_bounds__(WARPS * 32) choose_blocks(const __grid_constant__ params::Choose p) { choose(p); }

#define TYPE(type, T)                                                                                        \
  extern "C" __global__ void __launch_bounds__(POOL_THREADS, 1) pool_##type(const __grid_constant__ params::Pool p) { \
    pool<T>(p);                                                                                              \
  }                                                                                                          \
  extern "C" __global__ void __launch_bounds__(128, 1) block_mass_##type##_64(const __grid_constant__ params::Mass p) {  \
    block_mass<T, 64>(p);                                                                                    \
  }                                                                                                          \
  extern "C" __global__ void __launch_bounds__(128, 1) block_mass_##type##_128(const __grid_constant__ params::Mass p) { \
    block_mass<T, 128>(p);                                                                                   \
  }
TYPE(bf16, __nv_bfloat16)
TYPE(f16, __half)
