// The order of grids on a stream, where a grid may begin before the one before it has ended (programmatic dependent launch).
// Quoted titles are sections of the PTX ISA manual. The functions are empty for architectures before sm_90, whose grids begin in
// order.
#pragma once

namespace sage::ptx {

// griddepcontrol.wait, "Parallel Synchronization and Communication Instructions: griddepcontrol": the calling thread waits until
// the grids before this one have ended and what they wrote is visible.
__device__ __forceinline__ void wait_for_earlier_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// griddepcontrol.launch_dependents, the same section: once all thread blocks of this grid have called it or have ended, those of the
// next one may take the places that blocks leave.
__device__ __forceinline__ void launch_dependent_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace sage::ptx
