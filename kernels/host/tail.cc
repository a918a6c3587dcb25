// Runs the sources of the linear tail, and of its mixture with sparse attention, on a CPU, thread by thread. Compares
// outputs and gradients with a direct computation in doubles. A case's blocks of tokens form one or several chunks
// (past_linear.cu).
#include <initializer_list>

#include "../blend.cu"
#undef KERNEL
#include "../past_linear.cu"
#include "tensor.h"

using namespace sage;
using host::random_value;
using host::state;
using host::Tensor;

namespace {

constexpr int BLOCK = past_linear::BLOCK;

struct Case {
  int batch, tokens, query_heads, key_heads, head_dim, chunk_blocks;
  std::vector<int> starts;  // of packed documents, then the end of the last document
};

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
std::vector<double> softmax(std::vector<double> x) {
  double largest = -INFINITY, sum = 0;
  for (double value : x) largest = fmax(largest, value);
  for (double& value : x) sum += value = exp(value - largest);
  for (double& value : x) value /= sum;
  return x;
}
void add(std::vector<double>& sum, double factor, const std::vector<double>& x) {
  for (size_t i = 0; i < x.size(); ++i) sum[i] += factor * x[i];
}
// The gradient of a vector, given the gradient of its softmax.
std::vector<double> of_logits(const std::vector<double>& phi, const std::vector<double>& gradient) {
  double mean = dot(phi, gradient);
  std::vector<double> x(phi.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = phi[i] * (gradient[i] - mean);
  return x;
}

struct Error {
  double wrong = 0, right = 0;
  void add(const std::vector<double>& got, const std::vector<double>& expected, double most = 50) {
    for (size_t i = 0; i < got.size(); ++i) {
      wrong += (got[i] - expected[i]) * (got[i] - expected[i]), right += expected[i] * expected[i];
      if (!(fabs(got[i]) < most)) wrong = INFINITY;  // an initial value (about 100) was not overwritten
    }
  }
  double relative() const { return right > 0 ? sqrt(wrong / right) : sqrt(wrong); }
};

struct Errors {
  Error out, dsparse, dq, dk, dv, dtheta;
};

// Runs all thread blocks of a launch, over all segments and heads.
template <class F>
void launch(int blocks, int segments, int heads, int threads, size_t shared_bytes, F kernel) {
  for (int z = 0; z < heads; ++z)
    for (int y = 0; y < segments; ++y)
      for (int x = 0; x < blocks; ++x) host::run_with_shared(dim3{x, y, z}, threads, shared_bytes, kernel);
}

// The segments of a case: its batch entries or documents. `lists` has the selected key blocks of each query block:
// random earlier blocks, then the block on the diagonal.
struct Layout {
  std::vector<params::Segment> segments;
  bool packed;
  int longest = 0, tiles = 0, blocks = 0, stride;
  std::vector<uint32_t> lists;
  explicit Layout(const Case& c) : packed(!c.starts.empty()) {
    for (int i = 0; i < (packed ? int(c.starts.size()) - 1 : c.batch); ++i) {
      int start = packed ? c.starts[i] : 0, len = packed ? c.starts[i + 1] - start : c.tokens;
      segments.push_back({start, len, start, len, tiles, tiles, blocks, blocks});
      longest = max(longest, len), tiles += (len + 63) / 64, blocks += (len + BLOCK - 1) / BLOCK;
    }
    stride = blocks + 1, lists.resize(size_t(c.key_heads) * blocks * stride);
    for (int head = 0; head < c.key_heads; ++head)
      for (const params::Segment& s : segments)
        for (int block = 0; block * BLOCK < s.query_len; ++block) {
          uint32_t* list = &lists[row_of(head, s, block)];
          for (int other = 0; other <= block; ++other)
            if (other == block || random_value() > 0.5) list[++list[0]] = other;
        }
  }
  int count() const { return int(segments.size()); }
  int batch(int i) const { return packed ? 0 : i; }
  size_t row_of(int key_head, const params::Segment& s, int block) const {
    return (size_t(key_head) * blocks + s.query_block + block) * stride;
  }
};

// The tensors, buffers and parameters of a case. `mixed`: the tail is mixed with sparse attention.
template <class T, int D>
struct Problem {
  const Case& c;
  bool mixed, by_count;
  Tensor<T> q, k, v, sparse, dout, out, dsparse, dq, dk, dv;
  Layout layout;
  std::vector<float> theta, dtheta, parts, sums, chunk_sums, rows;
  std::vector<T> states, chunk_states;
  params::Linear p = {};

  Problem(const Case& c, bool mixed, bool by_count)
      : c(c), mixed(mixed), by_count(by_count), q(tensor(c.query_heads, 1)), k(tensor(c.key_heads, 1)), v(tensor(c.key_heads, 1)),
        sparse(tensor(c.query_heads, 1)), dout(tensor(c.query_heads, 1)), out(tensor(c.query_heads, 100)),
        dsparse(tensor(c.query_heads, 100)), dq(tensor(c.query_heads, 100)), dk(tensor(c.key_heads, 100)), dv(tensor(c.key_heads, 100)), layout(c), theta(c.query_heads),
        dtheta(c.query_heads), parts(size_t(c.query_heads) * layout.blocks, NAN), sums(size_t(c.key_heads) * layout.blocks * D, NAN),
        rows(size_t(2) * c.query_heads * layout.tiles * 64, NAN),
        states(size_t(c.key_heads) * layout.blocks * D * D, ptx::from_float<T>(NAN)) {
    for (float& x : theta) x = random_value();
    p.q = q.view, p.k = k.view, p.v = v.view, p.out = out.view, p.dout = dout.view, p.dq = dq.view, p.dk = dk.view, p.dv = dv.view;
    p.sparse = sparse.view;
    p.shape = {layout.packed ? layout.segments.data() : nullptr, layout.count(), layout.longest, layout.longest, c.query_heads, c.key_heads, c.head_dim, 1, 1.0f, layout.tiles, layout.tiles, 1, c.head_dim};
    p.blocks = layout.blocks, p.chunk_blocks = c.chunk_blocks, p.chunks = (longest_blocks() + c.chunk_blocks - 1) / c.chunk_blocks;
    chunk_sums.assign(size_t(c.key_heads) * layout.count() * p.chunks * (D + 1) * D, NAN);
    chunk_states.assign(chunk_sums.size(), ptx::from_float<T>(NAN)), p.chunk_states = chunk_states.data();
    p.states = states.data(), p.sums = sums.data(), p.chunk_sums = chunk_sums.data(), p.rows = rows.data();
    if (mixed) p.mixture = {theta.data(), parts.data(), {layout.lists.data(), nullptr, nullptr, layout.stride, layout.blocks, layout.blocks, 0}, by_count, 0};
  }
  Tensor<T> tensor(int heads, float size) const { return Tensor<T>(c.batch, c.tokens, heads, c.head_dim, size); }
  int longest_blocks() const { return (layout.longest + BLOCK - 1) / BLOCK; }

  void make_states() {
    using Kernel = past_linear::StateKernel<T, D>;
    int threads = Kernel::PLAN.threads, bytes = Kernel::PLAN.shared_bytes, segments = layout.count(), heads = c.key_heads;
    launch(p.chunks * Kernel::SPLIT, segments, heads, threads, bytes, [&] { past_linear::scan_blocks<T, D>(p); });
    if (p.chunks > 1)
      launch((Kernel::WIDTH + 255) / 256, segments * heads, 1, 256, 0, [&] { past_linear::scan_chunks<T, D>(p); });
  }

  template <class F>
  void multiply(params::Plan plan, int heads, F kernel) {
    launch(longest_blocks(), layout.count(), heads, plan.threads, plan.shared_bytes, kernel);
  }

  void forward() {
    make_states();
    multiply(params::plan("linear_forward", D, params::LISTED), c.query_heads, [&] { past_linear::forward<T, D>(p); });
  }

  void backward() {
    params::Blend b = {};
    b.sparse = sparse.view, b.dout = dout.view, b.out = dsparse.view, b.dtheta = dtheta.data(), b.mixture = p.mixture, b.shape = p.shape;
    if (mixed) launch(longest_blocks(), layout.count(), c.query_heads, THREADS, 0, [&] { blend_backward<T, false>(b); });
    multiply(params::plan("linear_backward_queries", D, params::LISTED), c.query_heads, [&] { past_linear::backward_queries<T, D>(p); });
    p.backward = 1;
    make_states();
    multiply(params::plan("linear_backward_keys", D, params::LISTED), c.key_heads, [&] { past_linear::backward_keys<T, D>(p); });
    if (mixed) launch(c.query_heads, 1, 1, 32, 0, [&] { blend_sum_theta(b); });
  }

  // The weight of the sparse output in the mixture of a query.
  double weight(int head, int key_head, const params::Segment& s, int query) const {
    int block = query / BLOCK, past = block * BLOCK, chosen = 0;
    const uint32_t* list = &layout.lists[layout.row_of(key_head, s, block)];
    for (uint32_t n = 1; n <= list[0]; ++n) chosen += int(list[n]) < block ? BLOCK : 0;
    double odds = by_count ? log(double(chosen + query + 1 - past) / double(past - chosen)) : 0;
    return !mixed ? 0 : past == chosen ? 1 : 1 / (1 + exp(-(double(theta[head]) + odds)));
  }

  // For each key: the features `phi`, the row of V, and their expected gradients (sums over queries).
  struct Keys {
    std::vector<std::vector<double>> phi, values, dphi, dv;
  };

  // Compares a query's results with the expected ones. Adds the query's terms to the expected gradients in
  // `keys` and `exact_dtheta`.
  void compare_query(int i, int head, int key_head, int query, Keys& keys, double& exact_dtheta, Errors& errors) const {
    const params::Segment& s = layout.segments[i];
    int batch = layout.batch(i), token = s.query_start + query, past = query / BLOCK * BLOCK;
    double a = weight(head, key_head, s, query);
    std::vector<double> phi = softmax(q.row(batch, token, head)), g = dout.row(batch, token, head), exact = sparse.row(batch, token, head);
    std::vector<double> tail(c.head_dim), dphi(c.head_dim);
    double n = 0;
    for (int j = 0; j < past; ++j) n += dot(phi, keys.phi[j]), add(tail, dot(phi, keys.phi[j]), keys.values[j]);
    for (double& x : tail) x = past > 0 ? x / n : 0;
    double t = dot(g, tail);
    for (int j = 0; j < past; ++j) {
      double share = (1 - a) * dot(phi, keys.phi[j]) / n, gain = (1 - a) * (dot(g, keys.values[j]) - t) / n;
      add(keys.dv[j], share, g), add(keys.dphi[j], gain, phi), add(dphi, gain, keys.phi[j]);
    }
    std::vector<double> expected = tail;
    for (double& x : expected) x *= 1 - a;
    if (mixed) add(expected, a, exact);
    errors.out.add(out.row(batch, token, head), expected);
    errors.dq.add(dq.row(batch, token, head), of_logits(phi, dphi));
    if (!mixed) return;
    exact_dtheta += a * (1 - a) * (dot(g, exact) - t);
    for (double& x : g) x *= a;
    errors.dsparse.add(dsparse.row(batch, token, head), g);
  }

  // Compares the results of a segment and key head with a direct computation in doubles.
  void compare(int i, int key_head, std::vector<double>& exact_dtheta, Errors& errors) const {
    const params::Segment& s = layout.segments[i];
    int batch = layout.batch(i), group = c.query_heads / c.key_heads;
    Keys keys;
    for (int j = 0; j < s.key_len; ++j) {
      keys.phi.push_back(softmax(k.row(batch, s.key_start + j, key_head)));
      keys.values.push_back(v.row(batch, s.key_start + j, key_head));
      keys.dphi.push_back(std::vector<double>(c.head_dim)), keys.dv.push_back(keys.dphi.back());
    }
    for (int head = key_head * group; head < (key_head + 1) * group; ++head)
      for (int query = 0; query < s.query_len; ++query) compare_query(i, head, key_head, query, keys, exact_dtheta[head], errors);
    for (int j = 0; j < s.key_len; ++j) {
      errors.dk.add(dk.row(batch, s.key_start + j, key_head), of_logits(keys.phi[j], keys.dphi[j]));
      errors.dv.add(dv.row(batch, s.key_start + j, key_head), keys.dv[j]);
    }
  }
};

template <class T, int D>
Errors run(const Case& c, bool mixed, bool by_count) {
  Problem<T, D> problem(c, mixed, by_count);
  problem.forward();
  problem.backward();
  Errors errors;
  std::vector<double> exact_dtheta(c.query_heads);
  for (int i = 0; i < problem.layout.count(); ++i)
    for (int key_head = 0; key_head < c.key_heads; ++key_head) problem.compare(i, key_head, exact_dtheta, errors);
  if (mixed) errors.dtheta.add(std::vector<double>(problem.dtheta.begin(), problem.dtheta.end()), exact_dtheta, INFINITY);
  return errors;
}

// Queries are large in channel 0 and keys in channel 1, so that their features do not overlap in f16. One query is
// NaN. Checks that this query's output and dQ are NaN and all other outputs and dQ are zero, and that dK and dV are
// zero for the keys that this query does not see.
bool features_that_never_meet() {
  Case c{1, 300, 1, 1, 64, 1, {}};
  Problem<__half, 64> problem(c, false, false);
  for (size_t i = 0; i < size_t(c.tokens) * 64; ++i) {
    problem.q.values[i] = __float2half_rn(i % 64 == 0 ? 40.0f : 0.0f);
    problem.k.values[i] = __float2half_rn(i % 64 == 1 ? 40.0f : 0.0f);
  }
  problem.q.values[200 * 64 + 7] = __float2half_rn(NAN);
  problem.forward(), problem.backward();
  bool good = true;
  for (int token = 0; token < c.tokens; ++token)
    for (int channel = 0; channel < 64; ++channel)
      for (const Tensor<__half>* x : {&problem.out, &problem.dq}) {
        float value = x->at(0, token, 0, channel);
        good &= token == 200 ? value != value : value == 0.0f;
      }
  for (int token = 128; token < c.tokens; ++token)  // keys that query 200 (the NaN query) does not see
    for (const Tensor<__half>* x : {&problem.dk, &problem.dv}) good &= x->at(0, token, 0, 0) == 0.0f;
  return good;
}

}  // namespace

int main() {
  host::memory = past_linear::shared;
  const Case cases[] = {
      {1, 1, 1, 1, 64, 4, {}},
      {2, 129, 2, 1, 64, 1, {}},
      {1, 390, 1, 1, 128, 2, {}},
      {1, 390, 2, 1, 40, 8, {}},
      {1, 520, 1, 1, 72, 1, {0, 1, 130, 130, 520}},
  };
  using B = __nv_bfloat16;
  struct Row {
    const char* name;
    Errors (*of_64)(const Case&, bool, bool);
    Errors (*of_128)(const Case&, bool, bool);
    bool mixed, by_count;
    double limit;
  };
  // A rounding has a relative L2 error of about 2^-9 (bf16) or 2^-12 (f16). A gradient includes five roundings, or
  // seven if a state is summed from chunks. The errors of seven independent roundings add up to about sqrt(7) times the
  // error of one. The limit is 5 times the error of one.
  const Row rows[] = {
      {"tail, bf16", run<B, 64>, run<B, 128>, false, false, 5 * ldexp(1, -9)},
      {"mixture by count, bf16", run<B, 64>, run<B, 128>, true, true, 5 * ldexp(1, -9)},
      {"mixture, f16", run<__half, 64>, run<__half, 128>, true, false, 5 * ldexp(1, -12)},
  };
  int failed = 0;
  printf("relative L2 error         tokens  head_dim  chunk    O         dsparse   dQ        dK        dV        dtheta\n");
  for (const Row& row : rows)
    for (const Case& c : cases) {
      state = 5;
      Errors e = (c.head_dim > 64 ? row.of_128 : row.of_64)(c, row.mixed, row.by_count);
      printf("%-24s %7d %9d %7d ", row.name, c.tokens, c.head_dim, c.chunk_blocks);
      bool good = true;
      for (const Error* error : {&e.out, &e.dsparse, &e.dq, &e.dk, &e.dv, &e.dtheta}) {
        printf("  %.6f", error->relative());
        good &= error->relative() <= row.limit;
      }
      printf("%s\n", good ? "" : "   WRONG");
      failed += !good;
    }
  if (!features_that_never_meet()) printf("features that do not overlap: not zero\n"), ++failed;
  return failed != 0;
}
