// What differs between architectures. candle-sage/src/cuda/plan.rs knows the same.
#pragma once

namespace sage::params {

// Shared memory that a plan of an attention kernel may ask for, in KiB: a block's 227, 163 or 99 but one, which holds what
// the kernel declares itself.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int SHARED_KIB = 226;
#elif __CUDA_ARCH__ == 800
constexpr int SHARED_KIB = 162;
#else
constexpr int SHARED_KIB = 98;
#endif

}  // namespace sage::params
