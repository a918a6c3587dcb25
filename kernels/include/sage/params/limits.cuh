// What differs between architectures. candle-sage/src/cuda/plan.rs knows the same.
#pragma once

namespace sage::params {

// Shared memory of a block, in KiB.
#if __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int SHARED_KIB = 227;
#elif __CUDA_ARCH__ == 800
constexpr int SHARED_KIB = 163;
#else
constexpr int SHARED_KIB = 99;
#endif

}  // namespace sage::params
