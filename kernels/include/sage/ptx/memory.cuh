// Moving data: global to shared memory without registers, shared memory to fragments, sums into global memory.
#pragma once

#include <stdint.h>

namespace sage::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, asynchronously. Without `valid` it writes zeros and reads nothing.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0));
}

// Copies 4 bytes, asynchronously.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global));
}

__device__ __forceinline__ void store_16(uint32_t shared, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_16(uint32_t shared) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(shared)
               : "memory");
  return words;
}

// Closes the group of copies issued so far by this thread.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;"); }

// Waits until at most PENDING groups of this thread are under way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Waits for all copies of this thread.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// From Hopper on, a barrier in shared memory (8 bytes) that counts what is on its way: phase n, 0 and on, ends when all of
// `arrivals` have arrived and the bytes that they announced have come.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;" ::"r"(barrier), "r"(arrivals)
               : "memory");
#endif
}
// Arrives, and announces bytes that bulk copies bring.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
// One thread copies any number of bytes, a multiple of 16.
__device__ __forceinline__ void cp_async_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}
// One thread copies a tile of a tensor that a params::TensorMap (in the kernel's parameters) tells of, from a channel, token,
// head and batch entry on, into swizzled rows of 128 bytes.
__device__ __forceinline__ void cp_async_bulk_tensor(uint32_t shared, const void* map, int channel, int token, int head, int batch,
                                            uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          shared),
      "l"(map), "r"(channel), "r"(token), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
#endif
}
// One thread adds floats, a multiple of 16 bytes, from shared to global memory, asynchronously and in no particular order
// among blocks; what other threads wrote must have been published (`fence_proxy_async`) before.
__device__ __forceinline__ void cp_reduce_async_bulk(float* global, uint32_t shared, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
      "cp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
#endif
}
// Waits until all but PENDING of this thread's additions have read their shared memory; or until all are done.
template <int PENDING = 0>
__device__ __forceinline__ void cp_async_bulk_wait_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
#endif
}
__device__ __forceinline__ void cp_async_bulk_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
// Arrives when this thread's copies so far have come. Where there were ordinary stores among them, waits for that.
__device__ __forceinline__ void mbarrier_arrive_on_copies(uint32_t barrier, bool asynchronous) {
#if __CUDA_ARCH__ >= 900
  if (asynchronous) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
  } else {
    asm volatile("cp.async.wait_all; fence.proxy.async.shared::cta; mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier)
                 : "memory");
  }
#endif
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .pred open;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1;\n"
      "@!open bra again;}" ::"r"(barrier),
      "r"(phase & 1)
      : "memory");
#endif
}

// Four 8 x 8 matrices of 16-bit elements. Lanes 8i .. 8i + 8 give the addresses of the rows of matrix i; r[i] of lane
// (g, t) is bytes 4t .. 4t + 4 of row g. Eight rows of 16 bytes are as good for 8-bit elements.
__device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The same, each matrix transposed: r[i] of lane (g, t) is column g of rows 2t and 2t + 1. For 16-bit elements only.
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The way back: r[i] of lane (g, t) goes to bytes 4t .. 4t + 4 of row g of matrix i; addresses as for ldmatrix.
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

// Adds four neighbouring floats to global memory, in no particular order among threads. 16-byte aligned.
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

// A counter that orders blocks: reading it acquires, adding to it releases.
__device__ __forceinline__ int load_acquire(const int* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(int* at, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Waits for THREADS threads, whole warps, that name the same barrier (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Comes to such a barrier without waiting: for those who produce what the others wait for.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace sage::ptx
