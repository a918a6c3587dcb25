// The tcgen05 instructions, for sm_100 and sm_103 (architecture family 10): PTX ISA, "TensorCore 5th Generation Family
// Instructions".
//
// Tensor memory has 128 lanes of 512 columns, 4 bytes each, per multiprocessor. An address is lane << 16 | column. Warp
// w of a thread block can access only lanes 32 (w % 4) to 32 (w % 4) + 31. One thread issues the MMAs and the copies to
// tensor memory. Both run asynchronously and read shared memory through the async proxy. tcgen05_commit turns their
// completion into an arrival at an mbarrier. Any other ordering between threads needs tcgen05_fence_before and
// tcgen05_fence_after around the synchronization.
#pragma once

#include <sage/ptx/tcgen05_descriptors.cuh>
#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ == 1000)
#define SAGE_HAS_TCGEN05 1
#else
#define SAGE_HAS_TCGEN05 0
#endif

namespace sage::ptx {

// tcgen05.alloc ("Tensor Memory Allocation and Management Instructions"): one warp allocates COLUMNS columns (a power
// of two from 32 on), and writes their address to shared memory. The warp waits until the multiprocessor has enough
// free columns. After allocating it gives up the permit to allocate, so that other thread blocks can allocate.
template <int COLUMNS>
__device__ __forceinline__ void tcgen05_alloc(uint32_t shared) {
#if SAGE_HAS_TCGEN05
  asm volatile(
      "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;\n"
      "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::"r"(shared),
      "n"(COLUMNS)
      : "memory");
#else
  __trap();
#endif
}

// tcgen05.dealloc ("Tensor Memory Allocation and Management Instructions"): the warp that allocated the columns frees
// them after their last use. A thread block must free its columns before it ends.
template <int COLUMNS>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t address) {
#if SAGE_HAS_TCGEN05
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(COLUMNS) : "memory");
#else
  __trap();
#endif
}

// tcgen05.fence::before_thread_sync ("Tensorcore 5th Generation Specialized Synchronization Operations:
// tcgen05.fence"): the calling thread's earlier tcgen05 instructions are ordered before its later synchronization with
// other threads.
__device__ __forceinline__ void tcgen05_fence_before() {
#if SAGE_HAS_TCGEN05
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
#else
  __trap();
#endif
}

// tcgen05.fence::after_thread_sync (section "tcgen05.fence"): the calling thread's later tcgen05 instructions are
// ordered after its earlier synchronization with other threads.
__device__ __forceinline__ void tcgen05_fence_after() {
#if SAGE_HAS_TCGEN05
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
#else
  __trap();
#endif
}

// tcgen05.commit ("Tensorcore 5th Generation of async synchronization mechanism: tcgen05.commit"): one arrival at the
// mbarrier when all asynchronous tcgen05 instructions that this thread has issued so far are complete. The commit
// implies tcgen05.fence::before_thread_sync.
__device__ __forceinline__ void tcgen05_commit(uint32_t mbarrier) {
#if SAGE_HAS_TCGEN05
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(mbarrier) : "memory");
#else
  __trap();
#endif
}

// tcgen05.ld ("Tensorcore 5th Generation Data Movement Instructions: tcgen05.ld"), shape 32x32b, and the wait for it
// (tcgen05.wait::ld). All threads of a warp pass the same address, which is in the first tensor memory lane that the
// warp can access. Each thread receives 32 columns of one tensor memory lane.
__device__ __forceinline__ void tcgen05_load(float (&x)[32], uint32_t address) {
#if SAGE_HAS_TCGEN05
  __syncwarp();  // the lanes may have left an mbarrier_wait at different times
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, [%32];\n"
      "tcgen05.wait::ld.sync.aligned;"
      : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]), "=f"(x[4]), "=f"(x[5]), "=f"(x[6]), "=f"(x[7]), "=f"(x[8]), "=f"(x[9]),
        "=f"(x[10]), "=f"(x[11]), "=f"(x[12]), "=f"(x[13]), "=f"(x[14]), "=f"(x[15]), "=f"(x[16]), "=f"(x[17]), "=f"(x[18]),
        "=f"(x[19]), "=f"(x[20]), "=f"(x[21]), "=f"(x[22]), "=f"(x[23]), "=f"(x[24]), "=f"(x[25]), "=f"(x[26]), "=f"(x[27]),
        "=f"(x[28]), "=f"(x[29]), "=f"(x[30]), "=f"(x[31])
      : "r"(address)
      : "memory");
#else
  __trap();
#endif
}

// The inverse of tcgen05_load: tcgen05.st, and the wait until this store completes (tcgen05.wait::st).
__device__ __forceinline__ void tcgen05_store(uint32_t address, const float (&x)[32]) {
#if SAGE_HAS_TCGEN05
  __syncwarp();
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], {%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,"
      "%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32};\n"
      "tcgen05.wait::st.sync.aligned;" ::"r"(address),
      "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]), "f"(x[8]), "f"(x[9]), "f"(x[10]),
      "f"(x[11]), "f"(x[12]), "f"(x[13]), "f"(x[14]), "f"(x[15]), "f"(x[16]), "f"(x[17]), "f"(x[18]), "f"(x[19]), "f"(x[20]),
      "f"(x[21]), "f"(x[22]), "f"(x[23]), "f"(x[24]), "f"(x[25]), "f"(x[26]), "f"(x[27]), "f"(x[28]), "f"(x[29]), "f"(x[30]),
      "f"(x[31])
      : "memory");
#else
  __trap();
#endif
}

// tcgen05.cp ("Tensorcore 5th Generation Data Movement Instructions: tcgen05.cp"), shape 32x128b with .warpx4: one
// thread copies 32 rows of 16 bytes from shared memory into four columns of tensor memory, once into each quarter of
// its 128 lanes. MMAs that the thread issues after the copy see the columns.
__device__ __forceinline__ void tcgen05_copy_scales(uint32_t address, uint64_t rows) {
#if SAGE_HAS_TCGEN05
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(rows) : "memory");
#else
  __trap();
#endif
}

// tcgen05.mma ("TensorCore 5th Generation Matrix Multiply and accumulate Operations: tcgen05.mma") with kind::mxf4nvf4
// and block scaling: one thread issues D = A B, or D += A B, for NVFP4 operands, with a reduction of 64. Row i of D is
// lane i of the columns from `d` on. Descriptors locate the rows of A and of B^T in shared memory. Scales are in tensor
// memory: four bytes for each row of 64 FP4 values, one byte for each 16 values. The scales of row i of A are in column
// i / 32, in lane i % 32 of each quarter of the 128 lanes. The scales of B's columns are stored in the same way.
__device__ __forceinline__ void tcgen05_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales,
                                                  uint32_t b_scales, bool accumulate) {
// PTX has two names for one scale per 16 values. Family-specific targets such as sm_100f accept only `block16`, which
// CUDA compilers before 12.9 do not know.
#if __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209
#define SAGE_GROUPS_OF_16 "block16"
#else
#define SAGE_GROUPS_OF_16 "scale_vec::4X"
#endif
#if SAGE_HAS_TCGEN05
  asm volatile(
      "{.reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %6, 0;\n"
      "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale." SAGE_GROUPS_OF_16 " [%0], %1, %2, %3, [%4], [%5], accumulate;}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(int(accumulate))
      : "memory");
#else
  __trap();
#endif
#undef SAGE_GROUPS_OF_16
}

}  // namespace sage::ptx
