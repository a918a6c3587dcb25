// Attention backward: for each (scheme, element type, head_dim) one kernel that visits all queries that see a block's keys, and
// one that visits those that select them (sparse). Hopper has its own mainloops, except for SageBwd's ablations. Attn-QAT without requantized P runs the kernel of full precision, on its own operands. finish_dq converts the sums of dQ afterwards.
#include <sage/attention/mainloop/backward_sm90_dq_warpgroup.cuh>
#include <sage/attention/numerics/full_precision_backward_sm80.cuh>
#include <sage/attention/numerics/full_precision_backward_sm90.cuh>
#include <sage/attention/numerics/full_precision_backward_sm90_channel_parts.cuh>
#include <sage/attention/numerics/full_precision_backward_sm90_dq_warpgroup.cuh>
#include <sage/attention/numerics/sagebwd_backward_sm80.cuh>
#include <sage/attention/numerics/sagebwd_backward_sm90_dq_warpgroup.cuh>

using namespace sage;

constexpr int FINISH_THREADS = 256;

#define ENTRY(name, mainloop, THREADS, Queries, ...)                                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) name(const __grid_constant__ params::Backward p) {    \
    attention::mainloop<attention::__VA_ARGS__, attention::Queries>(p);                                          \
  }

// The two entries of a kernel, each with its plan.
#define KERNEL(mainloop, kernel, type, T, D, Numerics, ...)                                                       \
  ENTRY(kernel##_##type##_##D, mainloop, params::plan(#kernel, D, params::EVERY).threads, EveryQuery,             \
        Numerics<T, D, params::plan(#kernel, D, params::EVERY) __VA_OPT__(, ) __VA_ARGS__>)                       \
  ENTRY(kernel##_sparse_##type##_##D, mainloop, params::plan(#kernel, D, params::LISTED).threads, ListedQueries,  \
        Numerics<T, D, params::plan(#kernel, D, params::LISTED) __VA_OPT__(, ) __VA_ARGS__>)

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// With products in 16 bit alone the best division of the work among warpgroups depends on head_dim: docs/kernels/log.md.
#define MAINLOOP_64 backward_sm90_dq_warpgroup
#define MAINLOOP_128 backward_sm90
#define NUMERICS_64(Numerics) Numerics##Sm90DqWarpgroup
#define NUMERICS_128(Numerics) Numerics##Sm90
#define MAINLOOP_256 backward_sm90_channel_parts
#define NUMERICS_256(Numerics) Numerics##Sm90ChannelParts
#define BACKWARD(kernel, type, T, D, Numerics, ...) \
  KERNEL(MAINLOOP_##D, kernel, type, T, D, NUMERICS_##D(Numerics) __VA_OPT__(, ) __VA_ARGS__)
#define BACKWARD_DQ_WARPGROUP(kernel, type, T, D, Numerics) \
  KERNEL(backward_sm90_dq_warpgroup, kernel, type, T, D, Numerics##Sm90DqWarpgroup)
#else
#define BACKWARD(kernel, type, T, D, Numerics, ...) \
  KERNEL(backward_sm80, kernel, type, T, D, Numerics##Sm80 __VA_OPT__(, ) __VA_ARGS__)
#define BACKWARD_DQ_WARPGROUP BACKWARD
#endif

#define HEAD_DIM(type, T, D)                                                                                   \
  BACKWARD(attn_bwd_full_precision, type, T, D, FullPrecisionBackward)                                         \
  BACKWARD(attn_bwd_attn_qat, type, T, D, FullPrecisionBackward, attention::Nvfp4Probabilities)                \
  BACKWARD(attn_bwd_sagebwd_s, type, T, D, FullPrecisionBackward, attention::PlainProbabilities,               \
           attention::ScoresOfCodes<T, D>)                                                                     \
  BACKWARD_DQ_WARPGROUP(attn_bwd_sagebwd, type, T, D, SageBwdBackward)                                         \
  KERNEL(backward_sm80, attn_bwd_sagebwd_general, type, T, D, SageBwdBackwardSm80, true)

HEAD_DIM(bf16, __nv_bfloat16, 64)
HEAD_DIM(bf16, __nv_bfloat16, 128)
HEAD_DIM(f16, __half, 64)
HEAD_DIM(f16, __half, 128)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HEAD_DIM_192(type, T)                                                                                            \
  KERNEL(backward_sm90_channel_parts, attn_bwd_full_precision, type, T, 192, FullPrecisionBackwardSm90ChannelParts)        \
  KERNEL(backward_sm90_channel_parts, attn_bwd_narrow_values, type, T, 192, FullPrecisionBackwardSm90ChannelParts, \
         attention::ScoresOfRows<T, 192>, 128)
#define HEAD_DIM_256(type, T)                                                                                            \
  KERNEL(backward_sm90_channel_parts, attn_bwd_sagebwd_s, type, T, 256, FullPrecisionBackwardSm90ChannelParts,             \
         attention::ScoresOfCodes<T, 256>)
HEAD_DIM_192(bf16, __nv_bfloat16)
HEAD_DIM_192(f16, __half)
HEAD_DIM_256(bf16, __nv_bfloat16)
HEAD_DIM_256(f16, __half)
#endif
#ifdef SAGE_HEAD_DIM_256
BACKWARD(attn_bwd_full_precision, bf16, __nv_bfloat16, 256, FullPrecisionBackward)
BACKWARD(attn_bwd_full_precision, f16, __half, 256, FullPrecisionBackward)
#endif

namespace {

// After the mainloop: converts the sums of dQ, in the order of the fragments, to dQ = softmax_scale * sums. A block has one tile
// of one (head, segment).
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
  const float4* sums = reinterpret_cast<const float4*>(p.dq_accum + tile * attention::TILE * D);
  // Shared memory reorders fragments to rows, so that whole sectors are written.
  constexpr int CHUNKS = D / 8, PITCH = D * 2 + 16;  // neighbouring rows are 16 bytes apart modulo all banks
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
  extern "C" __global__ void __launch_bounds__(FINISH_THREADS) finish_dq_##type##_##D(const __grid_constant__ params::Backward p) { \
    finish<T, D>(p);                                                                                                 \
  }
FINISH(bf16, __nv_bfloat16, 64)
FINISH(bf16, __nv_bfloat16, 128)
FINISH(bf16, __nv_bfloat16, 192)
FINISH(bf16, __nv_bfloat16, 256)
FINISH(f16, __half, 64)
FINISH(f16, __half, 128)
FINISH(f16, __half, 192)
FINISH(f16, __half, 256)
