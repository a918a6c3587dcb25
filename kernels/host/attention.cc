// Runs the sources of the portable forward and backward, and of the forward for family 10 (sm_100), on a CPU, thread by
// thread, and compares the results with definitions in doubles. Operands are 16-bit values, SageBwd's INT8 values or,
// in the forward, NVFP4. NVFP4 matmuls are emulated by mma_nvfp4.cuh and host/sage/ptx/tcgen05.cuh.
#include "problem.h"

namespace {

// Runs all thread blocks of a case's kernels, and returns the errors. NVFP4 kernels have no backward.
template <class T, int D, Numerics NUMERICS>
Errors run(const Case& c) {
  Problem<T, D, NUMERICS> problem(c);
  if (!problem.forward()) return {INFINITY};
  if constexpr (!Problem<T, D, NUMERICS>::NVFP4) problem.backward();
  Errors errors;
  for (int i = 0; i < problem.segments.count(); ++i)
    for (int key_head = 0; key_head < c.key_heads; ++key_head) problem.compare(i, key_head, errors);
  return errors;
}

// Whether a forward with lists of key blocks has the same output as a forward with only the listed blocks of K and V.
template <class T, int D, Numerics NUMERICS>
bool lists_leave_out_blocks() {
  constexpr int KEYS = 600, BLOCK = attention::SELECTION_BLOCK, STRIDE = 5;
  constexpr uint32_t LISTS[2][STRIDE] = {{4, 0, 2, 3, 4}, {1, 4}};  // per query block: count, key blocks
  Case all = {1, 200, KEYS, 1, 1, D, false, false, {}, {}};
  Problem<T, D, NUMERICS> with(all);
  with.p.lists.seen = LISTS[0], with.p.lists.stride = STRIDE, with.p.lists.query_blocks = 2;
  if (!with.template forward<attention::ListedKeys>()) return false;
  for (int queries = 0; queries < 2; ++queries) {
    std::vector<T> k, v;
    for (uint32_t i = 1; i <= LISTS[queries][0]; ++i) {
      int first = LISTS[queries][i] * BLOCK, end = min(first + BLOCK, KEYS);
      k.insert(k.end(), &with.k.values[first * D], &with.k.values[end * D]);
      v.insert(v.end(), &with.v.values[first * D], &with.v.values[end * D]);
    }
    Case fewer = all;
    fewer.keys = int(k.size()) / D;
    Problem<T, D, NUMERICS> without(fewer);
    std::copy(k.begin(), k.end(), without.k.values.begin());
    std::copy(v.begin(), v.end(), without.v.values.begin());
    std::copy(with.q.values.begin(), with.q.values.end(), without.q.values.begin());
    if (!without.forward()) return false;
    int first = queries * BLOCK, count = min(all.queries - first, BLOCK);
    if (memcmp(&with.out.values[first * D], &without.out.values[first * D], count * D * sizeof(T))) return false;
  }
  return true;
}

// Whether a NaN in a key reaches exactly the queries that see the key.
template <class T, int D, Numerics NUMERICS>
bool nan_goes_where_the_key_is_seen() {
  constexpr int TOKENS = 200, KEY = 130;
  Case one = {1, TOKENS, TOKENS, 1, 1, D, true, false, {}, {}};
  Problem<T, D, NUMERICS> problem(one);
  problem.k.values[KEY * D + 5] = ptx::from_float<T>(NAN);
  problem.forward();
  bool right = true;
  for (int query = 0; query < TOKENS; ++query) right &= std::isnan(problem.out.at(0, query, 0, 7)) == (query >= KEY);
  return right;
}

// Whether quant::e2m1_pair rounds each number to the nearest E2M1 value, and rounds midpoints up. Tests nonnegative
// floats of many magnitudes, the midpoints, and the floats next to the midpoints.
template <class T>
bool pairs_round_to_the_nearest() {
  constexpr float VALUES[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  auto right = [&](float x) {
    float nearest = VALUES[0];
    for (float value : VALUES)
      if (fabs(double(value) - x) <= fabs(double(nearest) - x)) nearest = value;
    uint32_t pair = quant::e2m1_pair<T>(x, 1.0f), swapped = quant::e2m1_pair<T>(1.0f, x);
    return ptx::half_of<T>(pair, 0) == nearest && ptx::half_of<T>(swapped, 1) == nearest && ptx::half_of<T>(pair, 1) == 1.0f;
  };
  bool all = true;
  for (uint32_t bits = 0; bits < 0x4a800000u; bits += 499) all &= right(__uint_as_float(bits));
  for (int i = 0; i < 7; ++i)
    for (int beside = -1; beside <= 1; ++beside)
      all &= right(__uint_as_float(__float_as_uint((VALUES[i] + VALUES[i + 1]) / 2) + beside));
  return all;
}

// Whether mma_nvfp4.cuh's emulated matmul of random FP4 values and scales uses the fragment layouts of the PTX ISA.
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
      // The emulation does eight additions in f32.
      if (!(fabs(d[lane][n] - sum) <= 8 * ldexp(size, -24))) return false;
    }
  return true;
}

// Whether the soft cap's tanh has a relative error below 2^-15, and does not depend on the array's other elements.
// With the 9 in `beside`, take_tanh runs the branch for large arguments.
bool tangent_is_within_its_bound() {
  bool right = true;
  for (float x = 1e-6f; x < 40.0f; x *= 1.001f) {
    float alone[2] = {x, -x}, beside[2] = {x, 9.0f};
    attention::take_tanh(alone, 4.0f), attention::take_tanh(beside, 4.0f);
    right &= fabs(alone[0] / tanh(double(x)) - 1) < ldexp(1, -15) && fabs(alone[1] / tanh(-double(x)) - 1) < ldexp(1, -15);
    right &= alone[0] == beside[0];
  }
  float ends[2] = {INFINITY, -INFINITY};
  attention::take_tanh(ends, 4.0f);
  return right && ends[0] == 1 && ends[1] == -1;
}

const Case CASES[] = {
    {1, 1, 1, 1, 1, 64, true, false, {}, {}},
    {2, 63, 65, 2, 1, 64, true, false, {}, {}},
    {1, 130, 200, 2, 2, 128, false, true, {}, {}},
    {1, 200, 150, 2, 1, 40, true, true, {}, {}},
    {1, 70, 64, 3, 1, 97, true, false, {}, {}},
    {1, 200, 190, 2, 1, 64, true, true, {0, 1, 70, 70, 200}, {0, 65, 130, 131, 190}},
    {1, 130, 650, 1, 1, 128, true, false, {}, {}},
    // In this order: a query block that sees no key; a document without keys; `Case::literal`; head_dim above 128;
    // head_dim above 128 with packed documents.
    {1, 300, 100, 1, 1, 64, true, false, {}, {}},
    {1, 200, 90, 2, 1, 64, false, false, {0, 130, 200}, {0, 0, 90}},
    {1, 130, 330, 1, 1, 64, false, false, {}, {}, true},
    {1, 130, 200, 2, 1, 256, true, false, {}, {}},
    {1, 200, 190, 1, 1, 150, true, false, {0, 1, 70, 70, 200}, {0, 65, 130, 131, 190}},
    // Windows: key tiles that only some queries of a query tile see; queries that see no key at all;
    // packed documents; a window that includes all later keys; head_dim above 128.
    {1, 330, 330, 2, 1, 64, true, false, {}, {}, false, 70, 0},
    {1, 300, 170, 1, 1, 128, true, false, {}, {}, false, 20, 0},
    {1, 200, 190, 2, 1, 64, false, true, {0, 1, 70, 70, 200}, {0, 65, 130, 131, 190}, false, 10, 30},
    {1, 130, 450, 1, 1, 97, false, false, {}, {}, true, 100, 500},
    {1, 260, 260, 1, 1, 256, true, false, {}, {}, false, 64, 0},
    // Soft caps, ALiBi, or both. The caps up to 2 are so small that both branches of `take_tanh` run; the cap 50 is
    // far above all logits.
    {1, 200, 200, 4, 2, 64, true, false, {}, {}, false, -1, -1, 1.5f, false},
    {1, 130, 200, 2, 1, 128, false, false, {}, {}, false, -1, -1, 50.0f, true},
    {1, 200, 190, 2, 1, 97, true, false, {0, 1, 70, 70, 200}, {0, 65, 130, 131, 190}, false, -1, -1, 0, true},
    {1, 330, 330, 2, 1, 64, true, false, {}, {}, false, 70, 0, 0.8f, true},
    {1, 130, 200, 2, 1, 256, true, false, {}, {}, false, -1, -1, 2.0f, true},
    // Sinks: a case with queries that see no key; a case with a window.
    {1, 200, 190, 2, 1, 64, true, false, {0, 1, 70, 70, 200}, {0, 65, 130, 131, 190}, false, -1, -1, 0, false, true},
    {1, 150, 200, 4, 2, 128, true, false, {}, {}, false, 70, 0, 0, false, true},
};

}  // namespace

int main() {
  int failed = !product_is_the_manuals();
  if (failed) printf("the emulated NVFP4 matmul differs from the PTX manual\n");
  using B = __nv_bfloat16;
  bool pairs = pairs_round_to_the_nearest<B>() && pairs_round_to_the_nearest<__half>();
  if (!pairs) printf("two values at once are not rounded to the nearest E2M1 values\n");
  failed += !pairs;
  bool tangent = tangent_is_within_its_bound();
  if (!tangent) printf("the tanh of a soft cap exceeds its error bound\n");
  failed += !tangent;
  bool lists = lists_leave_out_blocks<B, 64, UNQUANTIZED>() && lists_leave_out_blocks<B, 128, SAGEBWD_SCORES>() && lists_leave_out_blocks<B, 128, NVFP4_PRODUCTS>() &&
               lists_leave_out_blocks<B, 64, NVFP4_TCGEN05>() && lists_leave_out_blocks<B, 128, NVFP4_TCGEN05>();
  if (!lists) printf("a block of keys that is not listed changes the output\n");
  failed += !lists;
  bool nan = nan_goes_where_the_key_is_seen<B, 64, NVFP4_PRODUCTS>() && nan_goes_where_the_key_is_seen<B, 128, NVFP4_TCGEN05>();
  if (!nan) printf("a NaN in a key is lost, or reaches a query that does not see the key\n");
  failed += !nan;
  struct Row {
    const char* name;
    Errors (*of_64)(const Case&);
    Errors (*of_128)(const Case&);
    Errors (*of_256)(const Case&);  // null: no kernel for head_dim 256
    double out, grads;  // largest allowed errors
    bool has_score_mod = false;  // false: cases with a soft cap or ALiBi are skipped
    bool smooths = false;        // whether K is smoothed; cases with sinks are then skipped
  };
  // In unquantized attention P, dS and the results are rounded to 16 bit: in bf16 a relative L2 error of about 2^-9
  // each. For NVFP4, definition.h rounds to FP4 as the kernels do. So NVFP4's errors are only the rounding of O to 16
  // bit (about 2^-12 in f16), and a few probabilities that round to another FP4 value, because exponentials in f32 are
  // inexact. SageBwd's errors of O, dQ, dK and dV are .0144 to .0185 if Q and K have standard deviation 1.
  const Row rows[] = {
      {"unquantized, bf16", run<B, 64, UNQUANTIZED>, run<B, 128, UNQUANTIZED>, run<B, 256, UNQUANTIZED>, 4e-3, 6e-3, true},
      {"SageBwd, bf16", run<B, 64, SAGEBWD>, run<B, 128, SAGEBWD>, nullptr, 2.5e-2, 3.5e-2},
      {"SageBwd with Q, bf16", run<B, 64, SAGEBWD_QK>, run<B, 128, SAGEBWD_QK>, nullptr, 2.5e-2, 3.5e-2, false, true},
      {"SageBwd with V, bf16", run<B, 64, SAGEBWD_KV>, run<B, 128, SAGEBWD_KV>, nullptr, 2.5e-2, 3.5e-2, false, true},
      {"SageBwd with S, bf16", run<B, 64, SAGEBWD_S>, run<B, 128, SAGEBWD_S>, nullptr, 2.5e-2, 2.5e-2},
      {"SageBwd scores, bf16", run<B, 64, SAGEBWD_SCORES>, run<B, 128, SAGEBWD_SCORES>, nullptr, 1.7e-2, 2.5e-2, true},
      {"SageBwd forward, bf16", run<B, 64, SAGEBWD_FORWARD>, run<B, 128, SAGEBWD_FORWARD>, nullptr, 2.5e-2, 2.5e-2},
      {"NVFP4 products, bf16", run<B, 64, NVFP4_PRODUCTS>, run<B, 128, NVFP4_PRODUCTS>, nullptr, 3e-3, 0},
      {"NVFP4 tcgen05, bf16", run<B, 64, NVFP4_TCGEN05>, run<B, 128, NVFP4_TCGEN05>, nullptr, 3e-3, 0},
      {"NVFP4 tcgen05, f16", run<__half, 64, NVFP4_TCGEN05>, run<__half, 128, NVFP4_TCGEN05>, nullptr, 1.5e-3, 0},
      {"NVFP4 products, f16", run<__half, 64, NVFP4_PRODUCTS>, run<__half, 128, NVFP4_PRODUCTS>, nullptr, 1.5e-3, 0},
  };
  printf("relative L2 error        queries  keys  head_dim   O         dQ        dK        dV\n");
  for (const Row& row : rows)
    for (const Case& c : CASES) {
      state = 7;
      auto run_case = c.head_dim > 128 ? row.of_256 : c.head_dim > 64 ? row.of_128 : row.of_64;
      if (!run_case || (c.is_modified() && !row.has_score_mod) || (c.sinks && row.smooths)) continue;
      Errors e = run_case(c);
      // With one key the exact dS is zero, and the computed dS is only rounding errors: dQ and dK are not compared.
      bool one = c.keys == 1, good = e.lse_good && e.means_good && e.out < row.out && (one || (e.dq <= row.grads && e.dk <= row.grads)) && e.dv <= row.grads;
      printf("%-24s %7d %5d %9d   %.5f", row.name, c.queries, c.keys, c.head_dim, e.out);
      for (double error : {one ? NAN : e.dq, one ? NAN : e.dk, e.dv})
        if (row.grads > 0 && error == error) printf("   %.5f", error);
        else printf("   -      ");
      printf("%s%s\n", c.is_modified() ? "   score_mod" : c.sinks ? "   sinks" : c.is_window() ? "   window" : "", good ? "" : "   WRONG");
      failed += !good;
    }
  return failed != 0;
}
