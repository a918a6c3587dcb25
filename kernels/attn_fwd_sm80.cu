// Attention forward for sm_80 and later: one kernel for each (scheme, element type, head_dim), and one that visits selected
// blocks of keys alone (sparse). On Hopper another walk and its numerics, except with Q smoothing.
#include <sage/attention/full_precision_forward.cuh>
#include <sage/attention/full_precision_forward_roles.cuh>
#include <sage/attention/sagebwd_forward.cuh>
#include <sage/attention/sagebwd_forward_roles.cuh>
#include <sage/params/limits.cuh>

using namespace sage;

#define PORTABLE(name, Block, ...)                                                                                       \
  extern "C" __global__ void __launch_bounds__(attention::__VA_ARGS__::THREADS, attention::__VA_ARGS__::BLOCKS)   \
      name(const __grid_constant__ params::Forward p) {                                                           \
    attention::forward<attention::__VA_ARGS__, attention::Block>(p);                                                              \
  }

#define WITH_ROLES(name, Block, ...)                                                                                     \
  static_assert(attention::__VA_ARGS__::SHARED_BYTES <= params::SHARED_KIB * 1024);                               \
  extern "C" __global__ void __launch_bounds__(attention::__VA_ARGS__::Roles::THREADS, 1)                         \
      name(const __grid_constant__ params::Forward p) {                                                           \
    attention::forward_with_roles<attention::__VA_ARGS__, attention::Block>(p);                                                   \
  }

// A selection's blocks have 128 queries: two groups on Hopper.
#define SEVERAL(KIND, name, suffix, ...)                  \
  KIND(name##_##suffix, EveryKey, __VA_ARGS__)            \
  KIND(name##_sparse_##suffix, ListedKeys, __VA_ARGS__)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FORWARD(name, suffix, Numerics, T, D, ...)                                                       \
  WITH_ROLES(name##_##suffix, EveryKey, Numerics##Roles<T, D __VA_OPT__(, ) __VA_ARGS__>)                \
  WITH_ROLES(name##_sparse_##suffix, ListedKeys, Numerics##Roles<T, D __VA_OPT__(, ) __VA_ARGS__, 2>)
#else
#define FORWARD(name, suffix, Numerics, T, D, ...) \
  SEVERAL(PORTABLE, name, suffix, Numerics<T, D __VA_OPT__(, ) __VA_ARGS__>)
#endif

#define HEAD_DIM(type, T, D)                                                                           \
  FORWARD(attn_fwd_full_precision, type##_##D, FullPrecisionForward, T, D, attention::PlainProbabilities) \
  FORWARD(attn_fwd_attn_qat, type##_##D, FullPrecisionForward, T, D, attention::Nvfp4Probabilities)    \
  FORWARD(attn_fwd_sagebwd, type##_##D, SageBwdForward, T, D)                                          \
  SEVERAL(PORTABLE, attn_fwd_sagebwd_qk, type##_##D, SageBwdForward<T, D, true>)

HEAD_DIM(bf16, __nv_bfloat16, 64)
HEAD_DIM(bf16, __nv_bfloat16, 128)
HEAD_DIM(f16, __half, 64)
HEAD_DIM(f16, __half, 128)
