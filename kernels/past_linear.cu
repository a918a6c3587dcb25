// Linear attention of each block of queries over the blocks of keys before it (SLA2, arXiv 2602.12675): sums of states
// along the sequence, and matmuls with the states. The attention is causal, with as many keys as queries.
//
// A state is H = sum phi(k)^T v and z = sum phi(k), where phi is the softmax over channels. Queries read states
// that are summed from the front. In the backward, keys read states that are summed from the end: there the "keys" are
// the queries, and the "values" are the gradients of the queries' outputs. The same kernels compute both kinds.
//
// H is stored in 16 bit, z in f32. The blocks are divided into chunks (past_linear/states.cuh). The stored state of a
// block sums those tokens of its chunk that are before the block (in the backward: after it); a reader adds the sum of
// the earlier (later) chunks. The states that queries read are stored times a power of two, inverse_blocks / BLOCK
// (past_linear/block.cuh). The reader's sum is then roughly a mean over all earlier tokens, and does not overflow f16.
#include <sage/past_linear/backward.cuh>
#include <sage/past_linear/forward.cuh>
#include <sage/past_linear/states.cuh>

using namespace sage;
using past_linear::STATE_THREADS;
using past_linear::THREADS;

#define KERNEL(COUNT, BLOCKS, name, function, suffix, ...)                                                                \
  extern "C" __global__ void __launch_bounds__(COUNT, BLOCKS) name##_##suffix(const __grid_constant__ params::Linear p) { \
    past_linear::function<__VA_ARGS__>(p);                                                                                \
  }
#define HEAD_DIM(type, T, D)                                                      \
  KERNEL(STATE_THREADS, 1, linear_scan_blocks, scan_blocks, type##_##D, T, D)     \
  KERNEL(THREADS, 4, linear_scan_chunks, scan_chunks, type##_##D, T, D)           \
  KERNEL(THREADS, 2, linear_forward, forward, type##_##D, T, D)                   \
  KERNEL(THREADS, 2, linear_backward_queries, backward_queries, type##_##D, T, D) \
  KERNEL(THREADS, 2, linear_backward_keys, backward_keys, type##_##D, T, D)
HEAD_DIM(bf16, __nv_bfloat16, 64)
HEAD_DIM(bf16, __nv_bfloat16, 128)
HEAD_DIM(f16, __half, 64)
HEAD_DIM(f16, __half, 128)
