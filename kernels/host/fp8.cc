// Runs the sources of quantization to FP8 on a CPU, thread by thread: codes row by row and transposed, largest and saturated
// values, scales, and what rms_norm and swiglu write in FP8, against definitions.
#include "../fp8.cu"
#undef KERNELS
#include "tensor.h"
namespace of_swiglu {
#include "../swiglu.cu"
}

using namespace sage;
using host::fp8_code;
using host::random_value;

namespace {

using Bf16 = __nv_bfloat16;

// The codes of a matrix, with values behind them that no kernel may change.
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

// The codes are those of `value(row, column)`, transposed too, and nothing else was written.
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
  params::Fp8Quantize p{x.data(), codes.params()};
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
    // With the scale of the largest value nothing saturates; with an eighth of it, much does.
    for (float part : {1.0f, 0.125f}) {
      Codes made(rows, columns, e5m2, codes.scale * part);
      params::Fp8Quantize q{x.data(), made.params(copies)};
      tiles(rows, columns, [&] { quantize_matrix<T>(q); });
      check("codes", made, [&](int row, int column) { return float(x[row * columns + column]); }, copies);
    }
  }
}

template <class T>
void normed(int rows, int columns) {
  auto x = draw<T>(size_t(rows) * columns, 2.0f);
  auto weight = draw<float>(columns, 1.0f), inverse = draw<float>(rows, 1.0f);
  Codes codes(rows, columns, false, 1.0f / 16);
  params::Fp8Normed p{x.data(), weight.data(), inverse.data(), elements::F32, 0, codes.params()};
  tiles(rows, columns, [&] { quantize_normed<T>(p); });
  check("normed", codes, [&](int row, int column) { return float(x[row * columns + column]) * inverse[row] * weight[column]; });
}

// Values of the kernels are within a code of the definition's, and zeros within half the smallest value.
void near(const char* what, const Codes& codes, int row, int column, double expected, bool& holds) {
  double spacing = codes.e5m2 ? 0.25 : 0.125, least = codes.scale * host::fp8_value(1, codes.e5m2);
  holds &= fabs(codes.at(row, column) - expected) <= fmax(spacing * fabs(expected) * 0.51, least * 0.51);
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

void running_scales() {
  std::vector<float> scale(300), running(300, 1.0f), formats(300, 0.0f);
  std::vector<uint32_t> largest(300, 0);
  largest[1] = same_bits<uint32_t>(100.0f), largest[2] = 0x7f800000u, largest[3] = 0x7fc00000u, running[4] = 0.0f, formats[5] = 1.0f;
  params::Fp8Rescale p{scale.data(), largest.data(), running.data(), formats.data(), 300, 0, 0.95f, 4.0f};
  for (int block = 0; block < 2; ++block) host::run(block, THREADS, [&] { rescale(p); });
  // 4 x .95 = 3.8 fits below 448 / 64 = 7, and 4 x 100 below 448.
  bool holds = scale[0] == 1.0f / 64 && running[0] == 0.95f && scale[1] == 1.0f && running[1] == 100.0f && scale[299] == scale[0];
  // What is not finite is passed over, zero has no scale, and E5M2 has more room.
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
    normed<Bf16>(rows, columns);
    normed<__half>(rows, columns);
  }
  running_scales();
  printf("FP8: %s\n", failures ? "wrong" : "codes, scales, norms and gated units are those of their definitions");
  return failures != 0;
}
