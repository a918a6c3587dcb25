// A reference implementation of attention in doubles, and the errors of results relative to it.
#pragma once

#include "tensor.h"

#include <algorithm>

namespace host {

// Rounds a group of `count` values, at most 16, to NVFP4 as defined in candle-sage/src/nvfp4.rs.
inline void fake_quantize(double* x, int count, int stride) {
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

// Changes to the logits of a query: a soft cap, 0 for none; a slope for the distance from the query's position; and a
// sink, an additional logit without a row of V.
struct ScoreMod {
  double cap = 0, slope = 0, sink = -INFINITY;
  int position = 0;
  double of(double x, int key) const { return (cap > 0 ? cap * tanh(x / cap) : x) - slope * abs(position - key); }
  double derivative(double x) const { return cap > 0 ? 1 - tanh(x / cap) * tanh(x / cap) : 1; }
};

// Computes a head's output. `row` computes the output of one query.
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
  // The query sees keys `from` to `visible - 1`. With `nvfp4`, each tile's maximum of the base-2 logits is rounded up
  // to an integer unless `literal` is set. `lse2` becomes the base-2 log-sum-exp, -inf for a query that sees no key.
  std::vector<double> row(std::vector<double> q, int from, int visible, double scale, bool nvfp4, bool literal, double& lse2,
                          const ScoreMod& mod = {}) const {
    std::vector<double> out(d, 0.0);
    if (nvfp4)
      for (int c = 0; c < d; c += 16) fake_quantize(&q[c], std::min(16, d - c), 1);
    double reference = -INFINITY, sum = 0;
    for (int first = from / 64 * 64; first < visible; first += 64) {
      std::vector<double> p(64, -INFINITY);
      double largest = -INFINITY;
      for (int j = std::max(first, from); j < std::min(first + 64, visible); ++j) {
        double dot = 0;
        for (int c = 0; c < d; ++c) dot += q[c] * k[j * d + c];
        largest = fmax(largest, p[j - first] = mod.of(dot * scale, j) / log(2.0));
      }
      // The logit is rounded to f32 before it is rounded up, as in the kernel.
      double next = fmax(reference, nvfp4 && !literal ? double(ceilf(float(largest))) : largest), decay = ::exp2(reference - next);
      sum *= decay;
      for (double& x : out) x *= decay;
      reference = next;
      for (double& x : p) sum += x = ::exp2(x - reference);
      if (nvfp4)
        for (int j = 0; j < 64; j += 16) fake_quantize(&p[j], 16, 1);
      for (int j = std::max(first, from); j < std::min(first + 64, visible); ++j)
        for (int c = 0; c < d; ++c) out[c] += p[j - first] * v[j * d + c];
    }
    if (sum > 0) sum += ::exp2(mod.sink / log(2.0) - reference);
    lse2 = reference + log2(sum);
    for (double& x : out) x = sum > 0 ? x / sum : 0;
    return out;
  }
};

// The backward for one query, without quantization. Adds to `dk` and `dv`, of shape (key, channel), and returns the
// query's row of dQ.
inline std::vector<double> row_gradients(const Definition& x, const std::vector<double>& q, const std::vector<double>& dout, int from, int visible,
                                  double scale, const ScoreMod& mod, std::vector<double>& dk, std::vector<double>& dv) {
  std::vector<double> p(visible), dp(visible), derivative(visible), dq(x.d, 0.0);
  double largest = -INFINITY, sum = 0, delta = 0;
  for (int j = from; j < visible; ++j) {
    for (int c = 0; c < x.d; ++c) p[j] += scale * q[c] * x.k[j * x.d + c], dp[j] += dout[c] * x.v[j * x.d + c];
    derivative[j] = mod.derivative(p[j]), p[j] = mod.of(p[j], j);
    largest = fmax(largest, p[j]);
  }
  for (int j = from; j < visible; ++j) sum += p[j] = exp(p[j] - largest);
  sum += exp(mod.sink - largest);
  for (int j = from; j < visible; ++j) delta += (p[j] /= sum) * dp[j];
  for (int j = from; j < visible; ++j)
    for (int c = 0; c < x.d; ++c) {
      double ds = p[j] * (dp[j] - delta) * derivative[j] * scale;
      dq[c] += ds * x.k[j * x.d + c], dk[j * x.d + c] += ds * q[c], dv[j * x.d + c] += p[j] * dout[c];
    }
  return dq;
}

// Relative L2 errors, each the largest of all heads.
struct Errors {
  double out = 0, dq = 0, dk = 0, dv = 0;
  bool lse_good = true, means_good = true;
};
struct Error {
  double wrong = 0, right = 0;
  void add(double got, double expected) {
    wrong += (got - expected) * (got - expected), right += expected * expected;
    if (!(got == got) || fabs(got) > 50) wrong = INFINITY;  // an initial value (about 100) was not overwritten
  }
  void into(double& worst) const { worst = fmax(worst, sqrt(wrong / fmax(right, 1e-30))); }
};

}  // namespace host
