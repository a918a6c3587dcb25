// Tests of the primitives that the attention kernels use. One warp or one warpgroup runs each test. The host compares
// the results with plain loops (candle-sage/src/cuda/selftest/).
#include <sage/layout/fragments.cuh>
#include <sage/layout/permutation.cuh>
#include <sage/ptx/mma.cuh>
#include <sage/ptx/wgmma.cuh>
#include <sage/ptx/convert.cuh>
#include <sage/quant/codes.cuh>
#include <sage/quant/nvfp4.cuh>

using namespace sage;

namespace {

struct Params {
  const unsigned char* a;
  const unsigned char* b;
  unsigned char* out;
};

// Copies row-major global memory to swizzled shared memory.
template <int ROWS, int ROW_BYTES>
__device__ uint32_t fill(unsigned char* shared, const unsigned char* from) {
  for (int i = threadIdx.x; i < ROWS * ROW_BYTES / 16; i += blockDim.x) {
    int row = i / (ROW_BYTES / 16), chunk = i % (ROW_BYTES / 16);
    *reinterpret_cast<uint4*>(shared + layout::swizzled<ROW_BYTES>(row, chunk)) = reinterpret_cast<const uint4*>(from)[i];
  }
  __syncwarp();
  return ptx::shared_address(shared);
}

template <class X>
__device__ void store(const X (&c)[2][4], X* out) {
  int lane = threadIdx.x;
  for (int n = 0; n < 2; ++n)
    for (int e = 0; e < 4; ++e) out[(lane / 4 + 8 * (e >> 1)) * 16 + n * 8 + 2 * (lane & 3) + (e & 1)] = c[n][e];
}

// out (16, 16) = A (16, BYTES) B (16, BYTES)^T of INT8 values. quant::multiply adds MAGIC; the last loop subtracts it.
template <int BYTES>
__device__ void product_codes(const Params& p) {
  __shared__ __align__(1024) unsigned char a[16 * BYTES], b[16 * BYTES];
  layout::ReaderA<BYTES> a_reader(fill<16, BYTES>(a, p.a), threadIdx.x);
  layout::ReaderB<BYTES> b_reader(fill<16, BYTES>(b, p.b), threadIdx.x);
  int c[2][4];
  for (int step = 0; step < BYTES / 32; ++step) {
    uint32_t x[4], y[4];
    a_reader.load(x, 0, step);
    b_reader.load(y, 0, step);
    quant::multiply(c[0], x, y[0], y[1], step == 0);
    quant::multiply(c[1], x, y[2], y[3], step == 0);
  }
  for (int n = 0; n < 2; ++n)
    for (int e = 0; e < 4; ++e) c[n][e] = int(__int_as_float(c[n][e]) - quant::MAGIC);
  store(c, reinterpret_cast<int*>(p.out));
}

// out (16, 16) = A B^T in bf16 over a reduction of 64. A and B are stored as (16, 64) or, transposed, as (64, 64), of
// which columns 16 to 31 are used.
template <bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ void product_16(const Params& p) {
  __shared__ __align__(1024) unsigned char a[64 * 128], b[64 * 128];
  uint32_t a_rows = fill<A_TRANSPOSED ? 64 : 16, 128>(a, p.a), b_rows = fill<B_TRANSPOSED ? 64 : 16, 128>(b, p.b);
  float c[2][4] = {};
  for (int step = 0; step < 4; ++step) {
    uint32_t x[4], y[4];
    if constexpr (A_TRANSPOSED) layout::TransposedReaderA<128>(a_rows, threadIdx.x).load(x, step * 16, 1);
    else layout::ReaderA<128>(a_rows, threadIdx.x).load(x, 0, step);
    if constexpr (B_TRANSPOSED) layout::TransposedReaderB<128>(b_rows, threadIdx.x).load(y, step * 16, 1);
    else layout::ReaderB<128>(b_rows, threadIdx.x).load(y, 0, step);
    ptx::mma_16<__nv_bfloat16>(c[0], x, y[0], y[1]);
    ptx::mma_16<__nv_bfloat16>(c[1], x, y[2], y[3]);
  }
  store(c, reinterpret_cast<float*>(p.out));
}

// out = A (16, 128 bytes), loaded to fragments by ldmatrix, stored back to shared memory by stmatrix, and copied out.
__device__ void round_trip(const Params& p) {
  __shared__ __align__(1024) unsigned char a[16 * 128], b[16 * 128];
  layout::ReaderA<128> reader(fill<16, 128>(a, p.a), threadIdx.x), writer(ptx::shared_address(b), threadIdx.x);
  for (int step = 0; step < 4; ++step) {
    uint32_t x[4];
    reader.load(x, 0, step);
    writer.store(x, 0, step, threadIdx.x);
  }
  __syncwarp();
  for (int i = threadIdx.x; i < 16 * 8; i += 32)
    reinterpret_cast<uint4*>(p.out)[i] = *reinterpret_cast<uint4*>(b + layout::swizzled<128>(i / 8, i % 8));
}

// out (16, 16) = S V of INT8 values. Each lane reads the elements of S (16, 32) that it has in an accumulator, and
// packs them into operand A. V (32, 16) is stored transposed, with its tokens in the order of layout/permutation.cuh.
__device__ void permuted_product(const Params& p) {
  __shared__ __align__(1024) unsigned char v[16 * 64];
  layout::ReaderB<64> reader(fill<16, 64>(v, p.b), threadIdx.x);
  const signed char* s = reinterpret_cast<const signed char*>(p.a);
  int lane = threadIdx.x;
  uint32_t x[4], y[4];
  for (int j = 0; j < 4; ++j) {
    float e[4];
    for (int i = 0; i < 4; ++i) {
      int n = 2 * (j / 2) + i / 2;
      e[i] = s[(lane / 4 + 8 * (j & 1)) * 32 + n * 8 + 2 * (lane & 3) + (i & 1)];
    }
    x[j] = quant::codes(e[0], e[1], e[2], e[3], 1.0f);
  }
  reader.load(y, 0, 0);
  int c[2][4];
  quant::multiply(c[0], x, y[0], y[1], true);
  quant::multiply(c[1], x, y[2], y[3], true);
  for (int n = 0; n < 2; ++n)
    for (int e = 0; e < 4; ++e) c[n][e] = int(__int_as_float(c[n][e]) - quant::MAGIC);
  store(c, reinterpret_cast<int*>(p.out));
}

// Writes a warpgroup's accumulator, 64 rows of 8 * N columns.
template <int N, class X>
__device__ void store_group(const X (&d)[N][4], X* out) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int n = 0; n < N; ++n)
    for (int e = 0; e < 4; ++e)
      out[(warp * 16 + lane / 4 + 8 * (e >> 1)) * 8 * N + n * 8 + 2 * (lane & 3) + (e & 1)] = d[n][e];
}

// out (64, 8 * N) = A (64, BYTES) B (8 * N, BYTES)^T of INT8 values by wgmma. A is read through a descriptor, or from
// registers as s8 or u8.
enum From { SHARED, REGISTERS, UNSIGNED_REGISTERS };
template <int BYTES, int N, From FROM>
__device__ void group_codes(const Params& p) {
  if constexpr (ptx::HAS_WGMMA) {
    __shared__ __align__(1024) unsigned char a[64 * BYTES], b[8 * N * BYTES];
    uint32_t a_rows = fill<64, BYTES>(a, p.a), b_rows = fill<8 * N, BYTES>(b, p.b);
    ptx::fence_proxy_async();
    __syncthreads();
    int d[N][4];
    uint32_t x[BYTES / 32][4];
    layout::ReaderA<BYTES> reader(a_rows, threadIdx.x % 32);
    for (int step = 0; step < BYTES / 32; ++step) reader.load(x[step], threadIdx.x / 32 * 16, step);
    ptx::discard_operand(d);  // the first step has scale-d = 0
    ptx::wgmma_fence();
    for (int step = 0; step < BYTES / 32; ++step) {
      uint64_t columns = ptx::row_descriptor<BYTES>(b_rows) + 2 * step;
      if constexpr (FROM == REGISTERS) ptx::wgmma_s8(d, x[step], columns, step > 0);
      else if constexpr (FROM == UNSIGNED_REGISTERS) ptx::wgmma_u8(d, x[step], columns, step > 0);
      else ptx::wgmma_s8(d, ptx::row_descriptor<BYTES>(a_rows) + 2 * step, columns, step > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(d);
    store_group(d, reinterpret_cast<int*>(p.out));
  }
}

// out (64, 8 * N) = A B^T by wgmma, with 16-bit operands and a reduction dimension of 64. TRANSPOSED matrices are
// stored with the reduction's index as the row index.
template <class T, int N, bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ void group_16(const Params& p) {
  if constexpr (ptx::HAS_WGMMA) {
    __shared__ __align__(1024) unsigned char a[64 * 128], b[64 * 128];
    uint32_t a_rows = fill<64, 128>(a, p.a), b_rows = fill<64, 128>(b, p.b);
    ptx::fence_proxy_async();
    __syncthreads();
    float d[N][4];
    ptx::discard_operand(d);
    ptx::wgmma_fence();
    uint64_t a_at = ptx::row_descriptor<128>(a_rows), b_at = ptx::row_descriptor<128>(b_rows);
    constexpr uint64_t A_STEP = A_TRANSPOSED ? ptx::COLUMN_STEP : 2, B_STEP = B_TRANSPOSED ? ptx::COLUMN_STEP : 2;
    ptx::wgmma_16<T, false, A_TRANSPOSED, B_TRANSPOSED>(d, a_at, b_at);
    for (int step = 1; step < 4; ++step)
      ptx::wgmma_16<T, true, A_TRANSPOSED, B_TRANSPOSED>(d, a_at + step * A_STEP, b_at + step * B_STEP);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(d);
    store_group(d, reinterpret_cast<float*>(p.out));
  }
}

// out (64, 64) = A B of 16-bit operands by wgmma, A in registers.
template <class T>
__device__ void group_16_registers(const Params& p) {
  if constexpr (ptx::HAS_WGMMA) {
    __shared__ __align__(1024) unsigned char a[64 * 128], b[64 * 128];
    uint32_t a_rows = fill<64, 128>(a, p.a), b_rows = fill<64, 128>(b, p.b);
    ptx::fence_proxy_async();
    __syncthreads();
    layout::ReaderA<128> reader(a_rows, threadIdx.x % 32);
    uint32_t x[4][4];
    for (int step = 0; step < 4; ++step) reader.load(x[step], threadIdx.x / 32 * 16, step);
    float d[8][4] = {};
    ptx::fence_operand(d);
    ptx::wgmma_fence();
    for (int step = 0; step < 4; ++step)
      ptx::wgmma_16<T>(d, x[step], ptx::column_descriptor(b_rows) + step * ptx::COLUMN_STEP);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>(d);
    store_group(d, reinterpret_cast<float*>(p.out));
  }
}

// Converts four numbers per lane to bytes: by `codes` with scale 1, then by `codes_of_positive`.
__device__ void conversions(const Params& p) {
  float4 x = reinterpret_cast<const float4*>(p.a)[threadIdx.x];
  uint32_t* out = reinterpret_cast<uint32_t*>(p.out);
  out[threadIdx.x] = quant::codes(x.x, x.y, x.z, x.w, 1.0f);
  out[32 + threadIdx.x] = quant::codes_of_positive(x.x, x.y, x.z, x.w);
}

// Divides four u8 values per lane by 2^0, 2^1, up to 2^9.
__device__ void smaller_codes(const Params& p) {
  for (int power = 0; power < 10; ++power)
    reinterpret_cast<uint32_t*>(p.out)[power * 32 + threadIdx.x] =
        quant::codes_over(reinterpret_cast<const uint32_t*>(p.a)[threadIdx.x], power);
}

// Outputs the NVFP4 conversions of each number x: E2M1 of x; E4M3 of |x|; the scales `dequant` and `quant` of a group
// whose largest magnitude is |x|; and E4M3 of |x| by the hardware's instruction.
__device__ void nvfp4(const Params& p) {
  constexpr int COUNT = 1 << 16;
  float* out = reinterpret_cast<float*>(p.out);
  for (int i = threadIdx.x; i < COUNT; i += 32) {
    float x = reinterpret_cast<const float*>(p.a)[i];
    quant::Nvfp4Scale scale = quant::nvfp4_scale_of(fabsf(x));
    out[i] = quant::e2m1(x), out[COUNT + i] = quant::e4m3_of_positive(fabsf(x));
    out[2 * COUNT + i] = scale.dequant, out[3 * COUNT + i] = scale.quant;
    out[4 * COUNT + i] = ptx::e4m3(fabsf(x));
  }
}

}  // namespace

#define KERNEL_OF(threads, name, ...) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Params p) { __VA_ARGS__(p); }
#define KERNEL(name, ...) KERNEL_OF(32, name, __VA_ARGS__)
// Kernels of a warpgroup. They are empty if the architecture has no wgmma.
#define GROUP_KERNEL(name, ...) KERNEL_OF(128, name, __VA_ARGS__)

KERNEL(selftest_codes_64, product_codes<64>)
KERNEL(selftest_codes_128, product_codes<128>)
KERNEL(selftest_16_nn, product_16<false, false>)
KERNEL(selftest_16_nt, product_16<false, true>)
KERNEL(selftest_16_tn, product_16<true, false>)
KERNEL(selftest_16_tt, product_16<true, true>)
KERNEL(selftest_round_trip, round_trip)
KERNEL(selftest_permuted, permuted_product)
KERNEL(selftest_conversions, conversions)
KERNEL(selftest_smaller_codes, smaller_codes)
KERNEL(selftest_nvfp4, nvfp4)

#define GROUP_CODES(bytes)                                                                          \
  GROUP_KERNEL(selftest_group_##bytes##_shared_32, group_codes<bytes, 4, SHARED>)                   \
  GROUP_KERNEL(selftest_group_##bytes##_shared_64, group_codes<bytes, 8, SHARED>)                   \
  GROUP_KERNEL(selftest_group_##bytes##_shared_128, group_codes<bytes, 16, SHARED>)                 \
  GROUP_KERNEL(selftest_group_##bytes##_registers_32, group_codes<bytes, 4, REGISTERS>)             \
  GROUP_KERNEL(selftest_group_##bytes##_registers_64, group_codes<bytes, 8, REGISTERS>)             \
  GROUP_KERNEL(selftest_group_##bytes##_unsigned_64, group_codes<bytes, 8, UNSIGNED_REGISTERS>)     \
  GROUP_KERNEL(selftest_group_##bytes##_unsigned_128, group_codes<bytes, 16, UNSIGNED_REGISTERS>)
GROUP_CODES(64)
GROUP_CODES(128)

#define GROUP_16(type, T)                                                              \
  GROUP_KERNEL(selftest_group_##type##_nn_64, group_16<T, 8, false, false>)            \
  GROUP_KERNEL(selftest_group_##type##_nt_64, group_16<T, 8, false, true>)             \
  GROUP_KERNEL(selftest_group_##type##_tt_32, group_16<T, 4, true, true>)              \
  GROUP_KERNEL(selftest_group_##type##_registers_64, group_16_registers<T>)
GROUP_16(bf16, __nv_bfloat16)
GROUP_16(f16, __half)
