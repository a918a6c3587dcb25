// Attention forward for sm_80 and later: one kernel for each (scheme, element type, head_dim). On Hopper another walk and
// its numerics, except with Q smoothing.
#include <sage/attention/full_precision_forward.cuh>
#include <sage/attention/full_precision_forward_roles.cuh>
#include <sage/attention/sagebwd_forward.cuh>
#include <sage/attention/sagebwd_forward_roles.cuh>
#include <sage/params/limits.cuh>

using namespace sage;

#define PORTABLE(name, ...)                                                                                       \
  extern "C" __global__ void __launch_bounds__(attention::__VA_ARGS__::THREADS, attention::__VA_ARGS__::BLOCKS)   \
      name(const __grid_constant__ params::Forward p) {                                                           \
    attention::forward<attention::__VA_ARGS__>(p);                                                                \
  }

#define WITH_ROLES(name, ...)                                                                                     \
  static_assert(attention::__VA_ARGS__::SHARED_BYTES <= params::SHARED_KIB * 1024);                               \
  extern "C" __global__ void __launch_bounds__(attention::__VA_ARGS__::Roles::THREADS, 1)                         \
      name(const __grid_constant__ params::Forward p) {                                                           \
    attention::forward_with_roles<attention::__VA_ARGS__>(p);                                                     \
  }

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FORWARD(name, Numerics, T, D, ...) WITH_ROLES(name, Numerics##Roles<T, D __VA_OPT__(, ) __VA_ARGS__>)
#else
#define FORWARD(name, Numerics, T, D, ...) PORTABLE(name, Numerics<T, D __VA_OPT__(, ) __VA_ARGS__>)
#endif

#define HEAD_DIMS(type, T)                                                         \
  FORWARD(attn_fwd_full_precision_##type##_64, FullPrecisionForward, T, 64)        \
  FORWARD(attn_fwd_full_precision_##type##_128, FullPrecisionForward, T, 128)      \
  FORWARD(attn_fwd_attn_qat_##type##_64, FullPrecisionForward, T, 64, attention::Nvfp4Probabilities)   \
  FORWARD(attn_fwd_attn_qat_##type##_128, FullPrecisionForward, T, 128, attention::Nvfp4Probabilities) \
  FORWARD(attn_fwd_sagebwd_##type##_64, SageBwdForward, T, 64)                     \
  FORWARD(attn_fwd_sagebwd_##type##_128, SageBwdForward, T, 128)                   \
  PORTABLE(attn_fwd_sagebwd_qk_##type##_64, SageBwdForward<T, 64, true>)           \
  PORTABLE(attn_fwd_sagebwd_qk_##type##_128, SageBwdForward<T, 128, true>)

HEAD_DIMS(bf16, __nv_bfloat16)
HEAD_DIMS(f16, __half)
