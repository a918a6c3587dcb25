// Data movement and synchronization, one instruction per function: asynchronous copies from global to shared memory,
// mbarriers, loads of matmul fragments from shared memory, additions to global memory. Quoted titles are sections of
// the PTX ISA manual. On architectures before sm_90, functions for sm_90 execute `trap`; no kernel for these
// architectures calls them.
#pragma once

#include <stdint.h>

namespace sage::ptx {

// cvta, "Data Movement and Conversion Instructions: cvta": converts `pointer` to an address in the shared window. The
// functions below take such addresses.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// cp.async.cg, "Data Movement and Conversion Instructions: cp.async": the calling thread copies 16 bytes
// asynchronously, bypassing the L1 cache. Without `valid` it writes zeros and reads nothing. The thread itself sees the
// result after cp_async_wait; other threads see it after a barrier that follows that wait.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0));
}

// Like cp_async_16, but through the L1 cache (cp.async.ca): the calling thread copies 4 bytes, which .cg cannot.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global));
}

// st.shared.v4, "Data Movement and Conversion Instructions: st": the calling thread stores 16 bytes. Other threads see
// them after a barrier; bulk copies and wgmma see them after fence_proxy_async and a barrier.
__device__ __forceinline__ void store_16(uint32_t shared, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

// st.shared, "Data Movement and Conversion Instructions: st": the calling thread stores 4 bytes.
__device__ __forceinline__ void store_4(uint32_t shared, uint32_t word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(word) : "memory");
}

// ld.shared, "Data Movement and Conversion Instructions: ld": the calling thread loads a float.
__device__ __forceinline__ float load_float(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}

// ld.shared.v4, "Data Movement and Conversion Instructions: ld": the calling thread loads 16 bytes.
__device__ __forceinline__ uint4 load_16(uint32_t shared) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(shared)
               : "memory");
  return words;
}

// "Data Movement and Conversion Instructions: cp.async.commit_group": closes the group of cp.async copies that this
// thread has issued so far.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

// "Data Movement and Conversion Instructions: cp.async.wait_group": waits until at most PENDING of this thread's groups
// are incomplete. A barrier must follow before other threads read what the completed groups copied.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// "Data Movement and Conversion Instructions: cp.async.wait_all": waits for all cp.async copies of this thread.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// elect.sync ("Parallel Synchronization and Communication Instructions: elect.sync"): all lanes of a warp call it; it
// returns true in one lane, always the same. ptxas then knows that only one lane issues the asynchronous instructions
// that follow. If code selects the lane by its index, ptxas generates a loop around each instruction. From sm_90 on.
__device__ __forceinline__ bool elect() {
#if __CUDA_ARCH__ >= 900
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
#else
  __trap();
  return false;
#endif
}

// "Parallel Synchronization and Communication Instructions: mbarrier.init". One thread initializes an mbarrier, 8 bytes
// of shared memory. A phase (counted from 0) completes after `arrivals` arrivals and all bytes that expect_tx
// announced. The fence makes the initialized mbarrier visible to the async proxy; __syncthreads makes it visible to
// the other threads. From sm_90 on.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;" ::"r"(barrier), "r"(arrivals)
               : "memory");
#else
  __trap();
#endif
}
// "Parallel Synchronization and Communication Instructions: mbarrier.arrive", with .expect_tx: one arrival, which
// announces the bytes that bulk copies will write. The producer thread calls it before it issues the copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#else
  __trap();
#endif
}
// "Data Movement and Conversion Instructions: cp.async.bulk": one thread copies `bytes`, a multiple of 16, between
// addresses that are multiples of 16. When the copy is done, `bytes` count as arrived on `barrier`: a thread sees
// the data once mbarrier_wait for the barrier's current phase returns.
__device__ __forceinline__ void cp_async_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
#else
  __trap();
#endif
}
// "Data Movement and Conversion Instructions: cp.async.bulk.tensor" (TMA): one thread copies a tile, which starts at
// the given channel, token, head and batch entry, into rows of 128 bytes with the 128-byte swizzle. `map` describes the
// tensor: a params::TensorMap among the kernel's parameters. Completion and visibility are as for cp_async_bulk.
__device__ __forceinline__ void cp_async_bulk_tensor(uint32_t shared, const void* map, int channel, int token, int head, int batch,
                                            uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          shared),
      "l"(map), "r"(channel), "r"(token), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
#else
  __trap();
#endif
}
// "Data Movement and Conversion Instructions: cp.reduce.async.bulk": one thread adds floats, a multiple of 16 bytes,
// from shared to global memory, asynchronously and in no defined order, and commits the addition as a bulk
// group. Before the call, threads that wrote the shared memory must call fence_proxy_async and meet the calling thread
// at a barrier.
__device__ __forceinline__ void cp_reduce_async_bulk(float* global, uint32_t shared, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
#else
  __trap();
#endif
}
// "Data Movement and Conversion Instructions: cp.async.bulk.wait_group", with .read: waits until all but PENDING of the
// calling thread's bulk groups have read their shared memory, which may then be overwritten.
template <int PENDING = 0>
__device__ __forceinline__ void cp_async_bulk_wait_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
#else
  __trap();
#endif
}
// Like cp_async_bulk_wait_read, without .read: waits until all bulk groups of the calling thread have also written
// global memory.
__device__ __forceinline__ void cp_async_bulk_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#else
  __trap();
#endif
}
// "Parallel Synchronization and Communication Instructions: cp.async.mbarrier.arrive": the calling thread's arrival
// happens when its cp.async copies issued so far are complete; the thread does not wait. With .noinc, the `arrivals` of
// mbarrier_init include this arrival. `asynchronous` is false if the thread has also made ordinary stores: it then
// waits for its cp.async copies, fences the stores for the async proxy, and arrives.
__device__ __forceinline__ void mbarrier_arrive_on_copies(uint32_t barrier, bool asynchronous) {
#if __CUDA_ARCH__ >= 900
  if (asynchronous) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  } else {
    asm volatile("cp.async.wait_all; fence.proxy.async.shared::cta; mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
  }
#else
  __trap();
#endif
}
// "Parallel Synchronization and Communication Instructions: mbarrier.arrive": one arrival of the calling thread, with
// release semantics.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
  __trap();
#endif
}
// "Parallel Synchronization and Communication Instructions: mbarrier.test_wait, mbarrier.try_wait": the calling thread
// waits until phase `phase` is complete. Only the parity is passed, so a waiting thread must not be more than one phase
// behind. Acquires what the arriving threads wrote and what bulk copies wrote.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .pred open;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1;\n"
      "@!open bra again;}" ::"r"(barrier),
      "r"(phase & 1)
      : "memory");
#else
  __trap();
#endif
}

// fence.proxy.async (PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence"): every thread
// that wrote shared memory by ordinary stores or cp.async calls it, then reaches a barrier; wgmmas and bulk copies that
// are issued after the barrier see the writes. From sm_90 on.
__device__ __forceinline__ void fence_proxy_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  __trap();
#endif
}
// fence.proxy.async of every state space: orders this thread's earlier accesses to global memory, such as the load
// that acquired a semaphore, before the bulk operations that it issues from here on.
__device__ __forceinline__ void fence_proxy_async_all() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#else
  __trap();
#endif
}

// "Warp-level matrix load instruction: ldmatrix": all lanes of the warp load four 8 x 8 matrices of 16-bit elements.
// Lanes 8i to 8i + 7 provide the addresses of the rows of matrix i; r[i] of lane (g, t) = (lane / 4, lane % 4) receives
// bytes 4t to 4t + 3 of row g. A matrix can also be eight rows of 16 8-bit elements.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// ldmatrix with .trans, each matrix transposed: r[i] of lane (g, t) receives column g of rows 2t and 2t + 1. Only for
// 16-bit elements.
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// "Warp-level matrix store instruction: stmatrix", the inverse of ldmatrix: each lane of the warp, lane (g, t) =
// (lane / 4, lane % 4), stores its r[i] to bytes 4t to 4t + 3 of row g of matrix i. Lanes provide addresses as for
// ldmatrix. Before sm_90 each lane gets the row's address by a shuffle and stores four bytes. Other warps see the
// result after a barrier.
__device__ __forceinline__ void stmatrix(const uint32_t (&r)[4], uint32_t address, int lane) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t row = __shfl_sync(~0u, address, i * 8 + lane / 4);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + 4 * (lane & 3)), "r"(r[i]) : "memory");
  }
#endif
}

// "Parallel Synchronization and Communication Instructions: red": the calling thread adds four neighbouring floats to
// global memory, atomically, in no defined order among threads. `at` is 16-byte aligned; before sm_90 the addition
// needs four instructions.
__device__ __forceinline__ void red_add_4(float* at, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at), "f"(a) : "memory");
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at + 1), "f"(b) : "memory");
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at + 2), "f"(c) : "memory");
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at + 3), "f"(d) : "memory");
#endif
}

// ld.acquire.gpu, "Data Movement and Conversion Instructions: ld": one thread reads a semaphore. If the load
// reads a sum that includes a thread's add_release, the thread's writes before that add_release are visible afterwards.
__device__ __forceinline__ int load_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// red.release.gpu, "Parallel Synchronization and Communication Instructions: red": one thread adds to a semaphore,
// without a result. It also releases the earlier writes of other threads, if these threads call __threadfence after the
// writes and then meet the calling thread at a barrier.
__device__ __forceinline__ void add_release(int* at, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// bar.sync, "Parallel Synchronization and Communication Instructions: bar, barrier": waits until `threads` threads, in
// whole warps, have reached named barrier `id` by sync or arrive; `id` is 1 to 15, since 0 is __syncthreads. Shared
// memory that the arriving threads wrote before is then visible to the threads that waited.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive, same section as bar.sync: counts the calling warps at named barrier `id` without waiting. A producer
// calls it after its writes; the consumers wait by named_barrier_sync with the same `threads`.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace sage::ptx
