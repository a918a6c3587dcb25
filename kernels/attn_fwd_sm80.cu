// Attention forward for sm_80 and later: one kernel for each (scheme, element type, head_dim).
#include <sage/attention/full_precision_forward.cuh>
#include <sage/attention/sagebwd_forward.cuh>

using namespace sage;

#define KERNEL(name, ...)                                                                                          \
  extern "C" __global__ void __launch_bounds__(attention::__VA_ARGS__::THREADS, attention::__VA_ARGS__::BLOCKS)     \
      name(const __grid_constant__ params::Forward p) {                                                            \
    attention::forward<attention::__VA_ARGS__>(p);                                                                 \
  }

#define HEAD_DIMS(type, T)                                                          \
  KERNEL(attn_fwd_full_precision_##type##_64, FullPrecisionForward<T, 64>)          \
  KERNEL(attn_fwd_full_precision_##type##_128, FullPrecisionForward<T, 128>)        \
  KERNEL(attn_fwd_sagebwd_##type##_64, SageBwdForward<T, 64, false>)                \
  KERNEL(attn_fwd_sagebwd_##type##_128, SageBwdForward<T, 128, false>)              \
  KERNEL(attn_fwd_sagebwd_qk_##type##_64, SageBwdForward<T, 64, true>)              \
  KERNEL(attn_fwd_sagebwd_qk_##type##_128, SageBwdForward<T, 128, true>)

HEAD_DIMS(bf16, __nv_bfloat16)
HEAD_DIMS(f16, __half)
