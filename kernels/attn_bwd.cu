// Attention backward. Each (scheme, element type, head_dim) has three kernels: one visits all queries that see a block
// of keys, one (sparse) only query blocks that select the block, and one is for windows. Schemes that compute dV, dP,
// dQ and dK in 16 bit have a fourth kernel, for a soft cap, ALiBi or both. The table of plans (params/plans.def) says
// which mainloop a kernel runs. Attn-QAT runs the kernels of 16-bit attention on its fake-quantized operands, unless
// its backward computes dV from quantized P.
#include <sage/attention/mainloop/backward_sm90_dq_warpgroup.cuh>
#include <sage/attention/numerics/dense16_backward_sm80.cuh>
#include <sage/attention/numerics/dense16_backward_sm90.cuh>
#include <sage/attention/numerics/dense16_backward_sm90_channel_parts.cuh>
#include <sage/attention/numerics/dense16_backward_sm90_dq_warpgroup.cuh>
#include <sage/attention/numerics/sagebwd_backward_sm80.cuh>
#include <sage/attention/numerics/sagebwd_backward_sm90_dq_warpgroup.cuh>

#include <concepts>

using namespace sage;
using attention::NoScoreMod, attention::Nvfp4Probabilities, attention::PlainProbabilities, attention::ScoresOfCodes,
    attention::ScoresOfRows, attention::SoftcapAndAlibi;

constexpr int FINISH_THREADS = 256;

namespace {

// A mainloop and its numerics. Hopper has several mainloops for 16-bit matmuls, because the best division of work
// among warpgroups depends on head_dim: docs/kernels/log.md.
template <params::Mainloop>
struct Backward;

template <>
struct Backward<params::BACKWARD_SM80> {
  template <class T, int D, int V, params::Plan PLAN, class P, class S, class Mod = NoScoreMod>
    requires(V == D)
  using Dense16 = attention::Dense16BackwardSm80<T, D, PLAN, P, S, Mod>;
  template <class T, int D, int V, params::Plan PLAN, bool GENERAL>
  using SageBwd = attention::SageBwdBackwardSm80<T, D, PLAN, GENERAL>;
  template <class Numerics, class Queries>
  static __device__ __forceinline__ void run(const params::Backward& p) {
    attention::backward_sm80<Numerics, Queries>(p);
  }
};

template <>
struct Backward<params::BACKWARD_SM90> {
  template <class T, int D, int V, params::Plan PLAN, class P, class S, class Mod = NoScoreMod>
    requires(V == D)
  using Dense16 = attention::Dense16BackwardSm90<T, D, PLAN, P, S, Mod>;
  template <class Numerics, class Queries>
  static __device__ __forceinline__ void run(const params::Backward& p) {
    attention::backward_sm90<Numerics, Queries>(p);
  }
};

template <>
struct Backward<params::BACKWARD_SM90_DQ_WARPGROUP> {
  template <class T, int D, int V, params::Plan PLAN, class P, class S, class Mod = NoScoreMod>
    requires(V == D)
  using Dense16 = attention::Dense16BackwardSm90DqWarpgroup<T, D, PLAN, P, S, Mod>;
  template <class T, int D, int V, params::Plan PLAN, bool GENERAL>
    requires(!GENERAL)
  using SageBwd = attention::SageBwdBackwardSm90DqWarpgroup<T, D, PLAN>;
  template <class Numerics, class Queries>
  static __device__ __forceinline__ void run(const params::Backward& p) {
    attention::backward_sm90_dq_warpgroup<Numerics, Queries>(p);
  }
};

template <>
struct Backward<params::BACKWARD_SM90_CHANNEL_PARTS> {
  template <class T, int D, int V, params::Plan PLAN, class P, class S, class Mod = NoScoreMod>
    requires std::same_as<P, PlainProbabilities>
  using Dense16 = attention::Dense16BackwardSm90ChannelParts<T, D, PLAN, S, V, Mod>;
  template <class Numerics, class Queries>
  static __device__ __forceinline__ void run(const params::Backward& p) {
    attention::backward_sm90_channel_parts<Numerics, Queries>(p);
  }
};

}  // namespace

#define ENTRY(name, PLAN, Queries, T, D, V, NUMERICS, ...)                                                               \
  extern "C" __global__ void __launch_bounds__(PLAN.threads, 1) name(const __grid_constant__ params::Backward p) {       \
    using Mainloop = Backward<PLAN.mainloop>;                                                                            \
    Mainloop::run<Mainloop::NUMERICS<T, D, V, PLAN, __VA_ARGS__>, attention::Queries>(p);                                \
  }

// The entry points of a kernel, each with its plan. The arguments after V: NUMERICS (a member template of `Backward`),
// then the template arguments of NUMERICS that follow PLAN.
#define KERNEL_OF_WIDTHS(kernel, suffix, T, D, V, ...)                                                                      \
  ENTRY(kernel##_##suffix, params::plan(#kernel, {D, V}, params::EVERY), EveryQuery, T, D, V, __VA_ARGS__)               \
  ENTRY(kernel##_sparse_##suffix, params::plan(#kernel, {D, V}, params::LISTED), ListedQueries, T, D, V, __VA_ARGS__)     \
  ENTRY(kernel##_window_##suffix, params::plan(#kernel, {D, V}, params::LISTED), WindowQueries, T, D, V, __VA_ARGS__)
#define KERNEL(kernel, type, T, D, ...) KERNEL_OF_WIDTHS(kernel, type##_##D, T, D, D, __VA_ARGS__)
// Like KERNEL_OF_WIDTHS, plus the entry point for a soft cap and ALiBi.
#define DENSE16_OF_WIDTHS(kernel, suffix, T, D, V, ...)                                                                     \
  KERNEL_OF_WIDTHS(kernel, suffix, T, D, V, Dense16, __VA_ARGS__)                                                           \
  ENTRY(kernel##_score_mod_##suffix, params::plan(#kernel, {D, V}, params::SCORE_MOD), WindowQueries, T, D, V, Dense16,     \
        __VA_ARGS__, SoftcapAndAlibi)
#define DENSE16_KERNEL(kernel, type, T, D, ...) DENSE16_OF_WIDTHS(kernel, type##_##D, T, D, D, __VA_ARGS__)

#define DENSE16(type, T, D) DENSE16_KERNEL(attn_bwd_dense16, type, T, D, PlainProbabilities, ScoresOfRows<T, D>)
#define SCORES(type, T, D) DENSE16_KERNEL(attn_bwd_sagebwd_s, type, T, D, PlainProbabilities, ScoresOfCodes<T, D>)
#define HEAD_DIM(type, T, D)                                                                       \
  DENSE16(type, T, D)                                                                              \
  SCORES(type, T, D)                                                                               \
  DENSE16_KERNEL(attn_bwd_attn_qat, type, T, D, Nvfp4Probabilities, ScoresOfRows<T, D>)            \
  KERNEL(attn_bwd_sagebwd, type, T, D, SageBwd, false)                                             \
  KERNEL(attn_bwd_sagebwd_general, type, T, D, SageBwd, true)

HEAD_DIM(bf16, __nv_bfloat16, 64)
HEAD_DIM(bf16, __nv_bfloat16, 128)
HEAD_DIM(f16, __half, 64)
HEAD_DIM(f16, __half, 128)
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SM90(type, T)                                                                                                      \
  DENSE16(type, T, 192)                                                                                                    \
  DENSE16_OF_WIDTHS(attn_bwd_dense16, type##_192_128, T, 192, 128, PlainProbabilities, ScoresOfRows<T, 192>)                  \
  SCORES(type, T, 256)
SM90(bf16, __nv_bfloat16)
SM90(f16, __half)
#endif
#ifdef SAGE_HEAD_DIM_256
DENSE16(bf16, __nv_bfloat16, 256)
DENSE16(f16, __half, 256)
#endif

namespace {

// Runs after the mainloop: converts the sums of dQ, stored in fragment order, to dQ = softmax_scale * sums. A thread
// block converts one tile of one (head, segment).
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
  using Layout = attention::DqLayout<D>;
  const float4* sums = reinterpret_cast<const float4*>(p.dq_accum + tile * Layout::TILE_FLOATS);
  // The fragments become rows in shared memory first, so that dQ is written in whole sectors of global memory.
  constexpr int CHUNKS = D / 8, PITCH = D * 2 + 16;  // neighbouring rows start four banks apart
  __shared__ __align__(16) unsigned char rows[attention::TILE * PITCH];
  float scale = shape.softmax_scale;
#pragma unroll 4
  for (int i = threadIdx.x; i < attention::TILE * D / 4; i += blockDim.x) {
    float4 x = sums[i];
    int lane = i % 32;
    auto [strip, n] = Layout(p.dq_parts).fragment(i / 32);
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
