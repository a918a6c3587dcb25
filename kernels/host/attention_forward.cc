// The portable forward's source on a CPU, thread by thread: its walk, copies, layouts, masks and softmax, with products in 16
// bit, of SageBwd's codes and of NVFP4 codes, against definitions in doubles. NVFP4 products run as mma_nvfp4.cuh emulates them.
#include <sage/attention/full_precision_forward.cuh>
#include <sage/attention/nvfp4_forward.cuh>
#include <sage/attention/sagebwd_forward.cuh>
#include <sage/quant/pack_nvfp4.cuh>

#include "../quantize.cu"

using namespace sage;

namespace {

struct Case {
  int batch, queries, keys, query_heads, key_heads, head_dim;
  bool causal, smooth;
  std::vector<int> query_starts, key_starts;  // of packed documents, and their ends
};

uint32_t state = 1;
float random_value() {
  float sum = 0.0f;
  for (int i = 0; i < 3; ++i) {
    state = state * 1664525u + 1013904223u;
    sum += float(state >> 8) / 8388608.0f - 1.0f;
  }
  return sum;
}

template <class T>
struct Tensor {
  std::vector<T> values;
  params::View view;
  int tokens, heads, channels;
  Tensor(int batch, int tokens, int heads, int channels, float size)
      : values(size_t(batch) * tokens * heads * channels + 16), tokens(tokens), heads(heads), channels(channels) {
    for (T& x : values) x = ptx::from_float<T>(size * random_value() + 0.2f * size);
    bool vector = channels % 8 == 0;
    // Rows on 16 bytes, which a vector's memory is.
    view = {values.data(), int64_t(tokens) * heads * channels, int64_t(heads) * channels, channels, 1, vector, 0};
  }
  float at(int batch, int token, int head, int channel) const {
    return float(values[((size_t(batch) * tokens + token) * heads + head) * channels + channel]);
  }
};

// Sixteen values in NVFP4, by the formats' definitions: candle-sage/src/nvfp4.rs.
void fake_quantize(double* x, int count, int stride) {
  static const double E2M1[] = {0, .5, 1, 1.5, 2, 3, 4, 6};
  auto nearest = [](double x, double below, double above, bool below_is_even) {
    return x - below < above - x || (x - below == above - x && below_is_even) ? below : above;
  };
  double largest = 0;
  for (int i = 0; i < count; ++i) largest = fmax(largest, fabs(x[i * stride]));
  double wanted = fmin(double(float(largest) / 6.0f), 448.0), step = ldexp(1.0, int(floor(log2(fmax(wanted, ldexp(1.0, -6))))) - 3);
  double scale = nearbyint(wanted / step) * step;
  for (int i = 0; i < count; ++i) {
    double quantized = scale == 0 ? 0 : double(float(fabs(x[i * stride])) * (1.0f / float(scale))), value = 6;
    for (int n = 0; n < 7; ++n)
      if (quantized >= E2M1[n] && quantized < E2M1[n + 1]) value = nearest(quantized, E2M1[n], E2M1[n + 1], n % 2 == 0);
    x[i * stride] = copysign(value * scale, x[i * stride]);
  }
}

// What a head's output is, (query, channel), row by row.
struct Definition {
  int keys, d;
  std::vector<double> k, v;
  template <class T>
  Definition(const Tensor<T>& k_, const Tensor<T>& v_, int batch, int start, int keys, int head, bool nvfp4, const float* mean)
      : keys(keys), d(k_.channels) {
    for (int j = 0; j < keys; ++j)
      for (int c = 0; c < d; ++c) {
        k.push_back(nvfp4 && mean ? double(k_.at(batch, start + j, head, c) - mean[c]) : double(k_.at(batch, start + j, head, c)));
        v.push_back(v_.at(batch, start + j, head, c));
      }
    if (!nvfp4) return;
    for (int j = 0; j < keys; ++j)
      for (int c = 0; c < d; c += 16) fake_quantize(&k[j * d + c], std::min(16, d - c), 1);
    for (int j = 0; j < keys; j += 16)
      for (int c = 0; c < d; ++c) fake_quantize(&v[j * d + c], std::min(16, keys - j), d);
  }
  std::vector<double> row(std::vector<double> q, int visible, double scale, bool nvfp4) const {
    std::vector<double> out(d, 0.0);
    if (nvfp4)
      for (int c = 0; c < d; c += 16) fake_quantize(&q[c], std::min(16, d - c), 1);
    double reference = -INFINITY, sum = 0;
    for (int first = 0; first < visible; first += 64) {
      std::vector<double> p(64, -INFINITY);
      double largest = -INFINITY;
      for (int j = first; j < std::min(first + 64, visible); ++j) {
        double dot = 0;
        for (int c = 0; c < d; ++c) dot += q[c] * k[j * d + c];
        largest = fmax(largest, p[j - first] = dot * scale / log(2.0));
      }
      // The kernel finds the power of two in f32.
      double next = fmax(reference, nvfp4 ? double(ceilf(float(largest))) : largest), decay = ::exp2(reference - next);
      sum *= decay;
      for (double& x : out) x *= decay;
      reference = next;
      for (double& x : p) sum += x = ::exp2(x - reference);
      if (nvfp4)
        for (int j = 0; j < 64; j += 16) fake_quantize(&p[j], 16, 1);
      for (int j = first; j < std::min(first + 64, visible); ++j)
        for (int c = 0; c < d; ++c) out[c] += p[j - first] * v[j * d + c];
    }
    for (double& x : out) x = sum > 0 ? x / sum : 0;
    return out;
  }
};

enum Numerics { FULL_PRECISION, SAGEBWD, SAGEBWD_QK, NVFP4_PRODUCTS };

// Runs kernels on all blocks, and returns the largest relative L2 error of a head.
template <class T, int D, Numerics NUMERICS>
double run(const Case& c) {
  constexpr bool NVFP4 = NUMERICS == NVFP4_PRODUCTS;
  Tensor<T> q(c.batch, c.queries, c.query_heads, c.head_dim, 1.0f), k(c.batch, c.keys, c.key_heads, c.head_dim, 1.0f),
      v(c.batch, c.keys, c.key_heads, c.head_dim, 2.0f), out(c.batch, c.queries, c.query_heads, c.head_dim, 100.0f);
  params::Forward p = {};
  p.q = q.view, p.k = k.view, p.v = v.view, p.out = out.view;
  auto tiles = [](int tokens) { return (tokens + 63) / 64; };
  std::vector<params::Segment> segments;
  int count = c.query_starts.empty() ? c.batch : int(c.query_starts.size()) - 1, longest[2] = {c.queries, c.keys}, all[2] = {0, 0};
  if (!c.query_starts.empty()) longest[0] = longest[1] = 0;
  for (int i = 0; i < count; ++i) {
    params::Segment s = {0, c.queries, 0, c.keys, all[0], all[1], 0, 0};
    if (!c.query_starts.empty()) {
      s.query_start = c.query_starts[i], s.query_len = c.query_starts[i + 1] - s.query_start;
      s.key_start = c.key_starts[i], s.key_len = c.key_starts[i + 1] - s.key_start;
      longest[0] = max(longest[0], s.query_len), longest[1] = max(longest[1], s.key_len);
    }
    segments.push_back(s);
    all[0] += tiles(s.query_len), all[1] += tiles(s.key_len);
  }
  float scale = 1.0f / sqrtf(float(c.head_dim));
  p.shape = {c.query_starts.empty() ? nullptr : segments.data(), count, longest[0], longest[1], c.query_heads, c.key_heads, c.head_dim,
             c.causal, scale, all[0], all[1], 2, 0};
  std::vector<float> means(size_t(c.key_heads) * count * D);
  for (int head = 0; head < c.key_heads && c.smooth; ++head)
    for (int i = 0; i < count; ++i)
      for (int channel = 0; channel < c.head_dim; ++channel) {
        const params::Segment& s = segments[i];
        float sum = 0;
        int batch = c.query_starts.empty() ? i : 0;
        for (int j = 0; j < s.key_len; ++j) sum += k.at(batch, s.key_start + j, head, channel);
        means[(size_t(head) * count + i) * D + channel] = sum / float(max(s.key_len, 1));
      }
  using Tile = layout::Nvfp4Tile<D>;
  // A tile more, which is to be left alone.
  auto of_tiles = [](int tiles) { return std::vector<int8_t>(size_t(tiles + 1) * Tile::BYTES, 0x55); };
  auto is_left_alone = [](const std::vector<int8_t>& codes) {
    for (size_t i = codes.size() - Tile::BYTES; i < codes.size(); ++i)
      if (codes[i] != 0x55) return false;
    return true;
  };
  auto q_codes = of_tiles(all[0] * c.query_heads), k_codes = of_tiles(all[1] * c.key_heads), v_codes = k_codes;
  p.p_lift = 0;
  int blocks = count * c.query_heads * ((longest[0] + 127) / 128);
  if constexpr (NVFP4) {
    p.codes.q = q_codes.data(), p.codes.k = k_codes.data(), p.codes.v_transposed = v_codes.data();
    p.codes.k_mean = c.smooth ? means.data() : nullptr;
    for (int i = 0; i < all[0] * c.query_heads + 2 * all[1] * c.key_heads; ++i)
      host::run(i, quant::PACK_THREADS, [&] { quant::pack_nvfp4<T, D>(p); });
    if (!is_left_alone(q_codes) || !is_left_alone(k_codes) || !is_left_alone(v_codes)) return INFINITY;
    using Numerics = attention::Nvfp4Forward<T, D>;
    for (int i = 0; i < blocks; ++i)
      host::run_with_shared(i, Numerics::THREADS, Numerics::SHARED_BYTES, [&] { attention::forward<Numerics>(p); });
  } else if constexpr (NUMERICS == FULL_PRECISION) {
    using Numerics = attention::FullPrecisionForward<T, D>;
    for (int i = 0; i < blocks; ++i)
      host::run_with_shared(i, Numerics::THREADS, Numerics::SHARED_BYTES, [&] { attention::forward<Numerics>(p); });
  } else {
    int queries = all[0] * c.query_heads, keys = all[1] * c.key_heads;
    std::vector<int8_t> q_int8(queries * 64 * D), k_int8(keys * 64 * D), v_int8(keys * 64 * D);
    std::vector<float> q_scale(queries), k_scale(keys), v_scale(keys), q_mean(queries * D), k_mean(means.size()), sums(keys * D);
    p.codes = {q_int8.data(), k_int8.data(), v_int8.data(), q_scale.data(), k_scale.data(), v_scale.data(), nullptr, nullptr, nullptr};
    if (NUMERICS == SAGEBWD_QK) p.codes.q_mean = q_mean.data();
    if (NUMERICS == SAGEBWD_QK || c.smooth) {
      p.codes.k_mean = k_mean.data(), p.codes.k_tile_sums = sums.data();
      for (int i = 0; i < keys; ++i) host::run(i, quant::TILE_THREADS, [&] { sum_tiles<T, D>(p); });
      for (int i = 0; i < count; ++i)
        for (int head = 0; head < c.key_heads; ++head) host::run(i, MEAN_THREADS, [&] { mean_of_tiles<D>(p); }, head);
    }
    for (int i = 0; i < queries + 2 * keys; ++i) host::run(i, quant::TILE_THREADS, [&] { quantize<T, D>(p); });
    using Numerics = attention::SageBwdForward<T, D, NUMERICS == SAGEBWD_QK>;
    for (int i = 0; i < blocks; ++i)
      host::run_with_shared(i, Numerics::THREADS, Numerics::SHARED_BYTES, [&] { attention::forward<Numerics>(p); });
  }
  double worst = 0;
  for (int i = 0; i < count; ++i)
    for (int head = 0; head < c.query_heads; ++head) {
      const params::Segment& s = segments[i];
      int batch = c.query_starts.empty() ? i : 0, key_head = head / (c.query_heads / c.key_heads);
      const float* mean = c.smooth ? &means[(size_t(key_head) * count + i) * D] : nullptr;
      Definition definition(k, v, batch, s.key_start, s.key_len, key_head, NVFP4, mean);
      double wrong = 0, right = 0;
      for (int query = 0; query < s.query_len; ++query) {
        std::vector<double> row;
        for (int channel = 0; channel < c.head_dim; ++channel) row.push_back(q.at(batch, s.query_start + query, head, channel));
        int visible = c.causal ? min(max(query + 1 + s.key_len - s.query_len, 0), s.key_len) : s.key_len;
        row = definition.row(row, visible, scale, NVFP4);
        for (int channel = 0; channel < c.head_dim; ++channel) {
          double got = out.at(batch, s.query_start + query, head, channel);
          wrong += (got - row[channel]) * (got - row[channel]), right += row[channel] * row[channel];
          if (!(got == got) || fabs(got) > 50) wrong = INFINITY;  // what was not written
        }
      }
      worst = fmax(worst, sqrt(wrong / fmax(right, 1e-30)));
    }
  return worst;
}

// One product of random codes and scales as mma_nvfp4.cuh emulates it, against the fragments of the PTX manual: whether they
// are the same.
bool product_is_the_manuals() {
  uint32_t a[4][32], b[2][32], a_scales[32], b_scales[32];
  float d[32][4];
  auto random_bits = [] {
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits = bits << 8 | uint8_t(int(random_value() * 1e4f));
    return bits;
  };
  for (auto& words : a)
    for (uint32_t& word : words) word = random_bits();
  for (auto& words : b)
    for (uint32_t& word : words) word = random_bits();
  for (uint32_t& word : a_scales) word = random_bits() & 0x3f3f3f3f;
  for (uint32_t& word : b_scales) word = random_bits() & 0x3f3f3f3f;
  host::run(0, 32, [&] {
    int lane = threadIdx.x;
    uint32_t own[4] = {a[0][lane], a[1][lane], a[2][lane], a[3][lane]};
    float sums[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    ptx::mma_nvfp4(sums, own, b[0][lane], b[1][lane], a_scales[lane], b_scales[lane]);
    memcpy(d[lane], sums, sizeof sums);
  });
  for (int lane = 0; lane < 32; ++lane)
    for (int n = 0; n < 4; ++n) {
      int row = lane / 4 + n / 2 * 8, column = lane % 4 * 2 + n % 2;
      double sum = n + 1, size = n + 1;
      for (int k = 0; k < 64; ++k) {
        double left = ptx::value_of_e2m1(a[row / 8 + k / 32 * 2][row % 8 * 4 + k % 32 / 8] >> (4 * (k % 8)));
        double right = ptx::value_of_e2m1(b[k / 32][column * 4 + k % 32 / 8] >> (4 * (k % 8)));
        double product = left * ptx::value_of_e4m3(a_scales[row % 8 * 4 + row / 8] >> (k / 16 * 8)) * right *
                         ptx::value_of_e4m3(b_scales[column * 4] >> (k / 16 * 8));
        sum += product, size += fabs(product);
      }
      // Eight additions in f32.
      if (!(fabs(d[lane][n] - sum) <= 8 * ldexp(size, -24))) return false;
    }
  return true;
}

}  // namespace

int main() {
  const Case cases[] = {
      {1, 1, 1, 1, 1, 64, true, false, {}, {}},
      {2, 63, 65, 2, 1, 64, true, false, {}, {}},
      {1, 130, 200, 2, 2, 128, false, true, {}, {}},
      {1, 200, 150, 2, 1, 40, true, true, {}, {}},
      {1, 70, 64, 3, 1, 97, true, false, {}, {}},
      {1, 200, 190, 2, 1, 64, true, true, {0, 1, 70, 70, 200}, {0, 65, 130, 131, 190}},
  };
  int failed = !product_is_the_manuals();
  if (failed) printf("the emulated NVFP4 product is not that of the PTX manual\n");
  printf("relative L2 error      full precision  SageBwd   with Q    NVFP4 products\n");
  printf("queries  keys  head_dim   bf16         bf16      bf16      bf16      f16\n");
  for (const Case& c : cases) {
    using B = __nv_bfloat16;
    double (*runs[2][5])(const Case&) = {
        {run<B, 64, FULL_PRECISION>, run<B, 64, SAGEBWD>, run<B, 64, SAGEBWD_QK>, run<B, 64, NVFP4_PRODUCTS>,
         run<__half, 64, NVFP4_PRODUCTS>},
        {run<B, 128, FULL_PRECISION>, run<B, 128, SAGEBWD>, run<B, 128, SAGEBWD_QK>, run<B, 128, NVFP4_PRODUCTS>,
         run<__half, 128, NVFP4_PRODUCTS>}};
    // Rounded to 16 bit: P and O in full precision (2^-9 each in bf16), O alone with codes (2^-12 in f16), and there a
    // probability now and then on the other side of a midpoint: exponentials in f32 and in doubles. SageBwd's codes are
    // .0144 off at standard deviation 1, head_dim 64 (docs/findings.md); one key, or few, have more of it.
    const double bounds[5] = {4e-3, 2.5e-2, 2.5e-2, 3e-3, 1.5e-3};
    double errors[5];
    bool good = true;
    for (int i = 0; i < 5; ++i) {
      state = 7;
      errors[i] = runs[c.head_dim > 64][i](c);
      good &= errors[i] < bounds[i];
    }
    printf("%7d %5d %9d   %.5f      %.5f   %.5f   %.5f   %.5f%s\n", c.queries, c.keys, c.head_dim, errors[0], errors[1], errors[2],
           errors[3], errors[4], good ? "" : "   WRONG");
    failed += !good;
  }
  return failed != 0;
}
