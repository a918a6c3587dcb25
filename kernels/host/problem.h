// A test case for the attention kernels: its tensors, buffers and parameters; functions that launch the kernels for
// sm_80 and the forward for sm_100; and functions that compare the results with those of definition.h.
#pragma once

#include <sage/attention/numerics/dense16_backward_sm80.cuh>
#include <sage/attention/numerics/dense16_forward_sm80.cuh>
#include <sage/attention/numerics/nvfp4_forward_sm100.cuh>
#include <sage/attention/numerics/nvfp4_forward_sm80.cuh>
#include <sage/attention/numerics/sagebwd_backward_sm80.cuh>
#include <sage/attention/numerics/sagebwd_forward_sm80.cuh>
#include <sage/quant/pack_nvfp4.cuh>

#include "../quantize.cu"
#include "definition.h"
#include "tensor.h"

using namespace sage;
using host::Definition;
using host::Error;
using host::Errors;
using host::random_value;
using host::state;
using host::Tensor;

struct Case {
  int batch, queries, keys, query_heads, key_heads, head_dim;
  bool causal, smooth;
  std::vector<int> query_starts, key_starts;  // of packed documents, then the end of the last document
  bool literal = false;                       // NVFP4: P = 2^(logit - m) with the row's largest logit m, not ceil(m)
  int before = -1, after = -1;                // window: keys that a query sees before and after its own position; -1: no window
  float softcap = 0;                          // 0: none
  bool alibi = false;                         // the slopes 1/2, 1/4, .. of the query heads
  bool sinks = false;                         // one per query head: 1, 0, -1, ..
  bool is_window() const { return before >= 0; }
  bool is_modified() const { return softcap > 0 || alibi; }
};

// SAGEBWD_SCORES computes only S in INT8, in forward and backward. SAGEBWD_S has a complete INT8 forward, and computes
// only S in INT8 in the backward. SAGEBWD_FORWARD has an unquantized backward.
enum Numerics { UNQUANTIZED, SAGEBWD, SAGEBWD_QK, SAGEBWD_KV, SAGEBWD_S, SAGEBWD_SCORES, SAGEBWD_FORWARD, NVFP4_PRODUCTS, NVFP4_TCGEN05 };

constexpr int tiles_of(int tokens) { return (tokens + 63) / 64; }

// The segments of a case: the entries of its batch, or its documents.
struct Segments {
  bool packed;
  std::vector<params::Segment> all;
  int longest_queries = 0, longest_keys = 0, query_tiles = 0, key_tiles = 0;  // longest_*: in tokens; tiles: in total
  int query_blocks = 0, key_blocks = 0;                                       // selection blocks in total
  explicit Segments(const Case& c) : packed(!c.query_starts.empty()) {
    for (int i = 0; i < (packed ? int(c.query_starts.size()) - 1 : c.batch); ++i) {
      params::Segment s = {0, c.queries, 0, c.keys, query_tiles, key_tiles, query_blocks, key_blocks};
      if (packed) {
        s.query_start = c.query_starts[i], s.query_len = c.query_starts[i + 1] - s.query_start;
        s.key_start = c.key_starts[i], s.key_len = c.key_starts[i + 1] - s.key_start;
      }
      longest_queries = max(longest_queries, s.query_len), longest_keys = max(longest_keys, s.key_len);
      query_tiles += tiles_of(s.query_len), key_tiles += tiles_of(s.key_len);
      query_blocks += attention::selection_blocks(s.query_len), key_blocks += attention::selection_blocks(s.key_len);
      all.push_back(s);
    }
  }
  int count() const { return int(all.size()); }
  int batch(int i) const { return packed ? 0 : i; }
};

// The kernels' parameters, field by field. A new field breaks the compilation here, as a reminder: if it is an output,
// `Problem::compare` must compare it, or a comment here must say why it does not.
inline void fields(const params::Codes& p) {
  // `Problem::compare` compares k_mean. Errors in the other fields change k_mean or the attention kernels' results.
  [[maybe_unused]] const auto& [q, k, v_transposed, q_dequant_scale, k_dequant_scale, v_dequant_scale, q_mean, k_mean, k_tile_sums] = p;
}
inline void fields(const params::Forward& p) {
  // `Problem::compare` compares out and minus_lse2. The kernels that write scheduler_counter, high_precision_out or
  // row_sums are not run here.
  [[maybe_unused]] const auto& [q, k, v, out, minus_lse2, scheduler_counter, codes, shape, high_precision_out, row_sums, sinks, p_lift, p_literal,
                                lists, score_mod, key_sample, smooth_values, q_map, k_map, v_map] = p;
}
inline void fields(const params::Backward& p) {
  // dk, dv and dq_accum are compared. This also tests minus_delta, and the INT8 values and scales of Q and dO. dq is
  // not compared: the kernel that writes it does not run here. dq_semaphore is null here: these tests do not run
  // deterministic mode.
  [[maybe_unused]] const auto& [q, k, v, out, dout, dq, dk, dv, minus_lse2, minus_delta, dq_accum, q_transposed, dout_transposed, dout_dequant_scale,
                                dq_semaphore, codes, shape, group, dout_group, dq_parts, row_sums, lists, score_mod, cuts, q_map, dout_map] = p;
}

template <class T, int D, Numerics NUMERICS>
struct Problem {
  static constexpr bool NVFP4 = NUMERICS == NVFP4_PRODUCTS || NUMERICS == NVFP4_TCGEN05;
  // Whether dV, dQ and dK are INT8 matmuls.
  static constexpr bool CODES = NUMERICS == SAGEBWD || NUMERICS == SAGEBWD_QK || NUMERICS == SAGEBWD_KV;
  const Case& c;
  Segments segments;
  int query_tiles, key_tiles;  // over all heads
  Tensor<T> q, k, v, out, dout, dk, dv;
  std::vector<float> means;  // of K: (key head, segment, D)
  std::vector<float> minus_lse2, minus_delta, dq_accum;
  std::vector<int8_t> q_codes, k_codes, v_codes, q_transposed, dout_transposed;
  std::vector<float> q_dequant_scale, k_dequant_scale, v_dequant_scale, dout_dequant_scale, q_mean, k_mean, k_tile_sums;
  std::vector<float> slopes, sinks;
  params::Forward p = {};

  explicit Problem(const Case& c)
      : c(c), segments(c), query_tiles(segments.query_tiles * c.query_heads), key_tiles(segments.key_tiles * c.key_heads),
        q(c.batch, c.queries, c.query_heads, c.head_dim, 1.0f), k(c.batch, c.keys, c.key_heads, c.head_dim, 1.0f),
        v(c.batch, c.keys, c.key_heads, c.head_dim, 2.0f), out(c.batch, c.queries, c.query_heads, c.head_dim, 100.0f),
        dout(c.batch, c.queries, c.query_heads, c.head_dim, 1.0f), dk(c.batch, c.keys, c.key_heads, c.head_dim, 100.0f),
        dv(c.batch, c.keys, c.key_heads, c.head_dim, 100.0f), means(size_t(c.key_heads) * segments.count() * D),
        minus_lse2(size_t(query_tiles) * 64), minus_delta(minus_lse2.size()), dq_accum(size_t(query_tiles) * 64 * D),
        q_transposed(dq_accum.size()), dout_transposed(dq_accum.size()), q_dequant_scale(query_tiles), k_dequant_scale(key_tiles),
        v_dequant_scale(key_tiles), dout_dequant_scale(query_tiles * D), q_mean(query_tiles * D), k_mean(2 * means.size()),
        k_tile_sums(2 * key_tiles * D) {
    p.q = q.view, p.k = k.view, p.v = v.view, p.out = out.view;
    p.minus_lse2 = minus_lse2.data();
    p.shape = {segments.packed ? segments.all.data() : nullptr, segments.count(), segments.longest_queries, segments.longest_keys,
               c.query_heads, c.key_heads, c.head_dim, c.is_window() ? c.after + 1 : c.causal, 1.0f / sqrtf(float(c.head_dim)), segments.query_tiles,
               segments.key_tiles, 2, c.head_dim};
    p.lists.keys_before = keys_before();
    p.p_literal = c.literal;
    for (int head = 0; head < c.query_heads; ++head) slopes.push_back(ldexpf(1, -1 - head)), sinks.push_back(1.0f - head);
    p.sinks = c.sinks ? sinks.data() : nullptr;
    p.score_mod = {c.alibi ? slopes.data() : nullptr, c.softcap, c.query_heads};
    if (c.smooth) compute_means();
  }

  int keys_before() const { return c.is_window() ? c.before : max(segments.longest_queries, segments.longest_keys); }
  int keys_after() const { return c.is_window() ? c.after : c.causal ? 0 : max(segments.longest_queries, segments.longest_keys); }

  void compute_means() {
    for (int head = 0; head < c.key_heads; ++head)
      for (int i = 0; i < segments.count(); ++i)
        for (int channel = 0; channel < c.head_dim; ++channel) {
          const params::Segment& s = segments.all[i];
          float sum = 0;
          for (int j = 0; j < s.key_len; ++j) sum += k.at(segments.batch(i), s.key_start + j, head, channel);
          means[(size_t(head) * segments.count() + i) * D + channel] = sum / float(max(s.key_len, 1));
        }
  }

  template <class Kernel, class Block>
  void launch_forward() {
    for (int i = 0; i < segments.count() * c.query_heads * ((segments.longest_queries + 127) / 128); ++i)
      host::run_with_shared(i, Kernel::THREADS, Kernel::SHARED_BYTES, [&] {
        if constexpr (NUMERICS == NVFP4_TCGEN05) attention::forward_sm100<Kernel, Block>(p);
        else attention::forward_sm80<Kernel, Block>(p);
      });
  }

  // Returns whether a kernel's output is independent of when its asynchronous operations run.
  template <class Kernel, class Block>
  bool launch_forward_in_many_orders() {
    launch_forward<Kernel, Block>();
    std::vector<T> first = out.values;
    bool same = true;
    host::late = true;
    for (int order = 0; order < 6; ++order) {
      host::skewed = order >= 3;
      launch_forward<Kernel, Block>();
      same &= memcmp(first.data(), out.values.data(), first.size() * sizeof(T)) == 0;
    }
    host::late = host::skewed = false;
    return same;
  }

  // Packs Q, K and V as NVFP4. Returns whether the kernels left the extra tile at the end of each buffer unchanged.
  bool pack() {
    constexpr int BYTES = layout::Nvfp4Tile<D>::BYTES;
    q_codes.assign(size_t(query_tiles + 1) * BYTES, 0x55);
    v_codes = k_codes = std::vector<int8_t>(size_t(key_tiles + 1) * BYTES, 0x55);
    p.codes.q = q_codes.data(), p.codes.k = k_codes.data(), p.codes.v_transposed = v_codes.data();
    p.codes.k_mean = c.smooth ? means.data() : nullptr;
    for (int i = 0; i < query_tiles + 2 * key_tiles; ++i)
      host::run(i, quant::PACK_THREADS, [&] { quant::pack_nvfp4<T, D>(p); });
    for (const std::vector<int8_t>* codes : {&q_codes, &k_codes, &v_codes})
      for (size_t i = codes->size() - BYTES; i < codes->size(); ++i)
        if ((*codes)[i] != 0x55) return false;
    return true;
  }

  // Quantizes Q, K and V to INT8. K is smoothed if Q or V is, or if the case asks for it.
  void quantize_to_codes() {
    q_codes.resize(query_tiles * 64 * D), k_codes.resize(key_tiles * 64 * D), v_codes.resize(key_tiles * 64 * D);
    p.codes = {q_codes.data(), k_codes.data(), v_codes.data(), q_dequant_scale.data(), k_dequant_scale.data(), v_dequant_scale.data(), nullptr, nullptr, nullptr};
    if (NUMERICS == SAGEBWD_QK) p.codes.q_mean = q_mean.data();
    p.smooth_values = NUMERICS == SAGEBWD_KV;
    if (NUMERICS == SAGEBWD_QK || NUMERICS == SAGEBWD_KV || c.smooth) {
      int smoothed = 1 + p.smooth_values;
      p.codes.k_mean = k_mean.data(), p.codes.k_tile_sums = k_tile_sums.data();
      for (int i = 0; i < smoothed * key_tiles; ++i) host::run(i, quant::TILE_THREADS, [&] { sum_tiles<T, D>(p); });
      for (int i = 0; i < segments.count(); ++i)
        for (int head = 0; head < smoothed * c.key_heads; ++head) host::run(i, MEAN_THREADS, [&] { mean_of_tiles<D>(p); }, head);
    }
    for (int i = 0; i < query_tiles + 2 * key_tiles; ++i) host::run(i, quant::TILE_THREADS, [&] { quantize<T, D>(p); });
  }

  // Returns false if NVFP4 kernels write out of bounds, or if their output depends on when asynchronous operations run.
  bool forward() {
    if (c.is_modified()) return forward<attention::WindowKeys, attention::SoftcapAndAlibi>();
    return c.is_window() ? forward<attention::WindowKeys>() : forward<attention::EveryKey>();
  }
  template <class Block, class Mod = attention::NoScoreMod>
  bool forward() {
    if constexpr (NVFP4) {
      if (!pack()) return false;
      if constexpr (NUMERICS == NVFP4_TCGEN05)
        return launch_forward_in_many_orders<
            attention::Nvfp4ForwardSm100<T, D, params::plan("attn_fwd_nvfp4", D, params::EVERY, params::SM100)>, Block>();
      else launch_forward<attention::Nvfp4ForwardSm80<T, D, params::plan("attn_fwd_nvfp4", D)>, Block>();
    } else if constexpr (NUMERICS == UNQUANTIZED) {
      launch_forward<attention::Dense16ForwardSm80<T, D, params::plan("attn_fwd_dense16", D), attention::PlainProbabilities, attention::Operands::ROWS, Mod>, Block>();
    } else if constexpr (NUMERICS == SAGEBWD_SCORES) {
      quantize_to_codes();
      constexpr params::Plan PLAN = params::plan("attn_fwd_sagebwd_scores", D);
      launch_forward<attention::Dense16ForwardSm80<T, D, PLAN, attention::PlainProbabilities, attention::Operands::CODES, Mod>, Block>();
    } else {
      quantize_to_codes();
      constexpr bool QK = NUMERICS == SAGEBWD_QK;
      launch_forward<attention::SageBwdForwardSm80<T, D, params::plan(QK ? "attn_fwd_sagebwd_qk" : "attn_fwd_sagebwd", D), QK>, Block>();
    }
    return true;
  }

  void backward() {
    if (c.is_modified()) backward<attention::WindowQueries, attention::SoftcapAndAlibi>();
    else c.is_window() ? backward<attention::WindowQueries>() : backward<attention::EveryQuery>();
  }
  // With a selection, `b` contains each key block's list of query blocks, and how these lists are split into parts.
  // `more_blocks`: an upper limit for the number of parts, not counting the first part of each list. Each part covers
  // the 128 keys of its key block.
  template <class Queries, class Mod = attention::NoScoreMod>
  void backward(params::Backward b = {}, int more_blocks = 0) {
    b.q = q.view, b.k = k.view, b.v = v.view, b.out = out.view, b.dout = dout.view, b.dk = dk.view, b.dv = dv.view;
    b.minus_lse2 = minus_lse2.data(), b.minus_delta = minus_delta.data(), b.dq_accum = dq_accum.data();
    b.q_transposed = q_transposed.data(), b.dout_transposed = dout_transposed.data(), b.dout_dequant_scale = dout_dequant_scale.data();
    b.codes = p.codes, b.shape = p.shape, b.lists.keys_before = p.lists.keys_before, b.score_mod = p.score_mod, b.group = b.dout_group = b.dq_parts = 1;
    for (int i = 0; i < query_tiles; ++i) host::run(i, quant::TILE_THREADS, [&] { prepare<T, D, CODES>(b); });
    constexpr bool S_OF_CODES = NUMERICS == SAGEBWD_S || NUMERICS == SAGEBWD_SCORES;
    // Up to head_dim 128 the plans of SM86 are tested, because they include thread blocks of 64 keys and of 128 keys.
    constexpr const char* KERNEL = NUMERICS == SAGEBWD_QK ? "attn_bwd_sagebwd_general"
                                   : CODES                  ? "attn_bwd_sagebwd"
                                   : S_OF_CODES             ? "attn_bwd_sagebwd_s"
                                                            : "attn_bwd_dense16";
    constexpr params::Plan PLAN = params::plan(KERNEL, D, params::EVERY, D > 128 ? params::SM80 : params::SM86);
    using Scores = std::conditional_t<S_OF_CODES, attention::ScoresOfCodes<T, D>, attention::ScoresOfRows<T, D>>;
    using Kernel = std::conditional_t<CODES, attention::SageBwdBackwardSm80<T, D, PLAN, NUMERICS == SAGEBWD_QK>,
                                      attention::Dense16BackwardSm80<T, D, PLAN, attention::PlainProbabilities, Scores, Mod>>;
    int blocks = segments.count() * c.key_heads * ((segments.longest_keys + PLAN.rows - 1) / PLAN.rows) + more_blocks * (128 / PLAN.rows);
    if constexpr (!CODES) blocks *= Kernel::CHANNEL_PARTS;
    for (int i = 0; i < blocks; ++i)
      host::run_with_shared(i, PLAN.threads, Kernel::SHARED_BYTES, [&] { attention::backward_sm80<Kernel, Queries>(b); });
  }

  double dq_at(int head, const params::Segment& s, int query, int channel) const {
    int64_t tile = int64_t(head) * segments.query_tiles + s.query_tile + query / 64;
    int row = query % 64, lane = row % 8 * 4 + channel % 8 / 2, n = channel / 8, strip = row / 16;
    return dq_accum[tile * 64 * D + attention::DqLayout<D>(1).number(strip, n) * 128 + lane * 4 + row % 16 / 8 * 2 + channel % 2] * p.shape.softmax_scale;
  }

  // Compares the kernels' means of K and V with means in doubles. A mean needs up to 75 additions in f32 (64 tokens of
  // a tile, then 11 tiles), so its error is at most 75 * 2^-24 times the mean |x|: 7e-6 for V, whose mean |x| is 1.6.
  bool means_are_right(int i, int key_head) const {
    const params::Segment& s = segments.all[i];
    bool right = true;
    for (int of_v = 0; of_v <= p.smooth_values; ++of_v)
      for (int channel = 0; channel < c.head_dim; ++channel) {
        double sum = 0;
        for (int j = 0; j < s.key_len; ++j) sum += (of_v ? v : k).at(segments.batch(i), s.key_start + j, key_head, channel);
        size_t at = size_t(of_v * c.key_heads + key_head) * segments.count() + i;
        right &= fabs(p.codes.k_mean[at * D + channel] - sum / max(s.key_len, 1)) < 1e-5;
      }
    return right;
  }

  // Compares the results of a segment and key head with the definition.
  void compare(int i, int key_head, Errors& errors) const {
    if (p.codes.k_mean && !NVFP4) errors.means_good &= means_are_right(i, key_head);
    const params::Segment& s = segments.all[i];
    int batch = segments.batch(i), group = c.query_heads / c.key_heads;
    double scale = p.shape.softmax_scale;
    const float* mean = c.smooth ? &means[(size_t(key_head) * segments.count() + i) * D] : nullptr;
    Definition definition(k, v, batch, s.key_start, s.key_len, key_head, NVFP4, mean);
    std::vector<double> dk_row(definition.k.size(), 0.0), dv_row(dk_row);
    for (int head = key_head * group; head < (key_head + 1) * group; ++head) {
      Error of_out, of_dq;
      for (int query = 0; query < s.query_len; ++query) {
        std::vector<double> row, grad;
        for (int channel = 0; channel < c.head_dim; ++channel) {
          row.push_back(q.at(batch, s.query_start + query, head, channel));
          grad.push_back(dout.at(batch, s.query_start + query, head, channel));
        }
        int position = query + s.key_len - s.query_len, first = max(position - keys_before(), 0);
        int visible = min(max(position + 1 + keys_after(), 0), s.key_len);
        host::ScoreMod mod{c.softcap, c.alibi ? slopes[head] : 0, c.sinks ? sinks[head] : -INFINITY, position};
        double lse2;
        std::vector<double> expected = definition.row(row, first, visible, scale, NVFP4, c.literal, lse2, mod);
        float got = -minus_lse2[(int64_t(head) * segments.query_tiles + s.query_tile) * 64 + query];
        // SageBwd's log-sum-exp is not compared, because it is of smoothed logits. Its errors show in the gradients.
        if (NVFP4 || NUMERICS == UNQUANTIZED) errors.lse_good &= visible == 0 ? got == INFINITY : fabs(got - lse2) < 1e-3;
        for (int channel = 0; channel < c.head_dim; ++channel)
          of_out.add(out.at(batch, s.query_start + query, head, channel), expected[channel]);
        if (NVFP4) continue;
        expected = host::row_gradients(definition, row, grad, first, visible, scale, mod, dk_row, dv_row);
        for (int channel = 0; channel < c.head_dim; ++channel) of_dq.add(dq_at(head, s, query, channel), expected[channel]);
      }
      of_out.into(errors.out);
      of_dq.into(errors.dq);
    }
    Error of_dk, of_dv;
    for (int key = 0; !NVFP4 && key < s.key_len; ++key)
      for (int channel = 0; channel < c.head_dim; ++channel) {
        of_dk.add(dk.at(batch, s.key_start + key, key_head, channel), dk_row[key * c.head_dim + channel]);
        of_dv.add(dv.at(batch, s.key_start + key, key_head, channel), dv_row[key * c.head_dim + channel]);
      }
    of_dk.into(errors.dk);
    of_dv.into(errors.dv);
  }
};
