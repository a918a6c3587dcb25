// Rotary position embedding, alone or after an RMSNorm over each head. A group of lanes processes one head at a time, V
// pairs of channels per lane. In `forward` the group loads a token's angles once for several heads.
#include <sage/elements/group.cuh>
#include <sage/elements/pack.cuh>
#include <sage/params/ops.cuh>
#include <sage/quant/fp8_tile.cuh>

using namespace sage;
using elements::Group;
using elements::Pack;

namespace {

constexpr int MAX_THREADS = 512;
static_assert(MAX_THREADS >= elements::ROW_THREADS);

// The channels of a lane, in two packs of V neighbouring channels, and the first of the lane's V angles. In the
// half-split layout, pair i is element i of both packs. In the interleaved layout a pair is two neighbouring elements
// of one pack, and the two packs are neighbours.
template <int V>
struct Place {
  int channels[2];
  int angle;
  bool active;
  bool interleaved;

  __device__ __forceinline__ Place(const Group& group, const params::Rope& p) : interleaved(p.interleaved) {
    angle = group.lane * V;
    active = angle < p.half;
    channels[0] = interleaved ? 2 * angle : angle;
    channels[1] = interleaved ? 2 * angle + V : angle + p.half;
  }

  // The channel that x[i / V][i % V] of `Pairs` belongs to.
  __device__ __forceinline__ int channel(int i) const {
    return interleaved ? channels[0] + i % V * 2 + i / V : channels[i / V] + i % V;
  }
};

// A lane's channels as f32: pair i is x[0][i], x[1][i].
template <int V>
struct Pairs {
  float x[2][V];

  // Converts from the channel order in memory to pairs (`split`), and back (`join`).
  __device__ __forceinline__ void split(bool interleaved) {
    if (!interleaved) return;
    float was[2 * V];
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) was[i] = x[i / V][i % V];
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) x[i % 2][i / 2] = was[i];
  }
  __device__ __forceinline__ void join(bool interleaved) {
    if (!interleaved) return;
    float was[2 * V];
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) was[i] = x[i % 2][i / 2];
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) x[i / V][i % V] = was[i];
  }

  __device__ __forceinline__ float& operator[](int i) { return x[i / V][i % V]; }

  template <class T>
  __device__ __forceinline__ void store(T* head, const Place<V>& place) {
    join(place.interleaved);
    Pack<T, V>::of(x[0]).store(head + place.channels[0]);
    Pack<T, V>::of(x[1]).store(head + place.channels[1]);
  }
};

// A lane's channels in memory order.
template <class T, int V>
struct Packs {
  Pack<T, V> pack[2];

  __device__ __forceinline__ void load(const T* head, const Place<V>& place) {
    pack[0] = Pack<T, V>::load(head + place.channels[0]);
    pack[1] = Pack<T, V>::load(head + place.channels[1]);
  }
  __device__ __forceinline__ Pairs<V> pairs(const Place<V>& place) const {
    Pairs<V> pairs;
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) pairs[i] = place.active ? pack[i / V][i % V] : 0.0f;
    pairs.split(place.interleaved);
    return pairs;
  }
};

template <int V>
__device__ __forceinline__ Pairs<V> load_weights(const params::Rope& p, const Place<V>& place) {
  Pairs<V> w = {};
  if (place.active) {
    elements::load_weight(p.weight, p.weight_type, place.channels[0], w.x[0]);
    elements::load_weight(p.weight, p.weight_type, place.channels[1], w.x[1]);
    w.split(place.interleaved);
  }
  return w;
}

template <int V>
struct Angles {
  float cos[V], sin[V];

  __device__ __forceinline__ Angles(const params::Rope& p, int position, const Place<V>& place) {
    if (!place.active) return;
    int64_t at = int64_t(position) * p.half + place.angle;
    elements::load_floats(p.cos + at, cos);
    elements::load_floats(p.sin + at, sin);
  }

  __device__ __forceinline__ void rotate(Pairs<V>& pairs, float direction) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float a = pairs.x[0][i], b = pairs.x[1][i], s = sin[i] * direction;
      pairs.x[0][i] = a * cos[i] - b * s;
      pairs.x[1][i] = a * s + b * cos[i];
    }
  }
};

template <int V>
__device__ __forceinline__ float inverse_rms(const Group& group, const params::Rope& p, Pairs<V>& pairs) {
  return elements::inverse_rms(group, 2 * p.half, p.eps, [&](auto f) {
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) f(pairs[i]);
  });
}

template <class T>
__device__ __forceinline__ T* head_of(const params::Heads& x, int batch, int position, int head) {
  return static_cast<T*>(x.data) + batch * x.batch + position * x.token + head * x.head;
}

// A head of the output. `token` counts across batch entries, because they follow one another without gaps.
template <class T>
__device__ __forceinline__ T* out_head(const params::Rope& p, int token, int head) {
  return static_cast<T*>(p.out.data) + token * p.out.token + head * p.out.head;
}

// Calls body(token, batch, position, first, step) for each item: HEADS heads of a token, from `first` on, `step` apart.
// Neighbouring groups process neighbouring heads. The items that a group processes depend only on the shape.
template <int HEADS, class Body>
__device__ __forceinline__ void each_item(const Group& group, const params::Rope& p, Body body) {
  int step = (p.heads + HEADS - 1) / HEADS;
  int items = p.tokens * step;  // the host checks that this number fits an int
  for (int item = blockIdx.x * group.count + group.index; item < items; item += gridDim.x * group.count) {
    int token = item / step;
    body(token, token / p.sequence, token % p.sequence, item % step, step);
  }
}

// With NORM: y = rope(x r w), where r is `inverse_rms` of the head and w are the norm's weights. Without: y = rope(x);
// p.direction = -1 rotates by the opposite angle, which is the backward.
template <class T, int V, bool NORM>
__device__ void forward(const params::Rope& p) {
  constexpr int HEADS = 4;
  Group group(p.lanes);
  Place<V> place(group, p);
  Pairs<V> w;
  if constexpr (NORM) w = load_weights(p, place);
  each_item<HEADS>(group, p, [&](int token, int batch, int position, int first, int step) {
    Packs<T, V> packs[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
      if (place.active && first + h * step < p.heads)
        packs[h].load(head_of<T>(p.x, batch, position, first + h * step), place);
    Angles<V> angles(p, position, place);
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      int head = first + h * step;
      if (head >= p.heads) break;
      Pairs<V> x = packs[h].pairs(place);
      if constexpr (NORM) {
        float r = inverse_rms(group, p, x);
#pragma unroll
        for (int i = 0; i < 2 * V; ++i) x[i] *= r * w[i];
      }
      if (!place.active) continue;
      angles.rotate(x, NORM ? 1.0f : p.direction);
      x.store(out_head<T>(p, token, head), place);
    }
  });
}

// The backward of norm and rope: dn = rope^-1(dy), g = dn o w, dx = r (g - x r^2 mean(g o x)), where r is `inverse_rms`
// of the head. Also sums dw = dn o x r over all heads and tokens that the thread block processes.
template <class T, int V>
__device__ void norm_backward(const params::Rope& p) {
  Group group(p.lanes);
  Place<V> place(group, p);
  Pairs<V> dw = {};
  each_item<1>(group, p, [&](int token, int batch, int position, int head, int) {
    Packs<T, V> inputs, gradients;
    if (place.active) {
      inputs.load(head_of<T>(p.x, batch, position, head), place);
      gradients.load(head_of<T>(p.dy, batch, position, head), place);
    }
    Angles<V> angles(p, position, place);
    Pairs<V> dn = gradients.pairs(place);
    if (place.active) angles.rotate(dn, -1.0f);
    Pairs<V> x = inputs.pairs(place);
    float r = inverse_rms(group, p, x);
    Pairs<V> w = load_weights(p, place);  // loaded again for every head, to save registers
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) dot = fmaf(dn[i] * w[i], x[i], dot);
    float pull = group.sum(dot) * r * r / (2 * p.half);
    if (!place.active) return;
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) {
      dw[i] += dn[i] * x[i] * r;
      x[i] = r * (dn[i] * w[i] - x[i] * pull);
    }
    x.store(out_head<T>(p, token, head), place);
  });
  // Adds dw (the gradient of the norm's weight) over the thread block's groups of lanes, in their order. With one
  // group, `sums` is not used. A thread block with several groups has at most ROW_THREADS threads, with 2 * V channels
  // each.
  __shared__ float sums[elements::ROW_THREADS * 2 * V];
  float* partial = p.partials + int64_t(blockIdx.x) * 2 * p.half;
  if (place.active) {
#pragma unroll
    for (int i = 0; i < 2 * V; ++i) {
      int channel = place.channel(i);
      if (group.count == 1) partial[channel] = dw[i]; else sums[group.index * 2 * p.half + channel] = dw[i];
    }
  }
  if (group.count == 1) return;
  __syncthreads();
  for (int channel = threadIdx.x; channel < 2 * p.half; channel += blockDim.x) {
    float sum = 0.0f;
    for (int other = 0; other < group.count; ++other) sum += sums[other * 2 * p.half + channel];
    partial[channel] = sum;
  }
}

// Like `norm_backward` for the half-split layout, but writes FP8. A tile has rows of one head, with D / 8 lanes per
// row.
template <class T, int D>
__device__ void norm_backward_fp8(const params::Fp8Rope& fp8) {
  using Tile = quant::Fp8TileOf<D>;
  constexpr int V = Tile::V, LANES = D / V, HALF = D / 2;
  const params::Rope& p = fp8.of;
  __shared__ Tile tile;
  __shared__ float sums[Tile::THREADS / LANES][D];
  Group group(LANES);
  quant::Fp8Codes codes(fp8.codes);
  int column = Tile::column();
  bool upper = column >= HALF;
  float w[V], dw[V] = {};
  elements::load_weight(p.weight, p.weight_type, column, w);
  // Consecutive tiles have the same rows of different heads, so that the rows' angles stay in the cache.
  int tiles = (p.tokens + Tile::ROWS - 1) / Tile::ROWS * p.heads, each = (tiles + gridDim.x - 1) / gridDim.x;
  for (int item = blockIdx.x * each; item < min(tiles, int(blockIdx.x + 1) * each); ++item) {
    int head = item % p.heads, first_row = item / p.heads * Tile::ROWS, row = first_row + Tile::row();
    if (row < p.tokens) {
      elements::Packed<T, V> inputs[Tile::LINES], gradients[Tile::LINES];
#pragma unroll
      for (int line = 0; line < Tile::LINES; ++line) {
        int batch = (row + line) / p.sequence, position = (row + line) % p.sequence;
        inputs[line].load(head_of<T>(p.x, batch, position, head) + column);
        gradients[line].load(head_of<T>(p.dy, batch, position, head) + column);
      }
#pragma unroll
      for (int line = 0; line < Tile::LINES; ++line) {
        int position = (row + line) % p.sequence;
        float x[V], dn[V], cos[V], sin[V];
#pragma unroll
        for (int i = 0; i < V; ++i) x[i] = inputs[line][i], dn[i] = gradients[line][i];
        int64_t at = int64_t(position) * HALF + column % HALF;
        elements::load_floats(p.cos + at, cos);
        elements::load_floats(p.sin + at, sin);
        float r = elements::inverse_rms(group, D, p.eps, [&](auto f) {
#pragma unroll
          for (int i = 0; i < V; ++i) f(x[i]);
        });
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          // The other channel of the pair is half a head away.
          float other = __shfl_xor_sync(group.mask, dn[i], LANES / 2);
          dn[i] = dn[i] * cos[i] + (upper ? -other : other) * sin[i];
          dot = fmaf(dn[i] * w[i], x[i], dot);
        }
        float pull = group.sum(dot) * r * r / D;
#pragma unroll
        for (int i = 0; i < V; ++i) {
          dw[i] += dn[i] * x[i] * r;
          x[i] = r * (dn[i] * w[i] - x[i] * pull);
        }
        codes.set(line, x);
      }
    }
    int first_column = fp8.first_column + head * D;
    codes.store(fp8.codes, tile, first_row, first_column, first_column + D);
    __syncthreads();
  }
  codes.report(fp8.codes);
  // Adds the sums of the thread block's groups, in order.
#pragma unroll
  for (int i = 0; i < V; ++i) sums[group.index][column + i] = dw[i];
  __syncthreads();
  for (int channel = threadIdx.x; channel < D; channel += Tile::THREADS) {
    float sum = 0.0f;
    for (int other = 0; other < Tile::THREADS / LANES; ++other) sum += sums[other][channel];
    p.partials[int64_t(blockIdx.x) * D + channel] = sum;
  }
}

}  // namespace

#define FP8_KERNELS(name, T)                                                          \
  extern "C" __global__ void __launch_bounds__(quant::FP8_THREADS)                    \
      qk_norm_rope_fp8_64_##name(const __grid_constant__ params::Fp8Rope p) { norm_backward_fp8<T, 64>(p); }   \
  extern "C" __global__ void __launch_bounds__(quant::FP8_THREADS)                    \
      qk_norm_rope_fp8_128_##name(const __grid_constant__ params::Fp8Rope p) { norm_backward_fp8<T, 128>(p); }

FP8_KERNELS(f32, float)
FP8_KERNELS(f16, __half)
FP8_KERNELS(bf16, __nv_bfloat16)

#define KERNELS(name, T, V)                                                                                    \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                    \
      rope_##name(const __grid_constant__ params::Rope p) { forward<T, V, false>(p); }                         \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                    \
      qk_norm_rope_fwd_##name(const __grid_constant__ params::Rope p) { forward<T, V, true>(p); }              \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                    \
      qk_norm_rope_bwd_##name(const __grid_constant__ params::Rope p) { norm_backward<T, V>(p); }

SAGE_FLOAT_KERNELS(KERNELS)
