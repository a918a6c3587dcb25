// Runs the kernel `users` and the portable backward on a CPU. For each key block, `users` lists the query blocks that
// select it. Checks that the backward visits each query block of a list once, however the list is split into parts, and
// that splitting changes gradients only by rounding. Compares the results of the kernel `block_mass` with a reference in
// doubles.
#include <map>
#include <tuple>

namespace {
__align__(1024) __shared__ unsigned char shared[227 << 10];  // of block_mass; other kernels use attention::shared
}
#include "../selection.cu"
#include "problem.h"

namespace {

using B = __nv_bfloat16;
constexpr int BLOCK = attention::SELECTION_BLOCK;

// The lists of a case. The candidates of a query block are the key blocks that all its queries see completely. The list
// of the query block contains key block 0 and random candidates; with `all`, every candidate. With a causal mask it
// also contains all key blocks on the diagonal.
struct Lists {
  int stride, query_blocks, key_blocks;
  std::vector<uint32_t> seen;

  Lists(const Case& c, const Segments& segments, bool all)
      : stride(attention::selection_blocks(segments.longest_keys) + 1), query_blocks(segments.query_blocks), key_blocks(segments.key_blocks),
        seen(size_t(c.key_heads) * query_blocks * stride) {
    uint32_t* row = seen.data();
    for (int head = 0; head < c.key_heads; ++head)
      for (const params::Segment& s : segments.all)
        for (int block = 0; block < attention::selection_blocks(s.query_len); ++block, row += stride) {
          auto visible = [&](int query) { return c.causal ? max(min(query + 1 + s.key_len - s.query_len, s.key_len), 0) : s.key_len; };
          int candidates = c.causal ? visible(block * BLOCK) / BLOCK : attention::selection_blocks(s.key_len);
          int end = attention::selection_blocks(visible(min((block + 1) * BLOCK, s.query_len) - 1));
          for (int key = 0; key < end; ++key)
            if (all || key == 0 || key >= candidates || random_value() > 0.5f) row[++row[0]] = key;
        }
  }
};

// The forward and backward of a case with a selection. For each key block, a list contains the query blocks that
// select it. A part of a split list has at most `users_of_part` query blocks (0: no list is split).
template <int D>
struct Backward {
  const Case& c;
  Lists lists;
  Problem<B, D, UNQUANTIZED> problem;
  std::vector<params::User> users;
  std::vector<uint32_t> first_users, counts, used = {0, 0, 0};
  std::vector<params::CutList> cuts;
  std::vector<params::Part> parts;  // followed by two guard entries that must not change
  int most_slots, most_parts = 0, most_users;
  std::vector<float> sums;
  std::vector<int> arrivals;
  params::InvertedLists u = {};
  params::Backward b = {};

  Backward(const Case& c, bool all, int users_of_part, int most_slots) : c(c), lists(c, Segments(c), all), problem(c), most_slots(most_slots), most_users(users_of_part) {
    int room = lists.query_blocks * (lists.stride - 1) * c.key_heads, columns = lists.key_blocks * c.key_heads;
    // `most_parts` is computed as in candle-sage/src/cuda/selection.rs. `u.shares` is so large that a part of a split
    // list has at most `u.least_users` query blocks (params/sla2.cuh).
    int longest = attention::selection_blocks(problem.segments.longest_queries);
    if (users_of_part) most_parts = most_slots * ((longest + users_of_part - 1) / users_of_part - 1);
    users.resize(room), first_users.resize(columns + c.key_heads), counts.resize(columns), cuts.resize(columns, {7, 7});
    parts.resize(most_parts, {0, 0, 0, 0}), parts.resize(most_parts + 2, {5, 5, 5, 5}), sums.resize(most_slots * 2 * BLOCK * D, NAN), arrivals.resize(most_slots * 4 * BLOCK / 16, 9);
    u.lists = {lists.seen.data(), users.data(), first_users.data(), lists.stride, lists.query_blocks, lists.key_blocks, 0};
    u.users = users.data(), u.first_users = first_users.data(), u.counts = counts.data(), u.used = used.data();
    u.shape = problem.p.shape;
    if (users_of_part) u.cuts = {parts.data(), cuts.data(), sums.data(), arrivals.data()};
    u.least_users = users_of_part, u.shares = 1 << 20, u.most_slots = most_slots, u.most_parts = most_parts, u.slot_floats = 2 * BLOCK * D, u.slot_pieces = 2 * BLOCK / 16 * (D > 128 ? 2 : 1);
    each_warp([&] { ::users<false>(u); });
    each_warp([&] { ::users<true>(u); });
    b.lists = u.lists, b.cuts = u.cuts, b.shape = problem.p.shape;
  }
  template <class F>
  void each_warp(F kernel) {
    int blocks = (attention::selection_blocks(problem.segments.longest_keys) + WARPS - 1) / WARPS;
    for (int z = 0; z < c.key_heads; ++z)
      for (int y = 0; y < problem.segments.count(); ++y)
        for (int x = 0; x < blocks; ++x) host::run({x, y, z}, WARPS * 32, kernel);
  }

  // Whether as many lists are split as have more than `2 * most_users` query blocks, but at most `most_slots`. Also
  // checks that the guard entries of `parts` are not overwritten.
  bool cut_as_many_as_it_should() const {
    auto is_cut = [](const params::CutList& list) { return list.parts > 1; };
    long expected = std::count_if(counts.begin(), counts.end(), [&](uint32_t count) { return count > 2u * most_users; });
    bool whole = parts[most_parts].segment == 5 && parts[most_parts + 1].number == 5 && int(used[1]) <= most_parts;
    return whole && std::count_if(cuts.begin(), cuts.end(), is_cut) == std::min(expected, long(most_slots)) && expected > 0;
  }

  // Divides the keys into groups of `keys` keys. A query tile must be visited exactly once for a group if the list of
  // the tile's query block contains the group's key block, and otherwise never. Returns whether ListedQueries makes
  // these visits, with the right `rank`: the index of the key block in the list.
  bool visits_are_right(int keys) const {
    std::map<std::tuple<int, int, int, int>, int> visits;  // per (segment, block.first_key, query head, query tile)
    int all = problem.segments.count() * c.key_heads * ((problem.segments.longest_keys + keys - 1) / keys);
    for (int i = 0; i < all + most_parts * (BLOCK / keys); ++i) {
      attention::BackwardBlock block = attention::ListedQueries::take(b, i, keys);
      if (block.first_key >= block.segment.key_len) continue;
      attention::ListedQueries queries(b, block, keys);
      auto tile = queries.start();
      for (int n = 0; n < queries.count; ++n, queries.advance(tile)) {
        int row = problem.segments.all[block.segment_index].query_block + tile.tile * 64 / BLOCK;
        const uint32_t* list = &lists.seen[(size_t(block.key_head) * lists.query_blocks + row) * lists.stride];
        if (tile.rank >= int(list[0]) || int(list[1 + tile.rank]) != block.first_key / BLOCK) return false;
        if (tile.tile >= block.segment.query_tiles()) return false;
        ++visits[{block.segment_index, block.first_key, tile.head, tile.tile}];
      }
    }
    size_t expected = 0;
    for (int head = 0; head < c.key_heads; ++head)
      for (const params::Segment& s : problem.segments.all)
        for (int tile = 0; tile < tiles_of(s.query_len); ++tile) {
          const uint32_t* list = &lists.seen[(size_t(head) * lists.query_blocks + s.query_block + tile * 64 / BLOCK) * lists.stride];
          for (uint32_t n = 1; n <= list[0]; ++n)
            expected += (min(s.key_len - int(list[n]) * BLOCK, BLOCK) + keys - 1) / keys * (c.query_heads / c.key_heads);
        }
    return visits.size() == expected && std::all_of(visits.begin(), visits.end(), [](auto& visit) { return visit.second == 1; });
  }

  void forward() {
    problem.p.lists = b.lists;
    problem.template forward<attention::ListedKeys>();
  }
  void backward() { problem.template backward<attention::ListedQueries>(b, most_parts); }
};

template <class T, class U>
double difference(const std::vector<T>& got, const std::vector<U>& expected) {
  double wrong = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) wrong += pow(double(float(got[i])) - double(expected[i]), 2), size += pow(double(expected[i]), 2);
  return sqrt(wrong / size);
}

template <int D>
bool check(const Case& c) {
  bool good = true;
  auto expect = [&](bool right, const char* what) {
    if (!right) printf("%d queries, %d keys, head_dim %d: %s\n", c.queries, c.keys, c.head_dim, what);
    good &= right;
  };
  auto begin = [] { state = 7; };
  begin();
  Backward<D> whole(c, false, 0, 0);
  whole.forward();
  whole.backward();
  for (int users : {1, 2})
    for (int most_slots : {100, 1}) {
      begin();
      Backward<D> cut(c, false, users, most_slots);
      expect(users == 2 || cut.cut_as_many_as_it_should(), "the wrong lists are split");
      expect(cut.visits_are_right(64) && cut.visits_are_right(128), "a query block is not visited exactly once");
      if (users == 2) continue;
      cut.problem.out.values = whole.problem.out.values, cut.problem.minus_lse2 = whole.problem.minus_lse2;
      cut.problem.out.view.data = cut.problem.out.values.data(), cut.problem.p.minus_lse2 = cut.problem.minus_lse2.data();
      cut.backward();
      // Splitting changes the order of f32 additions, so a few elements of dK and dV round to another bf16 value.
      expect(difference(cut.problem.dk.values, whole.problem.dk.values) < ldexp(1.0, -11), "dK of split lists differs from dK of whole lists");
      expect(difference(cut.problem.dv.values, whole.problem.dv.values) < ldexp(1.0, -11), "dV of split lists differs from dV of whole lists");
      expect(difference(cut.problem.dq_accum, whole.problem.dq_accum) < 1e-5, "dQ of split lists differs from dQ of whole lists");
    }
  begin();
  Backward<D> listed(c, true, 0, 0);
  expect(listed.visits_are_right(64) && listed.visits_are_right(128), "a query block is not visited exactly once");
  listed.forward();
  listed.backward();
  begin();
  Lists(c, Segments(c), true);
  Problem<B, D, UNQUANTIZED> dense(c);
  dense.forward();
  dense.backward();
  auto same = [](const auto& a, const auto& b) { return memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0; };
  expect(same(listed.problem.dk.values, dense.dk.values) && same(listed.problem.dv.values, dense.dv.values),
         "gradients over all blocks are not those without lists");
  return good;
}

// Tests block_mass: for each key block that may be selected, the sum of dense attention's probabilities over the keys
// of the block, the queries of a query block, and the query heads of a key head.
template <int D>
bool mass_is_right(const Case& c) {
  state = 7;
  Problem<B, D, UNQUANTIZED> problem(c);
  const Segments& segments = problem.segments;
  int columns = segments.packed ? segments.key_blocks : attention::selection_blocks(segments.longest_keys);
  std::vector<float> mass(size_t(c.key_heads) * segments.query_blocks * columns);
  params::Mass p = {problem.p, mass.data(), segments.query_blocks, columns};
  constexpr params::Plan PLAN = params::plan("block_mass", D, params::LISTED);
  static_assert(sizeof shared == sizeof attention::shared);
  host::memory = shared;
  for (int z = 0; z < c.key_heads; ++z)
    for (int y = 0; y < segments.count(); ++y)
      for (int x = 0; x < attention::selection_blocks(segments.longest_queries); ++x)
        host::run_with_shared({x, y, z}, PLAN.threads, PLAN.shared_bytes, [&] { ::block_mass<B, D>(p); });
  host::memory = attention::shared;

  // V is 1 in the channel whose number is the key's block, else 0. Output channel b is then block b's probability.
  std::vector<double> expected(mass.size());
  for (int head = 0; head < c.query_heads; ++head)
    for (int i = 0; i < segments.count(); ++i) {
      const params::Segment& s = segments.all[i];
      attention::Segment segment(problem.p.shape, i);
      int batch = segments.batch(i), key_head = head / (c.query_heads / c.key_heads);
      host::Definition definition(problem.k, problem.v, batch, s.key_start, s.key_len, key_head, false, nullptr);
      for (size_t j = 0; j < definition.v.size(); ++j) definition.v[j] = int(j) % c.head_dim == int(j) / c.head_dim / BLOCK;
      for (int query = 0; query < s.query_len; ++query) {
        double lse2;
        std::vector<double> of_blocks = definition.row(problem.q.row(batch, s.query_start + query, head), 0, segment.visible_keys(query),
                                                       problem.p.shape.softmax_scale, false, false, lse2);
        int block = query / BLOCK;
        double* row = &expected[(size_t(key_head) * segments.query_blocks + s.query_block + block) * columns + (segments.packed ? s.key_block : 0)];
        for (int key_block = 0; key_block < candidates(segment, block); ++key_block) row[key_block] += of_blocks[key_block];
      }
    }
  // The limit allows for the rounding of f32 sums and the errors of ptx::exp2.
  double error = difference(mass, expected);
  if (!(error < 1e-5)) printf("mass of key blocks: %.1e, %d queries, head_dim %d\n", error, c.queries, c.head_dim);
  return error < 1e-5;
}

}  // namespace

int main() {
  const Case grouped = {1, 400, 400, 2, 1, 64, true, false, {}, {}};
  const Case whole = {2, 400, 150, 1, 1, 128, false, false, {}, {}};
  const Case packed = {1, 700, 700, 1, 1, 40, true, false, {0, 70, 70, 590, 700}, {0, 70, 70, 590, 700}};
  const Case heads = {1, 400, 400, 4, 2, 64, true, false, {}, {}};
  bool good = check<64>(grouped) & check<128>(whole) & check<64>(packed);
  printf("inverse lists, whole and split: %s\n", good ? "right" : "WRONG");
  bool mass = mass_is_right<64>(heads) & mass_is_right<128>(whole) & mass_is_right<64>(packed);
  printf("mass of key blocks: %s\n", mass ? "right" : "WRONG");
  return !(good && mass);
}
