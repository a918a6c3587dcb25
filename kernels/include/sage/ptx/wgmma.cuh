// Matrix instructions of a warpgroup, sm_90a, one per function: PTX ISA, "Asynchronous Multiply-and-Accumulate
// Instruction: wgmma.mma_async". All four warps of a warpgroup call the functions. A wgmma computes 64 rows of D, and
// runs asynchronously.
//
// Warp w of the warpgroup has rows 16w to 16w + 15 of D, and of A if A is in registers, in the fragments that `mma.cuh`
// describes for one warp. A descriptor locates an operand in shared memory. Registers and shared memory of a wgmma must
// not be accessed until wgmma_wait has waited for its group.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace sage::ptx {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_WGMMA = true;
#else
constexpr bool HAS_WGMMA = false;
#endif

// The descriptor (PTX ISA, "Matrix Descriptor Format") of an operand whose rows run along the reduction. They have
// ROW_BYTES = 64 or 128 bytes, and are swizzled as in layout/swizzle.cuh. The operand starts at a multiple of
// eight rows in a matrix that is aligned to 1024 bytes, because the hardware's swizzle is a function of the address. A
// descriptor larger by 2 starts 32 bytes further along the rows.
template <int ROW_BYTES>
__device__ __forceinline__ uint64_t row_descriptor(uint32_t shared) {
  static_assert(ROW_BYTES == 64 || ROW_BYTES == 128, "one swizzled line");
  constexpr uint64_t SWIZZLE = ROW_BYTES == 128 ? 1 : 2;
  constexpr uint64_t EIGHT_ROWS = 8 * ROW_BYTES / 16;
  return SWIZZLE << 62 | EIGHT_ROWS << 32 | (1 << 16 | shared >> 4);  // the leading offset, 1, is unused
}

// The descriptor of a transposed operand of 16-bit elements. The operand has one row of 64 elements (128 bytes,
// swizzled) per index of the reduction. A descriptor larger by COLUMN_STEP starts 16 rows further.
__device__ __forceinline__ uint64_t column_descriptor(uint32_t shared) { return row_descriptor<128>(shared); }
// The descriptor of a transposed operand with more than 64 columns. Its panels of 64 columns are PANEL_BYTES apart;
// this distance is the descriptor's field "leading dimension byte offset".
template <int PANEL_BYTES>
__device__ __forceinline__ uint64_t column_descriptor_of_panels(uint32_t shared) {
  constexpr uint64_t ONE = 1, APART = PANEL_BYTES / 16;
  return column_descriptor(shared) + ((APART - ONE) << 16);
}
constexpr uint64_t COLUMN_STEP = 16 * 128 / 16;

// wgmma.fence (PTX ISA, "Asynchronous Multiply-and-Accumulate Instruction: wgmma.fence"): all warps of the warpgroup
// call it before their first wgmma, and whenever they have accessed the registers of the next wgmma's accumulator or A
// operand. It orders these accesses before the wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// wgmma.commit_group (PTX ISA, "Asynchronous Multiply-and-Accumulate Instruction: wgmma.commit_group"): makes one group
// of the wgmmas that the warpgroup has issued since its last commit.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// The registers per thread that the compiler allocates if one thread block fills a multiprocessor.
template <int THREADS>
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;

// setmaxnreg (PTX ISA, "Miscellaneous Instructions: setmaxnreg"): all warps of a warpgroup call it once to change their
// registers per thread from LAUNCH_REGISTERS to REGISTERS, a multiple of 8. setmaxnreg.inc waits until enough registers
// have been released, so all warpgroups' registers together must fit the thread block's allocation.
template <int REGISTERS, int THREADS>
__device__ __forceinline__ void setmaxnreg() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int START = LAUNCH_REGISTERS<THREADS>;
  if constexpr (REGISTERS > START) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
  if constexpr (REGISTERS < START) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
#else
  __trap();
#endif
}

// Stops the compiler from moving accesses to the registers of `d` across this point. The compiler does not know that
// wgmmas in flight access these registers.
template <int N>
__device__ __forceinline__ void fence_operand(int (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+r"(d[n][e])::"memory");
}
template <int N>
__device__ __forceinline__ void fence_operand(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(d[n][e])::"memory");
}

// Marks the accumulator as undefined, so that a wgmma with scale-d = 0 has no false dependency on it.
template <int N>
__device__ __forceinline__ void discard_operand(int (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "=r"(d[n][e])::"memory");
}
template <int N>
__device__ __forceinline__ void discard_operand(float (&d)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "=f"(d[n][e])::"memory");
}

// A part of an accumulator, for one wgmma: M of its N tiles of eight columns, from tile `first` on.
template <int M, int N>
__device__ __forceinline__ float (&part(float (&d)[N][4], int first))[M][4] {
  return *reinterpret_cast<float(*)[M][4]>(&d[first]);
}

// wgmma.wait_group (PTX ISA, "Asynchronous Multiply-and-Accumulate Instruction: wgmma.wait_group"): the warpgroup waits
// until at most PENDING of its groups are incomplete. `d` is the accumulator of a completed group; fence_operand
// keeps the compiler from reading `d` earlier.
template <int PENDING, class D>
__device__ __forceinline__ void wgmma_wait(D& d) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  fence_operand(d);
}

// Operands of the asm statements. SAGE_16, .. SAGE_128 list the accumulator's registers d[0][0], d[0][1], .., each
// bound by `BIND`: SAGE_INT or SAGE_FLOAT. SAGE_PLACES_* are the registers' placeholders in the asm text: %0, %1, ..
#define SAGE_INT(x) "+r"(x)
#define SAGE_FLOAT(x) "+f"(x)
#define SAGE_FOUR(BIND, n) BIND(d[n][0]), BIND(d[n][1]), BIND(d[n][2]), BIND(d[n][3])
#define SAGE_16(BIND) SAGE_FOUR(BIND, 0), SAGE_FOUR(BIND, 1), SAGE_FOUR(BIND, 2), SAGE_FOUR(BIND, 3)
#define SAGE_32(BIND) \
  SAGE_16(BIND), SAGE_FOUR(BIND, 4), SAGE_FOUR(BIND, 5), SAGE_FOUR(BIND, 6), SAGE_FOUR(BIND, 7)
#define SAGE_64(BIND)                                                                                         \
  SAGE_32(BIND), SAGE_FOUR(BIND, 8), SAGE_FOUR(BIND, 9), SAGE_FOUR(BIND, 10), SAGE_FOUR(BIND, 11),             \
      SAGE_FOUR(BIND, 12), SAGE_FOUR(BIND, 13), SAGE_FOUR(BIND, 14), SAGE_FOUR(BIND, 15)
#define SAGE_96(BIND)                                                                                              \
  SAGE_64(BIND), SAGE_FOUR(BIND, 16), SAGE_FOUR(BIND, 17), SAGE_FOUR(BIND, 18), SAGE_FOUR(BIND, 19),             \
      SAGE_FOUR(BIND, 20), SAGE_FOUR(BIND, 21), SAGE_FOUR(BIND, 22), SAGE_FOUR(BIND, 23)
#define SAGE_128(BIND)                                                                                             \
  SAGE_96(BIND), SAGE_FOUR(BIND, 24), SAGE_FOUR(BIND, 25), SAGE_FOUR(BIND, 26), SAGE_FOUR(BIND, 27),             \
      SAGE_FOUR(BIND, 28), SAGE_FOUR(BIND, 29), SAGE_FOUR(BIND, 30), SAGE_FOUR(BIND, 31)
#define SAGE_PLACES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SAGE_PLACES_32 \
  SAGE_PLACES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SAGE_PLACES_64                                                                                             \
  SAGE_PLACES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
                 "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SAGE_PLACES_96                                                                                               \
  SAGE_PLACES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, " \
                 "%83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SAGE_PLACES_128                                                                                              \
  SAGE_PLACES_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "    \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SAGE_A_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
#define SAGE_WGMMA(shape) "wgmma.mma_async.sync.aligned." shape " "

// wgmma.mma_async m64nNk32 of INT8 operands: d += A B^T with `add`, otherwise d = A B^T; `add` is constant after
// unrolling. `d` is an int[N / 8][4]. B is s8. A is s8 in shared memory, and s8 or u8 in registers.
#define SAGE_WGMMA_CODES(columns, type, places, binds, a_text, b_at, add_at, ...)                                       \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " add_at ", 0;" SAGE_WGMMA("m64n" columns "k32.s32." type ".s8") "{" places \
               "}, " a_text ", " b_at ", p;}"                                                                           \
               : binds(SAGE_INT)                                                                                        \
               : __VA_ARGS__, "l"(b), "r"(int(add)))

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define SAGE_ON_HOPPER(...) __VA_ARGS__
#else
#define SAGE_ON_HOPPER(...) __trap();
#endif

// The next two macros define wgmma_s8 and wgmma_u8 for a D with `columns` columns. `registers` is the number of D's
// registers per thread. The bodies are in SAGE_ON_HOPPER because a macro cannot contain an #if.
#define SAGE_CODES_BY_DESCRIPTOR(columns, registers, a_at, b_at, add_at)                                                  \
  __device__ __forceinline__ void wgmma_s8(int (&d)[columns / 8][4], uint64_t a, uint64_t b, bool add) {                  \
    SAGE_ON_HOPPER(                                                                                                       \
        SAGE_WGMMA_CODES(#columns, "s8", SAGE_PLACES_##registers, SAGE_##registers, a_at, b_at, add_at, "l"(a));)         \
  }
#define SAGE_CODES_IN_REGISTERS(type, columns, registers, a_text, b_at, add_at)                                           \
  __device__ __forceinline__ void wgmma_##type(int (&d)[columns / 8][4], const uint32_t (&a)[4], uint64_t b, bool add) {  \
    SAGE_ON_HOPPER(SAGE_WGMMA_CODES(#columns, #type, SAGE_PLACES_##registers, SAGE_##registers, a_text, b_at, add_at,     \
                                    SAGE_A_REGISTERS);)                                                                   \
  }
SAGE_CODES_BY_DESCRIPTOR(32, 16, "%16", "%17", "%18")
SAGE_CODES_BY_DESCRIPTOR(64, 32, "%32", "%33", "%34")
SAGE_CODES_BY_DESCRIPTOR(128, 64, "%64", "%65", "%66")
SAGE_CODES_IN_REGISTERS(s8, 32, 16, "{%16, %17, %18, %19}", "%20", "%21")
SAGE_CODES_IN_REGISTERS(s8, 64, 32, "{%32, %33, %34, %35}", "%36", "%37")
SAGE_CODES_IN_REGISTERS(u8, 64, 32, "{%32, %33, %34, %35}", "%36", "%37")
SAGE_CODES_IN_REGISTERS(u8, 128, 64, "{%64, %65, %66, %67}", "%68", "%69")

// wgmma.mma_async m64nNk16 of 16-bit operands: d += A B^T, or d = A B^T without ADD. With A_TRANSPOSED or B_TRANSPOSED,
// the operand is stored transposed, one row per index of the reduction: see column_descriptor.
#define SAGE_WGMMA_16(columns, type, places, binds, a_at, b_at, add_at, a_transposed_at, b_transposed_at)                 \
  asm volatile(SAGE_WGMMA("m64n" columns "k16.f32." type "." type) "{" places "}, " a_at ", " b_at ", " add_at    \
                                                                  ", 1, 1, " a_transposed_at ", " b_transposed_at ";"    \
               : binds(SAGE_FLOAT)                                                                               \
               : "l"(a), "l"(b), "n"(int(ADD)), "n"(int(A_TRANSPOSED)), "n"(int(B_TRANSPOSED)))
#define SAGE_16_BY_DESCRIPTOR(columns, registers, a_at, b_at, add_at, a_transposed_at, b_transposed_at)                        \
  template <class T, bool ADD = true, bool A_TRANSPOSED = false, bool B_TRANSPOSED = false>                                    \
  __device__ __forceinline__ void wgmma_16(float (&d)[columns / 8][4], uint64_t a, uint64_t b) {                       \
    SAGE_ON_HOPPER(if constexpr (std::is_same_v<T, __half>)                                                            \
                       SAGE_WGMMA_16(#columns, "f16", SAGE_PLACES_##registers, SAGE_##registers, a_at, b_at, add_at,   \
                                     a_transposed_at, b_transposed_at);                                                        \
                   else SAGE_WGMMA_16(#columns, "bf16", SAGE_PLACES_##registers, SAGE_##registers, a_at, b_at, add_at, \
                                      a_transposed_at, b_transposed_at);)                                                      \
  }
SAGE_16_BY_DESCRIPTOR(32, 16, "%16", "%17", "%18", "%19", "%20")
SAGE_16_BY_DESCRIPTOR(64, 32, "%32", "%33", "%34", "%35", "%36")
SAGE_16_BY_DESCRIPTOR(128, 64, "%64", "%65", "%66", "%67", "%68")
#undef SAGE_16_BY_DESCRIPTOR
#undef SAGE_WGMMA_16

// wgmma.mma_async m64nNk16 as above, but with A in registers. B_TRANSPOSED is true by default.
#define SAGE_WGMMA_16(columns, type, places, binds, a_text, b_at, add_at, b_transposed_at)                                     \
  asm volatile(SAGE_WGMMA("m64n" columns "k16.f32." type "." type) "{" places "}, " a_text ", " b_at ", " add_at            \
                                                                  ", 1, 1, " b_transposed_at ";"                               \
               : binds(SAGE_FLOAT)                                                                                         \
               : SAGE_A_REGISTERS, "l"(b), "n"(int(ADD)), "n"(int(B_TRANSPOSED)))
#define SAGE_16_IN_REGISTERS(columns, registers, a_text, b_at, add_at, b_transposed_at)                                      \
  template <class T, bool ADD = true, bool B_TRANSPOSED = true>                                                              \
  __device__ __forceinline__ void wgmma_16(float (&d)[columns / 8][4], const uint32_t (&a)[4], uint64_t b) {             \
    SAGE_ON_HOPPER(if constexpr (std::is_same_v<T, __half>)                                                              \
                       SAGE_WGMMA_16(#columns, "f16", SAGE_PLACES_##registers, SAGE_##registers, a_text, b_at, add_at,   \
                                     b_transposed_at);                                                                       \
                   else SAGE_WGMMA_16(#columns, "bf16", SAGE_PLACES_##registers, SAGE_##registers, a_text, b_at, add_at, \
                                      b_transposed_at);)                                                                     \
  }
SAGE_16_IN_REGISTERS(64, 32, "{%32, %33, %34, %35}", "%36", "%37", "%38")
SAGE_16_IN_REGISTERS(128, 64, "{%64, %65, %66, %67}", "%68", "%69", "%70")
SAGE_16_IN_REGISTERS(192, 96, "{%96, %97, %98, %99}", "%100", "%101", "%102")
SAGE_16_IN_REGISTERS(256, 128, "{%128, %129, %130, %131}", "%132", "%133", "%134")
#undef SAGE_16_IN_REGISTERS
#undef SAGE_WGMMA_16

#undef SAGE_INT
#undef SAGE_FLOAT
#undef SAGE_FOUR
#undef SAGE_16
#undef SAGE_32
#undef SAGE_64
#undef SAGE_96
#undef SAGE_128
#undef SAGE_PLACES_16
#undef SAGE_PLACES_32
#undef SAGE_PLACES_64
#undef SAGE_PLACES_96
#undef SAGE_PLACES_128
#undef SAGE_A_REGISTERS
#undef SAGE_WGMMA
#undef SAGE_WGMMA_CODES
#undef SAGE_ON_HOPPER
#undef SAGE_CODES_BY_DESCRIPTOR
#undef SAGE_CODES_IN_REGISTERS

}  // namespace sage::ptx
