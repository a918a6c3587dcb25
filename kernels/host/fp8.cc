// Runs the sources of FP8 quantization on a CPU, thread by thread, and checks their results: FP8 matrices and their
// transposes, the largest value, the number of saturated values, scales, and the FP8 outputs of rms_norm, swiglu, rope
// and the cross-entropy.
#include <math_constants.h>
#include <sage/elements/group.cuh>
#include <sage/elements/row.cuh>
#include <sage/quant/fp8_strip.cuh>

#include "../fp8.cu"
#undef KERNELS
#include "tensor.h"
namespace of_swiglu {
#include "../swiglu.cu"
}
#undef KERNELS
#undef FP8_KERNELS
namespace of_rope {
#include "../rope.cu"
}
#undef KERNELS
#undef FP8_KERNELS
namespace of_norm {
#include "../rms_norm.cu"
}
#undef KERNELS
namespace of_cross_entropy {
#include "../cross_entropy.cu"
}

using namespace sage;
using host::fp8_code;
using host::random_value;

namespace {

using Bf16 = __nv_bfloat16;

// The FP8 values of a matrix and of its transpose, each followed by guard values that no kernel may change.
struct Codes {
  static constexpr int BEHIND = 64;
  int rows, columns;
  bool e5m2;
  std::vector<uint8_t> own, turned;
  float scale, used = 0;
  uint32_t largest = 0, saturated = 0;
  Codes(int rows, int columns, bool e5m2, float scale)
      : rows(rows), columns(columns), e5m2(e5m2), own(rows * columns + BEHIND, 0xa5), turned(own), scale(scale) {}
  params::Fp8Codes params(int copies = 3) {
    return {copies & 1 ? own.data() : nullptr, copies & 2 ? turned.data() : nullptr, &scale, &used, &largest, &saturated, rows, columns, e5m2, 0};
  }
  float at(int row, int column) const {
    int code = own[row * columns + column];
    return float(host::fp8_value(code & 0x7f, e5m2)) * (code & 0x80 ? -scale : scale);
  }
};

int failures = 0;
void expect(bool holds, const char* what, int rows, int columns, bool e5m2) {
  if (holds) return;
  ++failures;
  fprintf(stderr, "%s: %d x %d %s\n", what, rows, columns, e5m2 ? "E5M2" : "E4M3");
}

template <class Body>
void tiles(int rows, int columns, Body body) {
  for (int x = 0; x < (rows + Fp8Tile::ROWS - 1) / Fp8Tile::ROWS; ++x)
    for (int y = 0; y < (columns + Fp8Tile::COLUMNS - 1) / Fp8Tile::COLUMNS; ++y) host::run({x, y, 0}, Fp8Tile::THREADS, body);
}

// Checks that the matrix and its transpose contain `value(row, column)` in FP8, and that nothing else was written.
template <class Value>
void check(const char* what, const Codes& codes, Value value, int copies = 3) {
  bool own = true, turned = true, behind = true;
  uint32_t largest = 0, saturated = 0;
  float top = codes.e5m2 ? 57344.0f : 448.0f;
  for (int row = 0; row < codes.rows; ++row)
    for (int column = 0; column < codes.columns; ++column) {
      float x = value(row, column);
      uint32_t code = fp8_code(x / codes.scale, codes.e5m2);
      own &= codes.own[row * codes.columns + column] == (copies & 1 ? code : 0xa5);
      turned &= codes.turned[column * codes.rows + row] == (copies & 2 ? code : 0xa5);
      largest = max(largest, same_bits<uint32_t>(fabsf(x)));
      saturated += fabsf(x / codes.scale) > top;
    }
  for (int i = 0; i < Codes::BEHIND; ++i) behind &= codes.own.rbegin()[i] == 0xa5 && codes.turned.rbegin()[i] == 0xa5;
  expect(own, what, codes.rows, codes.columns, codes.e5m2);
  expect(turned, "transposed", codes.rows, codes.columns, codes.e5m2);
  expect(behind, "behind the end", codes.rows, codes.columns, codes.e5m2);
  expect(codes.used == codes.scale, "scale", codes.rows, codes.columns, codes.e5m2);
  expect(codes.largest == largest && codes.saturated == saturated, "largest and saturated", codes.rows, codes.columns, codes.e5m2);
}

template <class T>
std::vector<T> draw(size_t len, float size) {
  std::vector<T> values(len);
  for (T& x : values) x = ptx::from_float<T>(size * random_value());
  return values;
}

template <class T>
void matrices(int rows, int columns, bool e5m2) {
  auto x = draw<T>(size_t(rows) * columns, 3.0f);
  Codes codes(rows, columns, e5m2, 1.0f);
  params::Fp8Quantize p{x.data(), codes.params(), columns, 0};
  host::grid.x = 2;
  for (int block = 0; block < 2; ++block) host::run(block, THREADS, [&] { largest<T>(p); });
  uint32_t most = 0;
  for (T value : x) most = max(most, same_bits<uint32_t>(fabsf(float(value))));
  expect(codes.largest == most, "largest", rows, columns, e5m2);
  params::Fp8Rescale scales{&codes.scale, &codes.largest, nullptr, nullptr, 1, e5m2, 0.0f, 0.0f};
  host::run(0, THREADS, [&] { rescale(scales); });
  float size = same_bits<float>(most), top = e5m2 ? 57344.0f : 448.0f;
  expect(size / codes.scale <= top && size / codes.scale * 2.0f > top, "scale", rows, columns, e5m2);
  for (int copies : {1, 2, 3}) {
    // The scale is computed from the largest value, so nothing saturates. With an eighth of the scale many values do.
    for (float part : {1.0f, 0.125f}) {
      Codes made(rows, columns, e5m2, codes.scale * part);
      params::Fp8Quantize q{x.data(), made.params(copies), columns, 0};
      tiles(rows, columns, [&] { quantize_matrix<T>(q); });
      check("codes", made, [&](int row, int column) { return float(x[row * columns + column]); }, copies);
    }
  }
  Codes rows_only(rows, columns, e5m2, codes.scale), turned = rows_only;
  params::Fp8Quantize q{x.data(), rows_only.params(1), columns, 0};
  tiles(rows, columns, [&] { quantize_matrix<T>(q); });
  params::Fp8Quantize t{rows_only.own.data(), turned.params(2), columns, 0};
  tiles(rows, columns, [&] { transpose_codes(t); });
  turned.largest = rows_only.largest;
  check("transpose", turned, [&](int row, int column) { return float(x[row * columns + column]); }, 2);
}

// Sets `holds` to false if a kernel's value differs from `expected` by more than rounding to FP8 can cause.
void near(const char* what, const Codes& codes, int row, int column, double expected, bool& holds) {
  double spacing = codes.e5m2 ? 0.25 : 0.125, least = codes.scale * host::fp8_value(1, codes.e5m2);
  holds &= fabs(codes.at(row, column) - expected) <= fmax(spacing * fabs(expected) * 0.51, least * 0.51);
}

// Tests rms_norm and its gradient with FP8 outputs and a residual stream.
template <class T, int WARPS>
void normed(int rows, int width) {
  using Strip = quant::Fp8Strip<WARPS>;
  auto x = draw<T>(size_t(rows) * width, 2.0f), residual = draw<T>(x.size(), 1.0f), dy = draw<T>(x.size(), 1.0f), sum = draw<T>(x.size(), 1.0f), dx = sum;
  auto weight = draw<float>(width, 1.0f);
  constexpr int BLOCKS = 2;
  std::vector<float> partials(BLOCKS * width, -1.0f);
  Codes y(rows, width, false, 1.0f / 16), gradient(rows, width, true, 1.0f / 4096);
  params::RmsNorm of{x.data(), weight.data(), dy.data(), residual.data(), sum.data(), dx.data(), partials.data(), rows, width, 0, elements::F32, 1e-6f, 0};
  params::Fp8RmsNorm forward{of, y.params()}, backward{of, gradient.params()};
  backward.of.x = sum.data();
  host::grid.x = BLOCKS;
  for (int block = 0; block < BLOCKS; ++block) host::run(block, Strip::THREADS, [&] { of_norm::forward_fp8<T, WARPS>(forward); });
  for (int block = 0; block < BLOCKS; ++block) host::run(block, Strip::THREADS, [&] { of_norm::backward_fp8<T, WARPS>(backward); });
  bool sums = true, of_y = true, of_dx = true, turned = true, rounded = true;
  std::vector<double> dw(width, 0.0);
  for (int row = 0; row < rows; ++row) {
    auto at = [&](const std::vector<T>& of, int c) { return double(float(of[size_t(row) * width + c])); };
    double squares = 0, dot = 0;
    for (int c = 0; c < width; ++c) {
      sums &= at(sum, c) == double(float(ptx::from_float<T>(float(at(x, c) + at(residual, c)))));
      squares += at(sum, c) * at(sum, c), dot += at(dy, c) * weight[c] * at(sum, c);
    }
    double r = 1 / sqrt(squares / width + 1e-6);
    for (int c = 0; c < width; ++c) {
      double d = at(residual, c) + r * (at(dy, c) * weight[c] - at(sum, c) * dot * r * r / width);
      near("norm", y, row, c, at(sum, c) * r * weight[c], of_y);
      near("gradient of a norm", gradient, row, c, d, of_dx);
      rounded &= fabs(at(dx, c) - d) <= fmax(fabs(d), 1e-3) * (sizeof(T) == 2 ? 0.0041 : 1e-5);
      turned &= y.turned[c * rows + row] == y.own[row * width + c] && gradient.turned[c * rows + row] == gradient.own[row * width + c];
      dw[c] += at(dy, c) * at(sum, c) * r;
    }
  }
  bool of_weight = true, behind = true;
  for (int c = 0; c < width; ++c) of_weight &= fabs(double(partials[c]) + partials[width + c] - dw[c]) < 1e-4 * sqrt(rows);
  for (const Codes* codes : {&y, &gradient})
    for (int i = 0; i < Codes::BEHIND; ++i) behind &= codes->own.rbegin()[i] == 0xa5 && codes->turned.rbegin()[i] == 0xa5;
  expect(sums && of_y, "norm", rows, width, false);
  expect(of_dx && rounded && of_weight, "gradient of a norm", rows, width, true);
  expect(turned && behind && y.used == y.scale && y.largest > 0 && gradient.largest > 0, "norm, transposed", rows, width, false);
}

template <class T>
void gated(int rows, int columns, bool e5m2) {
  // Gate and up are halves of one tensor, as a joint projection writes them.
  auto both = draw<T>(size_t(rows) * 2 * columns, 2.0f), dy = draw<T>(size_t(rows) * columns, 1.0f);
  params::SwiGlu of{both.data(), both.data() + columns, dy.data(), nullptr, nullptr, nullptr, int64_t(rows) * columns, columns, 2 * columns, 2 * columns, 0};
  Codes y(rows, columns, false, 1.0f / 16), gradients(rows, 2 * columns, e5m2, 1.0f / 16), again(rows, columns, false, 1.0f / 16);
  params::Fp8SwiGlu forward{of, y.params(), {}}, backward{of, gradients.params(), again.params(2)}, alone{of, gradients.params(), {}};
  tiles(rows, columns, [&] { of_swiglu::forward_fp8<T>(forward); });
  tiles(rows, columns, [&] { of_swiglu::backward_fp8<T>(backward); });
  bool holds = true, same = true;
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      double g = float(both[row * 2 * columns + column]), u = float(both[row * 2 * columns + columns + column]);
      double s = 1 / (1 + exp(-g)), d = float(dy[row * columns + column]);
      near("y", y, row, column, g * s * u, holds);
      near("dgate", gradients, row, column, d * u * s * (1 + g * (1 - s)), holds);
      near("dup", gradients, row, columns + column, d * g * s, holds);
      same &= again.turned[column * rows + row] == y.own[row * columns + column] && y.turned[column * rows + row] == y.own[row * columns + column];
      for (int half : {0, columns})
        same &= gradients.turned[(half + column) * rows + row] == gradients.own[row * 2 * columns + half + column];
    }
  expect(holds, "swiglu", rows, columns, e5m2);
  expect(same && again.own[0] == 0xa5, "swiglu again and transposed", rows, columns, e5m2);
  expect(again.largest == y.largest && again.saturated == y.saturated, "swiglu largest", rows, columns, e5m2);
  auto before = gradients.own;
  uint32_t largest = gradients.largest;
  gradients.largest = 0;
  tiles(rows, columns, [&] { of_swiglu::backward_fp8<T>(alone); });
  expect(gradients.own == before && gradients.largest == largest, "swiglu without y", rows, columns, e5m2);
}

// Tests the gradient of QK-norm and rope, which is written to the columns after the first BEFORE columns.
template <class T, int D>
void rotated(int batch, int sequence, int heads) {
  constexpr int BEFORE = 32, HALF = D / 2;
  int rows = batch * sequence, columns = BEFORE + heads * D;
  auto x = draw<T>(size_t(rows) * heads * D, 1.0f), dy = draw<T>(size_t(rows) * heads * D, 1.0f);
  auto weight = draw<float>(D, 1.0f), angles = draw<float>(sequence * HALF, 1.0f);
  std::vector<float> cosines, sines;
  for (float angle : angles) cosines.push_back(cos(angle)), sines.push_back(sin(angle));
  Codes codes(rows, columns, false, 1.0f / 16);
  constexpr int BLOCKS = 3;
  std::vector<float> partials(BLOCKS * D, -1.0f);
  auto place = [&](auto& of) { return params::Heads{of.data(), int64_t(sequence) * heads * D, heads * D, D}; };
  params::Rope of{place(x), place(dy), {}, cosines.data(), sines.data(), weight.data(), partials.data(), rows, sequence, heads, HALF, 0, 0, elements::F32, 1e-6f, 0.0f, 0};
  params::Fp8Rope p{of, codes.params(), BEFORE, 0};
  host::grid.x = BLOCKS;
  auto plain = draw<T>(size_t(rows) * BEFORE, 1.0f);
  params::Fp8Quantize beside{plain.data(), codes.params(), BEFORE, 0};
  tiles(rows, BEFORE, [&] { quantize_matrix<T>(beside); });
  for (int block = 0; block < BLOCKS; ++block) host::run(block, Fp8Tile::THREADS, [&] { of_rope::norm_backward_fp8<T, D>(p); });
  bool holds = true, turned = true, beside_holds = true;
  std::vector<double> dw(D, 0.0);
  for (int row = 0; row < rows; ++row)
    for (int head = 0; head < heads; ++head) {
      const T *in = &x[(row * heads + head) * D], *out = &dy[(row * heads + head) * D];
      double dn[D], squares = 0, dot = 0;
      for (int c = 0; c < D; ++c) {
        double cosine = cosines[row % sequence * HALF + c % HALF], sine = sines[row % sequence * HALF + c % HALF];
        dn[c] = float(out[c]) * cosine + (c < HALF ? 1 : -1) * float(out[(c + HALF) % D]) * sine;
        squares += double(float(in[c])) * float(in[c]);
        dot += dn[c] * weight[c] * float(in[c]);
      }
      double r = 1 / sqrt(squares / D + 1e-6);
      for (int c = 0; c < D; ++c) {
        dw[c] += dn[c] * float(in[c]) * r;
        int column = BEFORE + head * D + c;
        near("rope", codes, row, column, r * (dn[c] * weight[c] - float(in[c]) * dot * r * r / D), holds);
        turned &= codes.turned[column * rows + row] == codes.own[row * columns + column];
      }
      for (int c = 0; c < BEFORE; ++c) {
        near("beside", codes, row, c, float(plain[row * BEFORE + c]), beside_holds);
        turned &= codes.turned[c * rows + row] == codes.own[row * columns + c];
      }
    }
  bool sums = true;
  for (int c = 0; c < D; ++c) {
    double got = 0;
    for (int block = 0; block < BLOCKS; ++block) got += partials[block * D + c];
    sums &= fabs(got - dw[c]) < 1e-4 * sqrt(rows * heads);
  }
  expect(holds, "rope", rows, columns, false);
  expect(turned && beside_holds, "rope, transposed", rows, columns, false);
  expect(sums, "the gradient of a norm's weight", rows, columns, false);
}

// Tests the gradient of a cross-entropy. The second row has no target.
template <class T>
void probabilities(int rows, int classes, bool e5m2) {
  auto logits = draw<T>(size_t(rows) * classes, 2.0f);
  std::vector<uint32_t> targets(rows);
  std::vector<float> lse(rows);
  for (int row = 0; row < rows; ++row) {
    double sum = 0;
    for (int c = 0; c < classes; ++c) sum += exp(double(float(logits[row * classes + c])));
    lse[row] = log(sum), targets[row] = row == 1 ? params::NO_PLACE : row * 5 % classes;
  }
  lse[1] = NAN;
  float factor = 3.0f, z_loss = 0.01f;
  Codes codes(rows, classes, e5m2, factor / (e5m2 ? 32768 : 256));
  params::CrossEntropy of{logits.data(), nullptr, targets.data(), nullptr, nullptr, nullptr, lse.data(), rows, classes, 0, z_loss};
  params::Fp8CrossEntropy p{of, codes.params(), factor, codes.scale};
  tiles(rows, classes, [&] { of_cross_entropy::quantize_gradient<T>(p); });
  bool holds = true, turned = true;
  for (int row = 0; row < rows; ++row)
    for (int c = 0; c < classes; ++c) {
      double share = (1 + 2 * z_loss * lse[row]) * exp(float(logits[row * classes + c]) - double(lse[row])) - (uint32_t(c) == targets[row]);
      near("probability", codes, row, c, row == 1 ? 0 : factor * share, holds);
      turned &= codes.turned[c * rows + row] == codes.own[row * classes + c];
    }
  expect(holds && codes.used == codes.scale, "cross-entropy", rows, classes, e5m2);
  expect(turned, "cross-entropy, transposed", rows, classes, e5m2);
}

void running_scales() {
  std::vector<float> scale(300), running(300, 1.0f), formats(300, 0.0f);
  std::vector<uint32_t> largest(300, 0);
  largest[1] = same_bits<uint32_t>(100.0f), largest[2] = 0x7f800000u, largest[3] = 0x7fc00000u, running[4] = 0.0f, formats[5] = 1.0f;
  params::Fp8Rescale p{scale.data(), largest.data(), running.data(), formats.data(), 300, 0, 0.95f, 4.0f};
  for (int block = 0; block < 2; ++block) host::run(block, THREADS, [&] { rescale(p); });
  // `p.margin` is 4, and E4M3's largest value is 448. The scale is the smallest power of two that is at least
  // 4 * running / 448: 1 / 64 for a running maximum of 0.95, and 1 for 100.
  bool holds = scale[0] == 1.0f / 64 && running[0] == 0.95f && scale[1] == 1.0f && running[1] == 100.0f && scale[299] == scale[0];
  // An infinite or NaN `largest` is ignored. A running maximum of 0 gives scale 1. scale[5] is for E5M2 (up to 57344).
  holds &= running[2] == 0.95f && running[3] == 0.95f && scale[4] == 1.0f && scale[5] == 1.0f / 8192;
  for (uint32_t x : largest) holds &= x == 0;
  expect(holds, "running scales", 300, 1, false);
}

}  // namespace

int main() {
  int shapes[][2] = {{16, 16}, {48, 80}, {144, 208}, {256, 64}, {272, 336}};
  for (auto& [rows, columns] : shapes) {
    for (bool e5m2 : {false, true}) {
      matrices<float>(rows, columns, e5m2);
      matrices<Bf16>(rows, columns, e5m2);
      gated<Bf16>(rows, columns, e5m2);
      gated<float>(rows, columns, e5m2);
    }
    normed<Bf16, 1>(rows, columns);
    normed<__half, 2>(rows, columns);
    probabilities<Bf16>(rows, columns, true);
    probabilities<float>(rows, columns, false);
  }
  normed<__half, 1>(80, 1024);
  normed<Bf16, 2>(48, 1536);
  normed<Bf16, 2>(32, 2048);
  rotated<Bf16, 64>(3, 48, 5);
  rotated<float, 64>(1, 16, 1);
  rotated<__half, 128>(2, 80, 3);
  running_scales();
  printf("FP8: %s\n", failures ? "wrong" : "quantized values, scales and the FP8 outputs of the ops match their definitions");
  return failures != 0;
}
