// Tensors of random values, for the programs that run kernels on a CPU.
#pragma once

#include <sage/params/attention.cuh>
#include <sage/ptx/math.cuh>
#include <vector>

namespace host {

inline uint32_t state = 1;
// A sum of three uniform numbers in [-1, 1): roughly standard normal.
inline float random_value() {
  float sum = 0.0f;
  for (int i = 0; i < 3; ++i) {
    state = state * 1664525u + 1013904223u;
    sum += float(state >> 8) / 8388608.0f - 1.0f;
  }
  return sum;
}

// A contiguous (batch, token, head, channel) tensor of random values: standard deviation `size`, mean size / 5.
template <class T>
struct Tensor {
  std::vector<T> values;
  sage::params::View view;
  int tokens, heads, channels;
  Tensor(int batch, int tokens, int heads, int channels, float size)
      : values(size_t(batch) * tokens * heads * channels + 16), tokens(tokens), heads(heads), channels(channels) {
    for (T& x : values) x = sage::ptx::from_float<T>(size * random_value() + 0.2f * size);
    bool vector = channels % 8 == 0;
    // Rows of a multiple of 8 channels are 16-byte aligned, because the memory of a std::vector is.
    view = {values.data(), int64_t(tokens) * heads * channels, int64_t(heads) * channels, channels, 1, vector, 0};
  }
  float at(int batch, int token, int head, int channel) const {
    return float(values[((size_t(batch) * tokens + token) * heads + head) * channels + channel]);
  }
  // The channels of a token of a head.
  std::vector<double> row(int batch, int token, int head) const {
    std::vector<double> row(channels);
    for (int c = 0; c < channels; ++c) row[c] = at(batch, token, head, c);
    return row;
  }
};

}  // namespace host
