// Gives kernel code the table of plans (plans.def).
#pragma once

namespace sage::params {

enum Maps : unsigned { UNMAPPED, MAPPED, MAPPED_IF_WIDE };

enum Mainloop : unsigned {
#define SAGE_MAINLOOP(name, ...) name,
#include <sage/params/plans.def>
};

// What the host needs to know about a mainloop; plans.def explains the fields. Kernel code that depends on a field
// asserts its value.
struct MainloopFacts {
  Maps maps;
  bool documents;
  int dq_parts, channels;
  bool persistent;
};
consteval MainloopFacts facts(Mainloop mainloop) {
#define SAGE_MAINLOOP(name, ...) \
  if (mainloop == name) return {__VA_ARGS__};
#include <sage/params/plans.def>
  throw "plans.def has no such mainloop";
}

// Number of thread blocks that process the same keys, each for a part of the channels.
consteval int channel_parts(Mainloop mainloop, int head_dim) {
  int of_a_block = facts(mainloop).channels;
  return of_a_block > 0 ? (head_dim + of_a_block - 1) / of_a_block : 1;
}

// The plan of one kernel; plans.def explains the numbers.
struct Plan {
  Mainloop mainloop;
  int rows, threads, row_bytes, stages, shared_bytes;
  bool operator==(const Plan&) const = default;
};

enum TargetIndex : unsigned {
#define SAGE_TARGET(name, ...) INDEX_##name,
#include <sage/params/plans.def>
};
enum Target : unsigned {
#define SAGE_TARGET(name, ...) name = 1 << INDEX_##name,
#include <sage/params/plans.def>
};
enum Visits : unsigned { EVERY = 1, LISTED = 2, SCORE_MOD = 4 };

// The target of an architecture; `architecture` is 90 for sm_90. For an unknown architecture the call is not a constant
// expression.
consteval Target target_of(int architecture) {
#define SAGE_TARGET(name, kib, ...)        \
  for (int own : {__VA_ARGS__})            \
    if (own == architecture) return name;
#include <sage/params/plans.def>
  throw "plans.def has no target for this architecture";
}

// The target of this compilation. The host pass launches nothing, so its target does not matter.
#ifdef __CUDA_ARCH__
constexpr Target TARGET = target_of(__CUDA_ARCH__ / 10);
#else
constexpr Target TARGET = SM80;
#endif

// Whether the target has plans for head_dim 256.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
#define SAGE_HEAD_DIM_256
#endif

struct PlanRow {
  const char* kernel;
  int head_dim, value_dim;
  unsigned targets, visits;
  Plan plan;
};

constexpr PlanRow PLANS[] = {
#define SAGE_PLAN(kernel, head_dim, value_dim, targets, visits, ...) \
  {#kernel, head_dim, value_dim, targets, visits, {__VA_ARGS__}},
#include <sage/params/plans.def>
};

consteval int shared_limit(Target target) {
#define SAGE_TARGET(name, kib, ...) \
  if (target == name) return kib * 1024;
#include <sage/params/plans.def>
  return 0;
}

consteval bool same_text(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a == *b;
}

// The widths that a kernel pads heads to.
struct Widths {
  int head_dim, value_dim;
  consteval Widths(int both) : head_dim(both), value_dim(both) {}
  consteval Widths(int head_dim, int value_dim) : head_dim(head_dim), value_dim(value_dim) {}
};

// The plan of a kernel. If the table does not have exactly one row for these arguments, or the plan does not fit the
// target, the call is not a constant expression, and the compiler's error names this function.
consteval Plan plan(const char* kernel, Widths widths, Visits visits = EVERY, Target target = TARGET) {
  const PlanRow* found = nullptr;
  for (const PlanRow& row : PLANS) {
    if (!same_text(row.kernel, kernel) || row.head_dim != widths.head_dim || row.value_dim != widths.value_dim) continue;
    if (!(row.targets & target) || !(row.visits & visits)) continue;
    if (found) throw "plans.def has two rows for this kernel";
    found = &row;
  }
  if (!found) throw "plans.def has no row for this kernel";
  if (found->plan.shared_bytes > shared_limit(target)) throw "this plan does not fit the shared memory of its target";
  return found->plan;
}

}  // namespace sage::params
