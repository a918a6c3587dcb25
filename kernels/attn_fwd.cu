// Attention forward: for each (scheme, element type, head_dim) one kernel that visits all visible keys, and one that visits the
// blocks of a selection (sparse). Hopper has its own mainloop, except for SageBwd with Q smoothing.
#include <sage/attention/numerics/full_precision_forward_sm80.cuh>
#include <sage/attention/numerics/full_precision_forward_sm90.cuh>
#include <sage/attention/numerics/sagebwd_forward_sm80.cuh>
#include <sage/attention/numerics/sagebwd_forward_sm90.cuh>

using namespace sage;

#define ENTRY_SM80(name, Block, ...)                                                                            \
  extern "C" __global__ void __launch_bounds__(attention::__VA_ARGS__::THREADS, attention::__VA_ARGS__::BLOCKS) \
      name(const __grid_constant__ params::Forward p) {                                                         \
    attention::forward_sm80<attention::__VA_ARGS__, attention::Block>(p);                                       \
  }
#define ENTRY_SM90(name, Block, ...)                                                             \
  extern "C" __global__ void __launch_bounds__(attention::__VA_ARGS__::Warpgroups::THREADS, 1)   \
      name(const __grid_constant__ params::Forward p) {                                          \
    attention::forward_sm90<attention::__VA_ARGS__, attention::Block>(p);                        \
  }

// The two entries of a kernel, each with its plan.
#define KERNEL(ENTRY, kernel, type, T, D, Numerics, ...)                                                          \
  ENTRY(kernel##_##type##_##D, EveryKey,                                                                          \
        Numerics<T, D, params::plan(#kernel, D, params::EVERY) __VA_OPT__(, ) __VA_ARGS__>)                       \
  ENTRY(kernel##_sparse_##type##_##D, ListedKeys,                                                                 \
        Numerics<T, D, params::plan(#kernel, D, params::LISTED) __VA_OPT__(, ) __VA_ARGS__>)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define FORWARD(kernel, type, T, D, Numerics, ...) KERNEL(ENTRY_SM90, kernel, type, T, D, Numerics##Sm90 __VA_OPT__(, ) __VA_ARGS__)
#else
#define FORWARD(kernel, type, T, D, Numerics, ...) KERNEL(ENTRY_SM80, kernel, type, T, D, Numerics##Sm80 __VA_OPT__(, ) __VA_ARGS__)
#endif

#define HEAD_DIM(type, T, D)                                                                                \
  FORWARD(attn_fwd_full_precision, type, T, D, FullPrecisionForward, attention::PlainProbabilities)         \
  FORWARD(attn_fwd_attn_qat, type, T, D, FullPrecisionForward, attention::Nvfp4Probabilities)               \
  FORWARD(attn_fwd_sagebwd, type, T, D, SageBwdForward)                                                     \
  FORWARD(attn_fwd_sagebwd_scores, type, T, D, FullPrecisionForward, attention::PlainProbabilities,          \
          attention::Operands::CODES)                                                                        \
  KERNEL(ENTRY_SM80, attn_fwd_sagebwd_qk, type, T, D, SageBwdForwardSm80, true)

HEAD_DIM(bf16, __nv_bfloat16, 64)
HEAD_DIM(bf16, __nv_bfloat16, 128)
HEAD_DIM(f16, __half, 64)
HEAD_DIM(f16, __half, 128)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HEAD_DIM_192(type, T)                                                                                            \
  KERNEL(ENTRY_SM90, attn_fwd_full_precision, type, T, 192, FullPrecisionForwardSm90, attention::PlainProbabilities)      \
  KERNEL(ENTRY_SM90, attn_fwd_narrow_values, type, T, 192, FullPrecisionForwardSm90, attention::PlainProbabilities,       \
         attention::Operands::ROWS, 128)
#define HEAD_DIM_256(type, T)                                                                                            \
  KERNEL(ENTRY_SM90, attn_fwd_sagebwd_scores, type, T, 256, FullPrecisionForwardSm90, attention::PlainProbabilities,      \
         attention::Operands::CODES)
HEAD_DIM_192(bf16, __nv_bfloat16)
HEAD_DIM_192(f16, __half)
HEAD_DIM_256(bf16, __nv_bfloat16)
HEAD_DIM_256(f16, __half)
#endif
#ifdef SAGE_HEAD_DIM_256
FORWARD(attn_fwd_full_precision, bf16, __nv_bfloat16, 256, FullPrecisionForward, attention::PlainProbabilities)
FORWARD(attn_fwd_full_precision, f16, __half, 256, FullPrecisionForward, attention::PlainProbabilities)
#endif
