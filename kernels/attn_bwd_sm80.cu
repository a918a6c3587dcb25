// Attention backward for sm_80 and later: one kernel for each (scheme, element type, head_dim), and one that visits the
// queries that select its keys alone (sparse). On Hopper another walk and its numerics, except for the ablations. Attn-QAT without requantized P runs full precision's, on its own operands.
#include <sage/attention/backward_roles.cuh>
#include <sage/attention/full_precision_backward.cuh>
#include <sage/attention/full_precision_backward_consumers.cuh>
#include <sage/attention/full_precision_backward_roles.cuh>
#include <sage/attention/sagebwd_backward.cuh>
#include <sage/attention/sagebwd_backward_roles.cuh>
#include <sage/params/limits.cuh>

using namespace sage;
using attention::BackwardPlan;

// The largest plan that fits, as in candle-sage/src/cuda/plan.rs.
template <template <class> class Numerics>
constexpr auto choose() {
  constexpr int LIMIT = params::SHARED_KIB * 1024;
  if constexpr (Numerics<BackwardPlan<128, 2>>::SHARED_BYTES <= LIMIT)
    return BackwardPlan<128, 2>{};
  else if constexpr (Numerics<BackwardPlan<128, 1>>::SHARED_BYTES <= LIMIT)
    return BackwardPlan<128, 1>{};
  else
    return BackwardPlan<64, 1>{};
}

#define PORTABLE(name, Queries, ...)                                                                                      \
  namespace name##_ {                                                                                            \
  template <class Plan>                                                                                          \
  using Numerics = attention::__VA_ARGS__;                                                                       \
  using Chosen = Numerics<decltype(choose<Numerics>())>;                                                         \
  static_assert(Chosen::SHARED_BYTES <= params::SHARED_KIB * 1024);                                              \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(name##_::Chosen::Plan::THREADS, 1)                                \
      name(const __grid_constant__ params::Backward p) {                                                         \
    attention::backward<name##_::Chosen, attention::Queries>(p);                                                                     \
  }

#define WITH_ROLES(name, Queries, ...)                                                                                    \
  static_assert(attention::__VA_ARGS__::SHARED_BYTES <= params::SHARED_KIB * 1024);                              \
  extern "C" __global__ void __launch_bounds__(attention::ROLES_THREADS, 1)                                      \
      name(const __grid_constant__ params::Backward p) {                                                         \
    attention::backward_with_roles<attention::__VA_ARGS__, attention::Queries>(p);                                                   \
  }

#define WITH_CONSUMERS(name, Queries, ...)                                                                                \
  static_assert(attention::__VA_ARGS__::SHARED_BYTES <= params::SHARED_KIB * 1024);                              \
  extern "C" __global__ void __launch_bounds__(attention::ROLES_THREADS, 1)                                      \
      name(const __grid_constant__ params::Backward p) {                                                         \
    attention::backward_with_consumers<attention::__VA_ARGS__, attention::Queries>(p);                            \
  }

#define SEVERAL(KIND, name, suffix, ...)                   \
  KIND(name##_##suffix, EveryQuery, __VA_ARGS__)           \
  KIND(name##_sparse_##suffix, ListedQueries, __VA_ARGS__)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Products in 16 bit alone want another division of the work by head_dim: docs/kernels/attention.md says why.
#define KIND_64(...) SEVERAL(WITH_ROLES, __VA_ARGS__)
#define KIND_128(...) SEVERAL(WITH_CONSUMERS, __VA_ARGS__)
#define NUMERICS_64(Numerics) Numerics##Roles
#define NUMERICS_128(Numerics) Numerics##Consumers
#define BACKWARD(name, suffix, Numerics, T, D, ...) \
  KIND_##D(name, suffix, NUMERICS_##D(Numerics)<T, D __VA_OPT__(, ) __VA_ARGS__>)
#define BACKWARD_BY_ROLES(name, suffix, Numerics, T, D) SEVERAL(WITH_ROLES, name, suffix, Numerics##Roles<T, D>)
#else
#define BACKWARD(name, suffix, Numerics, T, D, ...) \
  SEVERAL(PORTABLE, name, suffix, Numerics<T, D, Plan __VA_OPT__(, ) __VA_ARGS__>)
#define BACKWARD_BY_ROLES BACKWARD
#endif

#define HEAD_DIM(type, T, D)                                                                              \
  BACKWARD(attn_bwd_full_precision, type##_##D, FullPrecisionBackward, T, D)                              \
  BACKWARD(attn_bwd_attn_qat, type##_##D, FullPrecisionBackward, T, D, attention::Nvfp4Probabilities)     \
  BACKWARD(attn_bwd_sagebwd_s, type##_##D, FullPrecisionBackward, T, D, attention::PlainProbabilities,    \
           attention::ScoresOfCodes<T, D>)                                                                 \
  BACKWARD_BY_ROLES(attn_bwd_sagebwd, type##_##D, SageBwdBackward, T, D)                                      \
  SEVERAL(PORTABLE, attn_bwd_sagebwd_general, type##_##D, SageBwdBackward<T, D, Plan, true>)

HEAD_DIM(bf16, __nv_bfloat16, 64)
HEAD_DIM(bf16, __nv_bfloat16, 128)
HEAD_DIM(f16, __half, 64)
HEAD_DIM(f16, __half, 128)

namespace {

// After the backward: dQ = softmax_scale * sums, out of the order of the fragments. A block is a (head, segment, tile).
template <class T, int D>
__device__ void finish(const params::Backward& p) {
  const params::Shape& shape = p.shape;
  int index = blockIdx.x, head = index % shape.query_heads;
  index /= shape.query_heads;
  attention::Segment segment(shape, index % shape.segment_count);
  int number = index / shape.segment_count, first = number * attention::TILE;
  if (first >= segment.query_len) return;
  attention::Rows<T> dq(p.dq, segment.batch, segment.query_start, head, segment.query_len, shape.head_dim);
  int64_t tile = int64_t(head) * shape.query_tiles + segment.query_tile + number;
  const float4* sums = reinterpret_cast<const float4*>(p.dq_sums + tile * attention::TILE * D);
  // From the order of fragments to rows, so that whole sectors are written.
  constexpr int CHUNKS = D / 8, PITCH = D * 2 + 16;  // rows 16 bytes apart modulo the banks
  __shared__ __align__(16) unsigned char rows[attention::TILE * PITCH];
  float scale = shape.softmax_scale;
#pragma unroll 4
  for (int i = threadIdx.x; i < attention::TILE * D / 4; i += blockDim.x) {
    float4 x = sums[i];
    int part = CHUNKS / p.dq_parts, lane = i % 32, n = i / 32 % part + i / 32 / part / 4 * part, strip = i / 32 / part % 4;
    unsigned char* at = rows + (strip * 16 + lane / 4) * PITCH + n * 16 + 4 * (lane & 3);
    *reinterpret_cast<uint32_t*>(at) = ptx::pack_16<T>(x.x * scale, x.y * scale);
    *reinterpret_cast<uint32_t*>(at + 8 * PITCH) = ptx::pack_16<T>(x.z * scale, x.w * scale);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < attention::TILE * CHUNKS; i += blockDim.x) {
    int row = i / CHUNKS, n = i % CHUNKS;
    dq.store_8(first + row, n * 8, *reinterpret_cast<const uint4*>(rows + row * PITCH + n * 16));
  }
}

}  // namespace

#define FINISH(type, T, D)                                                                                           \
  extern "C" __global__ void __launch_bounds__(256) finish_dq_##type##_##D(const __grid_constant__ params::Backward p) { \
    finish<T, D>(p);                                                                                                 \
  }
FINISH(bf16, __nv_bfloat16, 64)
FINISH(bf16, __nv_bfloat16, 128)
FINISH(f16, __half, 64)
FINISH(f16, __half, 128)
