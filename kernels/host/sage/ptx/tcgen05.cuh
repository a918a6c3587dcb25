// include/sage/ptx/tcgen05.cuh on a CPU. This code decodes descriptors, and finds operands and scales, as the tables
// and figures of the PTX ISA show. It is independent of the code with which the kernels encode descriptors.
#pragma once

#include <sage/ptx/convert_nvfp4.cuh>
#include <sage/ptx/memory.cuh>
#include <sage/ptx/tcgen05_descriptors.cuh>

#define SAGE_HAS_TCGEN05 1

namespace host {

// Tensor memory. An allocation fills all of it with NaN. An access to columns that are not allocated aborts.
struct TensorMemory {
  uint32_t words[128][512];
  int first = 0, columns = 0;  // the running thread block has allocated `columns` columns, starting at `first`

  void allocate(int count) {
    if (columns || count < 32 || count > 512 || count & (count - 1)) fprintf(stderr, "%d columns cannot be allocated\n", count), abort();
    // Columns start at 0 in even thread blocks, and end at 512 in odd thread blocks.
    first = blockIdx.x % 2 ? 512 - count : 0, columns = count;
    for (auto& lane : words)
      for (uint32_t& word : lane) word = 0x7fffffff;
  }
  void release(uint32_t address, int count) {
    if (int(address) != first || count != columns) fprintf(stderr, "released columns that were not allocated\n"), abort();
    columns = 0;
  }
  uint32_t& at(uint32_t address, int lane, int column) {
    lane += int(address >> 16), column += int(address & 0xffff);
    if (lane >= 128 || column < first || column >= first + columns) {
      fprintf(stderr, "lane %d, column %d of tensor memory are not allocated\n", lane, column);
      abort();
    }
    return words[lane][column];
  }
};
inline TensorMemory tensor_memory;

// Byte `byte` of row `row` of a K-major operand: PTX ISA, "Shared memory descriptor" and "Canonical layouts".
inline uint8_t byte_of(uint64_t descriptor, int row, int byte) {
  uint32_t start = uint32_t(descriptor & 0x3fff) << 4, eight_rows = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  int swizzle = int(descriptor >> 61);
  if ((descriptor >> 46 & 0x7f) != 1) fprintf(stderr, "bits 46 to 52 of a descriptor are not 0b0000001\n"), abort();
  int row_bytes = swizzle == 0 ? 16 : swizzle == 6 ? 32 : swizzle == 4 ? 64 : swizzle == 2 ? 128 : 0;
  if (row_bytes == 0 || byte >= row_bytes) fprintf(stderr, "swizzle %d has no byte %d\n", swizzle, byte), abort();
  uint32_t address = start + row / 8 * eight_rows + row % 8 * row_bytes + byte;
  // The swizzle: the index of a 16-byte chunk is XORed with low bits of the index of its 128-byte line.
  address ^= (address >> 7 & (row_bytes / 16 - 1)) << 4;
  sage::ptx::at_shared(address, 1);
  return async_memory[address];
}

// The operand of an MMA. Each row has 64 FP4 values, doubled to make them integers, and four scales.
struct Operand {
  int8_t twice[256][64];
  float scales[256][4];
  Operand(uint64_t descriptor, uint32_t scales_at, int rows, bool accumulator_rows) {
    using namespace sage::ptx;
    for (int row = 0; row < rows; ++row) {
      for (int k = 0; k < 64; ++k) twice[row][k] = int8_t(2 * value_of_e2m1(byte_of(descriptor, row, k / 2) >> (4 * (k % 2))));
      // Each quarter of the 128 lanes has a copy of the scales. For row r, operand A uses the copy in the quarter that
      // contains lane r. Operand B uses the copy in the third quarter.
      int lane = row % 32 + (accumulator_rows ? row / 32 * 32 : 64);
      uint32_t four = tensor_memory.at(scales_at, lane, row / 32);
      for (int group = 0; group < 4; ++group) scales[row][group] = value_of_e4m3(four >> (8 * group));
    }
  }
};

}  // namespace host

namespace sage::ptx {

inline void tcgen05_fence_before() { host::tensor_fences[host::block.current].before = false; }
inline void tcgen05_fence_after() { host::tensor_fences[host::block.current].after = false; }
// Called when a thread accesses tensor memory. `waited`: the access is a load or store with tcgen05.wait. After such an
// access the thread needs tcgen05.fence::before_thread_sync before its next synchronization.
inline void touch_tensor_memory(bool waited) {
  host::TensorFences& fences = host::tensor_fences[host::block.current];
  if (fences.after) fprintf(stderr, "thread %d lacks tcgen05.fence::after_thread_sync\n", threadIdx.x), abort();
  fences.before |= waited;
}

template <int COLUMNS>
inline void tcgen05_alloc(uint32_t shared) {
  host::tensor_fences[host::block.current] = {true, false};
  if (threadIdx.x % 32 == 0) {
    host::tensor_memory.allocate(COLUMNS);
    memcpy(host::memory + int32_t(shared), &host::tensor_memory.first, 4);
  }
  __syncwarp();
}
template <int COLUMNS>
inline void tcgen05_dealloc(uint32_t address) {
  touch_tensor_memory(false);
  if (threadIdx.x % 32 == 0) host::tensor_memory.release(address, COLUMNS);
}
inline void tcgen05_commit(uint32_t mbarrier) {
  host::issue(host::Operation::COMMIT, [=] { mbarrier_at(mbarrier).arrive(1, 0); });
}

// Warp w can access only quarter w % 4 of the lanes.
inline void check_quarter(uint32_t address) {
  touch_tensor_memory(true);
  if ((address >> 16) != threadIdx.x / 32 % 4 * 32u) fprintf(stderr, "lane %u does not belong to warp %d\n", address >> 16, threadIdx.x / 32), abort();
}
inline void tcgen05_load(float (&x)[32], uint32_t address) {
  check_quarter(address);
  for (int i = 0; i < 32; ++i) x[i] = __uint_as_float(host::tensor_memory.at(address, threadIdx.x % 32, i));
  __syncwarp();
}
inline void tcgen05_store(uint32_t address, const float (&x)[32]) {
  check_quarter(address);
  for (int i = 0; i < 32; ++i) host::tensor_memory.at(address, threadIdx.x % 32, i) = __float_as_uint(x[i]);
  __syncwarp();
}

inline void tcgen05_copy_scales(uint32_t address, uint64_t rows) {
  touch_tensor_memory(false);
  host::issue(host::Operation::SCALES_COPY, [=] {
    for (int lane = 0; lane < 128; ++lane)
      for (int byte = 0; byte < 16; ++byte) {
        uint32_t& word = host::tensor_memory.at(address, lane, byte / 4);
        int shift = byte % 4 * 8;
        word = (word & ~(0xffu << shift)) | uint32_t(host::byte_of(rows, lane % 32, byte)) << shift;
      }
  });
}

inline void tcgen05_mma_nvfp4(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t a_scales, uint32_t b_scales,
                              bool accumulate) {
  touch_tensor_memory(false);
  host::issue(host::Operation::PRODUCT, [=] {
    // "Instruction descriptor", kind::mxf4nvf4: bits 7 to 9 and 10 to 11 are the types (1: E2M1), 17 to 22 are N / 8,
    // and 27 to 28 are M / 128. All other bits are 0: scales are E4M3, operands are neither negated nor transposed, and
    // the reduction is 64.
    int columns = int(instruction >> 17 & 63) * 8;
    if ((instruction & ~(63u << 17)) != (1u << 7 | 1u << 10 | 1u << 27) || columns < 8) fprintf(stderr, "unsupported instruction descriptor\n"), abort();
    host::Operand left(a, a_scales, 128, true), right(b, b_scales, columns, false);
    for (int row = 0; row < 128; ++row)
      for (int column = 0; column < columns; ++column) {
        uint32_t& word = host::tensor_memory.at(d, row, column);
        float sum = accumulate ? __uint_as_float(word) : 0.0f;
        for (int group = 0; group < 4; ++group) {
          int products = 0;
          for (int k = 16 * group; k < 16 * group + 16; ++k) products += left.twice[row][k] * right.twice[column][k];
          sum = fmaf(float(products), 0.25f * left.scales[row][group] * right.scales[column][group], sum);
        }
        word = __float_as_uint(sum);
      }
  }, d);
}

}  // namespace sage::ptx
