// Layer normalization: y = (x - mean) r w + b, r = 1 / sqrt(mean((x - mean)^2) + eps).
#include <sage/elements/row.cuh>
#include <sage/params/ops.cuh>

using namespace sage;
using elements::each_chunk;
using elements::Group;
using elements::KEEP;
using elements::MAX_THREADS;
using elements::Pack;
using elements::Row;

namespace {

// The backward has smaller thread blocks than the forward, because its threads keep the sums of dw and db in registers.
constexpr int BACKWARD_THREADS = 256;
static_assert(BACKWARD_THREADS >= elements::ROW_THREADS);

// The mean of a row, and 1 / sqrt(mean((x - mean)^2) + eps).
struct Moments {
  float mean, r;

  template <class T, int V>
  __device__ __forceinline__ Moments(const Row<T, V>& x, const Group& group, const params::RmsNorm& p) {
    float sum = 0.0f;
    x.each(group, p.width, [&](float element) { sum += element; });
    mean = group.sum(sum) / p.width;
    r = elements::inverse_rms(group, p.width, p.eps, [&](auto f) {
      x.each(group, p.width, [&](float element) { f(element - mean); });
    });
  }
};

template <class T, int V>
__device__ void forward(const params::LayerNorm& layer) {
  const params::RmsNorm& p = layer.of;
  Group group(p.lanes);
  for (int row = blockIdx.x * group.count + group.index; row < p.rows; row += gridDim.x * group.count) {
    Row<T, V> x(p.x, row, group, p.width);
    Moments of(x, group, p);
    T* y = static_cast<T*>(p.out) + int64_t(row) * p.width;
    each_chunk(group, p.width / V, [&](int k, int chunk) {
      Pack<T, V> in = x.at(k, chunk);
      float w[V], b[V], out[V];
      elements::load_weight(p.weight, p.weight_type, chunk * V, w);
      elements::load_weight(layer.bias, layer.bias_type, chunk * V, b);
#pragma unroll
      for (int i = 0; i < V; ++i) out[i] = (in[i] - of.mean) * of.r * w[i] + b[i];
      Pack<T, V>::of(out).store(y + chunk * V);
    });
  }
}

// dx = r (g - mean(g) - c r^2 mean(g o c)) with c = x - mean(x) and g = dy o w. Also sums dw = dy o c r and db = dy
// over the thread block's rows, in an order that depends only on the shape.
template <class T, int V>
__device__ void backward(const params::LayerNorm& layer) {
  const params::RmsNorm& p = layer.of;
  Group group(p.lanes);
  int chunks = p.width / V;
  float* dweight = p.partials + int64_t(blockIdx.x) * p.width;
  float* dbias = layer.bias_partials + int64_t(blockIdx.x) * p.width;
  float dw[KEEP][V] = {}, db[KEEP][V] = {};
  for (int row = blockIdx.x * group.count + group.index; row < p.rows; row += gridDim.x * group.count) {
    Row<T, V> x(p.x, row, group, p.width), dy(p.dy, row, group, p.width);
    Moments of(x, group, p);
    float dot = 0.0f, sum = 0.0f;
    each_chunk(group, chunks, [&](int k, int chunk) {
      Pack<T, V> in = x.at(k, chunk), grad = dy.at(k, chunk);
      float w[V];
      elements::load_weight(p.weight, p.weight_type, chunk * V, w);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        dot = fmaf(grad[i] * w[i], in[i] - of.mean, dot);
        sum = fmaf(grad[i], w[i], sum);
      }
    });
    float pull = group.sum(dot) * of.r * of.r / p.width, shift = group.sum(sum) / p.width;
    T* dx = static_cast<T*>(p.out) + int64_t(row) * p.width;
    each_chunk(group, chunks, [&](int k, int chunk) {
      Pack<T, V> in = x.at(k, chunk), grad = dy.at(k, chunk);
      float w[V], out[V];
      elements::load_weight(p.weight, p.weight_type, chunk * V, w);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        float centered = in[i] - of.mean, part = grad[i] * centered * of.r;
        out[i] = of.r * (grad[i] * w[i] - shift - centered * pull);
        // The host zeroed the sums in memory; no other thread adds to these elements.
        if (k < KEEP) dw[k][i] += part; else dweight[chunk * V + i] += part;
        if (k < KEEP) db[k][i] += grad[i]; else dbias[chunk * V + i] += grad[i];
      }
      Pack<T, V>::of(out).store(dx + chunk * V);
    });
  }
  elements::store_column_sums<V>(group, p.width, dw, dweight);
  __syncthreads();
  elements::store_column_sums<V>(group, p.width, db, dbias);
}

}  // namespace

#define KERNELS(name, T, V)                                                                                 \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                 \
      layer_norm_fwd_##name(const __grid_constant__ params::LayerNorm p) { forward<T, V>(p); }              \
  extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS, 1)                                            \
      layer_norm_bwd_##name(const __grid_constant__ params::LayerNorm p) { backward<T, V>(p); }

SAGE_FLOAT_KERNELS(KERNELS)
