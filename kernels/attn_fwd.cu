// Attention forward. Each (scheme, element type, head_dim) has three kernels: one visits all visible keys, one (sparse)
// the key blocks of a selection, and one is for windows. Schemes that compute O = P V in 16 bit have a fourth kernel,
// for a soft cap, ALiBi or both. The table of plans (params/plans.def) says which mainloop a kernel runs.
#include <sage/attention/numerics/dense16_forward_sm80.cuh>
#include <sage/attention/numerics/dense16_forward_sm90.cuh>
#include <sage/attention/numerics/sagebwd_forward_sm80.cuh>
#include <sage/attention/numerics/sagebwd_forward_sm90.cuh>

using namespace sage;
using attention::NoScoreMod, attention::Nvfp4Probabilities, attention::PlainProbabilities, attention::SoftcapAndAlibi;
using Operands = attention::Operands;

namespace {

// A mainloop, its numerics, and BLOCKS: the thread blocks per multiprocessor for __launch_bounds__.
template <params::Mainloop>
struct Forward;

template <>
struct Forward<params::FORWARD_SM80> {
  template <class T, int D, int V, params::Plan PLAN, class P, Operands OPERANDS, class Mod = NoScoreMod>
    requires(V == D)
  using Dense16 = attention::Dense16ForwardSm80<T, D, PLAN, P, OPERANDS, Mod>;
  template <class T, int D, int V, params::Plan PLAN, bool QK>
  using SageBwd = attention::SageBwdForwardSm80<T, D, PLAN, QK>;
  template <class Numerics>
  static constexpr int BLOCKS = Numerics::BLOCKS;
  template <class Numerics, class Block>
  static __device__ __forceinline__ void run(const params::Forward& p) {
    attention::forward_sm80<Numerics, Block>(p);
  }
};

template <>
struct Forward<params::FORWARD_SM90> {
  template <class T, int D, int V, params::Plan PLAN, class P, Operands OPERANDS, class Mod = NoScoreMod>
  using Dense16 = attention::Dense16ForwardSm90<T, D, PLAN, P, OPERANDS, V, Mod>;
  template <class T, int D, int V, params::Plan PLAN, bool QK>
    requires(!QK)
  using SageBwd = attention::SageBwdForwardSm90<T, D, PLAN>;
  template <class Numerics>
  static constexpr int BLOCKS = 1;
  template <class Numerics, class Block>
  static __device__ __forceinline__ void run(const params::Forward& p) {
    attention::forward_sm90<Numerics, Block>(p);
  }
};

}  // namespace

#define ENTRY(name, PLAN, Block, T, D, V, NUMERICS, ...)                                                               \
  namespace of_##name {                                                                                                \
  using Mainloop = Forward<PLAN.mainloop>;                                                                             \
  using Numerics = Mainloop::NUMERICS<T, D, V, PLAN, __VA_ARGS__>;                                                     \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(PLAN.threads, of_##name::Mainloop::BLOCKS<of_##name::Numerics>)         \
      name(const __grid_constant__ params::Forward p) {                                                                \
    of_##name::Mainloop::run<of_##name::Numerics, attention::Block>(p);                                                \
  }

// The entry points of a kernel, each with its plan. The first argument after V is a member template of `Forward`. The
// remaining arguments are the template arguments of this member after PLAN (see ENTRY).
#define KERNEL_OF_WIDTHS(kernel, suffix, T, D, V, ...)                                                                    \
  ENTRY(kernel##_##suffix, params::plan(#kernel, {D, V}, params::EVERY), EveryKey, T, D, V, __VA_ARGS__)               \
  ENTRY(kernel##_sparse_##suffix, params::plan(#kernel, {D, V}, params::LISTED), ListedKeys, T, D, V, __VA_ARGS__)      \
  ENTRY(kernel##_window_##suffix, params::plan(#kernel, {D, V}, params::LISTED), WindowKeys, T, D, V, __VA_ARGS__)
#define KERNEL(kernel, type, T, D, ...) KERNEL_OF_WIDTHS(kernel, type##_##D, T, D, D, __VA_ARGS__)
// Like KERNEL_OF_WIDTHS, plus the entry point for a soft cap and ALiBi.
#define DENSE16_OF_WIDTHS(kernel, suffix, T, D, V, ...)                                                                 \
  KERNEL_OF_WIDTHS(kernel, suffix, T, D, V, Dense16, __VA_ARGS__)                                                       \
  ENTRY(kernel##_score_mod_##suffix, params::plan(#kernel, {D, V}, params::SCORE_MOD), WindowKeys, T, D, V, Dense16,    \
        __VA_ARGS__, SoftcapAndAlibi)
#define DENSE16_KERNEL(kernel, type, T, D, ...) DENSE16_OF_WIDTHS(kernel, type##_##D, T, D, D, __VA_ARGS__)

#define DENSE16(type, T, D) DENSE16_KERNEL(attn_fwd_dense16, type, T, D, PlainProbabilities, Operands::ROWS)
#define SCORES(type, T, D) DENSE16_KERNEL(attn_fwd_sagebwd_scores, type, T, D, PlainProbabilities, Operands::CODES)
#define HEAD_DIM(type, T, D)                                                               \
  DENSE16(type, T, D)                                                                      \
  SCORES(type, T, D)                                                                       \
  DENSE16_KERNEL(attn_fwd_attn_qat, type, T, D, Nvfp4Probabilities, Operands::ROWS)        \
  KERNEL(attn_fwd_sagebwd, type, T, D, SageBwd, false)                                     \
  KERNEL(attn_fwd_sagebwd_qk, type, T, D, SageBwd, true)

HEAD_DIM(bf16, __nv_bfloat16, 64)
HEAD_DIM(bf16, __nv_bfloat16, 128)
HEAD_DIM(f16, __half, 64)
HEAD_DIM(f16, __half, 128)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SM90(type, T)                                                                                                  \
  DENSE16(type, T, 192)                                                                                                \
  DENSE16_OF_WIDTHS(attn_fwd_dense16, type##_192_128, T, 192, 128, PlainProbabilities, Operands::ROWS)                    \
  SCORES(type, T, 256)
SM90(bf16, __nv_bfloat16)
SM90(f16, __half)
#endif
#ifdef SAGE_HEAD_DIM_256
DENSE16(bf16, __nv_bfloat16, 256)
DENSE16(f16, __half, 256)
#endif
