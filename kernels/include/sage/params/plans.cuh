// The table of plans (plans.def) for the kernels: the numerics of a kernel take its plan as a template argument.
#pragma once

namespace sage::params {

// The mainloops of attention/mainloop/. NONE: the kernel has a loop of its own.
enum Mainloop : unsigned { NONE, FORWARD_SM80, FORWARD_SM90, FORWARD_SM100, BACKWARD_SM80, BACKWARD_SM90, BACKWARD_SM90_DQ_WARPGROUP, BACKWARD_SM90_CHANNEL_PARTS };

// The plan of one kernel; plans.def explains the numbers.
struct Plan {
  Mainloop mainloop;
  int rows, threads, row_bytes, stages, shared_bytes;
  bool operator==(const Plan&) const = default;
};

enum Target : unsigned { SM80 = 1, SM86 = 2, SM90 = 4, SM100 = 8 };
enum Visits : unsigned { EVERY = 1, LISTED = 2 };

// The target of this compilation. The pass for the host launches nothing, so that its target does not matter.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800
constexpr Target TARGET = SM80;
#elif __CUDA_ARCH__ == 900
constexpr Target TARGET = SM90;
#elif __CUDA_ARCH__ == 1000
constexpr Target TARGET = SM100;
#else
constexpr Target TARGET = SM86;
#endif

// Whether the target has plans for head_dim 256.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
#define SAGE_HEAD_DIM_256
#endif

struct PlanRow {
  const char* kernel;
  int head_dim;
  unsigned targets, visits;
  Plan plan;
};

constexpr PlanRow PLANS[] = {
#define SAGE_TARGET(name, kib)
#define SAGE_FAMILY(name)
#define SAGE_PLAN(kernel, head_dim, targets, visits, ...) {#kernel, head_dim, targets, visits, {__VA_ARGS__}},
#include <sage/params/plans.def>
#undef SAGE_TARGET
#undef SAGE_FAMILY
#undef SAGE_PLAN
};

// The bytes of shared memory that a plan may ask for.
consteval int shared_limit(Target target) {
#define SAGE_TARGET(name, kib) \
  if (target == name) return kib * 1024;
#define SAGE_FAMILY(name)
#define SAGE_PLAN(...)
#include <sage/params/plans.def>
#undef SAGE_TARGET
#undef SAGE_FAMILY
#undef SAGE_PLAN
  return 0;
}

consteval bool same_text(const char* a, const char* b) {
  while (*a && *a == *b) ++a, ++b;
  return *a == *b;
}

// The plan of a kernel. If the table has no row for it, or two, or a plan that does not fit the target, the call is no constant
// expression, and the compiler's error names this function.
consteval Plan plan(const char* kernel, int head_dim, Visits visits = EVERY, Target target = TARGET) {
  const PlanRow* found = nullptr;
  for (const PlanRow& row : PLANS) {
    if (!same_text(row.kernel, kernel) || row.head_dim != head_dim || !(row.targets & target) || !(row.visits & visits)) continue;
    if (found) throw "plans.def has two rows for this kernel";
    found = &row;
  }
  if (!found) throw "plans.def has no row for this kernel";
  if (found->plan.shared_bytes > shared_limit(target)) throw "this plan does not fit the shared memory of its target";
  return found->plan;
}

}  // namespace sage::params
