// Root-mean-square normalization: y = x r w, r = 1 / sqrt(mean(x^2) + eps). Each row is read once and written once.
// In the same pass the forward adds a residual stream to x, and the backward adds the stream's gradient to dx.
#include <sage/elements/row.cuh>
#include <sage/params/ops.cuh>
#include <sage/quant/fp8_strip.cuh>

using namespace sage;
using elements::each_chunk;
using elements::Group;
using elements::KEEP;
using elements::MAX_THREADS;
using elements::Pack;
using elements::Row;
using elements::store_column_sums;

namespace {

template <class T, int V>
__device__ void forward(const params::RmsNorm& p) {
  Group group(p.lanes);
  for (int row = blockIdx.x * group.count + group.index; row < p.rows; row += gridDim.x * group.count) {
    Row<T, V> x(p.x, row, group, p.width);
    if (p.residual) x.add(p.residual, p.sum, row, group, p.width);
    float r = elements::inverse_rms(group, p.width, p.eps, [&](auto f) { x.each(group, p.width, f); });
    T* y = static_cast<T*>(p.out) + int64_t(row) * p.width;
    each_chunk(group, p.width / V, [&](int k, int chunk) {
      Pack<T, V> in = x.at(k, chunk);
      float w[V], out[V];
      elements::load_weight(p.weight, p.weight_type, chunk * V, w);
#pragma unroll
      for (int i = 0; i < V; ++i) out[i] = in[i] * r * w[i];
      Pack<T, V>::of(out).store(y + chunk * V);
    });
  }
}

// dx = r (g - x r^2 mean(g o x)) with g = dy o w. Also sums dw = dy o x r over the thread block's rows, in an order
// that depends only on the shape.
template <class T, int V>
__device__ void backward(const params::RmsNorm& p) {
  Group group(p.lanes);
  int chunks = p.width / V;
  float* partial = p.partials + int64_t(blockIdx.x) * p.width;
  float dw[KEEP][V] = {};
  for (int row = blockIdx.x * group.count + group.index; row < p.rows; row += gridDim.x * group.count) {
    Row<T, V> x(p.x, row, group, p.width), dy(p.dy, row, group, p.width);
    float r = elements::inverse_rms(group, p.width, p.eps, [&](auto f) { x.each(group, p.width, f); });
    float dot = 0.0f;
    each_chunk(group, chunks, [&](int k, int chunk) {
      Pack<T, V> in = x.at(k, chunk), grad = dy.at(k, chunk);
      float w[V];
      elements::load_weight(p.weight, p.weight_type, chunk * V, w);
#pragma unroll
      for (int i = 0; i < V; ++i) dot = fmaf(grad[i] * w[i], in[i], dot);
    });
    float pull = group.sum(dot) * r * r / p.width;
    T* dx = static_cast<T*>(p.out) + int64_t(row) * p.width;
    const T* residual = p.residual ? static_cast<const T*>(p.residual) + int64_t(row) * p.width : nullptr;
    each_chunk(group, chunks, [&](int k, int chunk) {
      Pack<T, V> in = x.at(k, chunk), grad = dy.at(k, chunk);
      float w[V], out[V], add[V] = {};
      elements::load_weight(p.weight, p.weight_type, chunk * V, w);
      if (residual) elements::load_floats(residual + chunk * V, add);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        out[i] = add[i] + r * (grad[i] * w[i] - in[i] * pull);
        float part = grad[i] * in[i] * r;
        if (k < KEEP) dw[k][i] += part; else partial[chunk * V + i] += part;  // no other thread adds to this element
      }
      Pack<T, V>::of(out).store(dx + chunk * V);
    });
  }
  store_column_sums<V>(group, p.width, dw, partial);
}

template <class T, int WARPS>
__device__ void forward_fp8(const params::Fp8RmsNorm& fp8) {
  using Strip = quant::Fp8Strip<WARPS>;
  constexpr int V = Strip::V, KEEP = Strip::KEEP;
  const params::RmsNorm& p = fp8.of;
  __shared__ Strip strip;
  quant::Fp8Team<WARPS> team{strip};
  quant::Fp8Codes codes(fp8.codes);
  for (int first = blockIdx.x * Strip::ROWS; first < p.rows; first += gridDim.x * Strip::ROWS) {
#pragma unroll
    for (int line = 0; line < Strip::LINES; ++line) {
      int row = first + Strip::team() * Strip::LINES + line;
      int width = row < p.rows ? p.width : 0;  // 0 after the last row: all threads must call inverse_rms
      elements::Packed<T, V> x[KEEP];
#pragma unroll
      for (int k = 0; k < KEEP; ++k) {
        int64_t at = int64_t(row) * p.width + Strip::column(k);
        if (Strip::column(k) >= width) continue;
        x[k].load(static_cast<const T*>(p.x) + at);
        if (!p.residual) continue;
        float sum[V];
        elements::load_floats(static_cast<const T*>(p.residual) + at, sum);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i] += x[k][i];
        x[k].packs[0] = Pack<T, V>::of(sum);
        x[k].packs[0].store(static_cast<T*>(p.sum) + at);
      }
      float r = elements::inverse_rms(team, p.width, p.eps, [&](auto f) {
#pragma unroll
        for (int k = 0; k < KEEP; ++k)
#pragma unroll
          for (int i = 0; i < V; ++i) f(x[k][i]);
      });
#pragma unroll
      for (int k = 0; k < KEEP; ++k) {
        if (Strip::column(k) >= width) continue;
        float w[V], y[V];
        elements::load_weight(p.weight, p.weight_type, Strip::column(k), w);
#pragma unroll
        for (int i = 0; i < V; ++i) y[i] = x[k][i] * r * w[i];
        strip.set(fp8.codes, k, line, row, codes.quantize(y));
      }
    }
    strip.store(fp8.codes, first);
  }
  codes.report(fp8.codes);
}

// Like `backward`, but also writes dx in FP8.
template <class T, int WARPS>
__device__ void backward_fp8(const params::Fp8RmsNorm& fp8) {
  using Strip = quant::Fp8Strip<WARPS>;
  constexpr int V = Strip::V, KEEP = Strip::KEEP;
  const params::RmsNorm& p = fp8.of;
  __shared__ Strip strip;
  quant::Fp8Team<WARPS> team{strip};
  quant::Fp8Codes codes(fp8.codes);
  float dw[KEEP][V] = {};
  for (int first = blockIdx.x * Strip::ROWS; first < p.rows; first += gridDim.x * Strip::ROWS) {
#pragma unroll
    for (int line = 0; line < Strip::LINES; ++line) {
      int row = first + Strip::team() * Strip::LINES + line;
      int width = row < p.rows ? p.width : 0;
      elements::Packed<T, V> x[KEEP], dy[KEEP];
#pragma unroll
      for (int k = 0; k < KEEP; ++k) {
        int64_t at = int64_t(row) * p.width + Strip::column(k);
        if (Strip::column(k) >= width) continue;
        x[k].load(static_cast<const T*>(p.x) + at);
        dy[k].load(static_cast<const T*>(p.dy) + at);
      }
      float r = elements::inverse_rms(team, p.width, p.eps, [&](auto f) {
#pragma unroll
        for (int k = 0; k < KEEP; ++k)
#pragma unroll
          for (int i = 0; i < V; ++i) f(x[k][i]);
      });
      float dot = 0.0f, w[V];
#pragma unroll
      for (int k = 0; k < KEEP; ++k) {
        if (Strip::column(k) >= width) continue;
        elements::load_weight(p.weight, p.weight_type, Strip::column(k), w);
#pragma unroll
        for (int i = 0; i < V; ++i) dot = fmaf(dy[k][i] * w[i], x[k][i], dot);
      }
      float pull = team.sum(dot) * r * r / p.width;
#pragma unroll
      for (int k = 0; k < KEEP; ++k) {
        int64_t at = int64_t(row) * p.width + Strip::column(k);
        if (Strip::column(k) >= width) continue;
        float dx[V] = {};
        elements::load_weight(p.weight, p.weight_type, Strip::column(k), w);
        if (p.residual) elements::load_floats(static_cast<const T*>(p.residual) + at, dx);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          dx[i] += r * (dy[k][i] * w[i] - x[k][i] * pull);
          dw[k][i] += dy[k][i] * x[k][i] * r;
        }
        Pack<T, V>::of(dx).store(static_cast<T*>(p.out) + at);
        strip.set(fp8.codes, k, line, row, codes.quantize(dx));
      }
    }
    strip.store(fp8.codes, first);
  }
  codes.report(fp8.codes);
  // Sums the threads' dw for each column, in a fixed order.
  __syncthreads();
#pragma unroll
  for (int k = 0; k < KEEP; ++k)
#pragma unroll
    for (int i = 0; i < V; ++i) strip.sums[Strip::team()][Strip::column(k) + i] = dw[k][i];
  __syncthreads();
  for (int c = threadIdx.x; c < p.width; c += Strip::THREADS) {
    float sum = 0.0f;
    for (int other = 0; other < Strip::TEAMS; ++other) sum += strip.sums[other][c];
    p.partials[int64_t(blockIdx.x) * p.width + c] = sum;
  }
}

}  // namespace

#define KERNELS(name, T, V)                                                                                   \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                   \
      rms_norm_fwd_##name(const __grid_constant__ params::RmsNorm p) { forward<T, V>(p); }                    \
  extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)                                                   \
      rms_norm_bwd_##name(const __grid_constant__ params::RmsNorm p) { backward<T, V>(p); }

SAGE_FLOAT_KERNELS(KERNELS)

// Thread blocks of the FP8 backward per multiprocessor. The kernel keeps a row in registers. Up to Hopper, two thread
// blocks fit without spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int STRIP_BLOCKS = 1;
#else
constexpr int STRIP_BLOCKS = 2;
#endif

// For rows of up to warps * FP8_STRIP_WIDTH elements.
#define FP8_KERNELS(name, T, warps)                                                            \
  extern "C" __global__ void __launch_bounds__(quant::FP8_THREADS)                                 \
      rms_norm_fp8_fwd_##warps##_##name(const __grid_constant__ params::Fp8RmsNorm p) { forward_fp8<T, warps>(p); } \
  extern "C" __global__ void __launch_bounds__(quant::FP8_THREADS, STRIP_BLOCKS)                   \
      rms_norm_fp8_bwd_##warps##_##name(const __grid_constant__ params::Fp8RmsNorm p) { backward_fp8<T, warps>(p); }

FP8_KERNELS(f16, __half, 1)
FP8_KERNELS(f16, __half, 2)
FP8_KERNELS(bf16, __nv_bfloat16, 1)
FP8_KERNELS(bf16, __nv_bfloat16, 2)
