// Attention forward with NVFP4 matmuls, for inference with a model that Attn-QAT trained. Each (element type, head_dim)
// has four kernels. One packs Q, K and V. The others are forwards: over all visible keys, over the key blocks of a
// selection (sparse), and over the keys of windows. Family 10 (sm_100) runs the matmuls with tcgen05, family 12
// (sm_120) with mma.sync. Other GPUs emulate this mma.sync, for tests.
#include <sage/attention/numerics/nvfp4_forward_sm100.cuh>
#include <sage/attention/numerics/nvfp4_forward_sm80.cuh>
#include <sage/quant/pack_nvfp4.cuh>

using namespace sage;

#if (SAGE_HAS_TCGEN05 || SAGE_HAS_NVFP4) && !SAGE_HAS_E2M1
#error "a family with NVFP4 matmuls also converts to E2M1: ptx/convert_nvfp4.cuh does not name it"
#endif

#if SAGE_HAS_TCGEN05
#define MAINLOOP forward_sm100
#define NUMERICS Nvfp4ForwardSm100
#else
#define MAINLOOP forward_sm80
#define NUMERICS Nvfp4ForwardSm80
#endif

#define FORWARD(name, Block, ...)                                                                               \
  extern "C" __global__ void __launch_bounds__(attention::__VA_ARGS__::THREADS, attention::__VA_ARGS__::BLOCKS) \
      name(const __grid_constant__ params::Forward p) {                                                         \
    attention::MAINLOOP<attention::__VA_ARGS__, attention::Block>(p);                                           \
  }

#define KERNELS(type, T, D)                                                                                            \
  FORWARD(attn_fwd_nvfp4_##type##_##D, EveryKey, NUMERICS<T, D, params::plan("attn_fwd_nvfp4", D, params::EVERY)>)     \
  FORWARD(attn_fwd_nvfp4_sparse_##type##_##D, ListedKeys,                                                              \
          NUMERICS<T, D, params::plan("attn_fwd_nvfp4", D, params::LISTED)>)                                           \
  FORWARD(attn_fwd_nvfp4_window_##type##_##D, WindowKeys,                                                              \
          NUMERICS<T, D, params::plan("attn_fwd_nvfp4", D, params::LISTED)>)                                           \
  extern "C" __global__ void __launch_bounds__(quant::PACK_THREADS)                                                    \
      pack_nvfp4_##type##_##D(const __grid_constant__ params::Forward p) {                                             \
    quant::pack_nvfp4<T, D>(p);                                                                                        \
  }

KERNELS(bf16, __nv_bfloat16, 64)
KERNELS(bf16, __nv_bfloat16, 128)
KERNELS(f16, __half, 64)
KERNELS(f16, __half, 128)
