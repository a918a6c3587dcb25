// How every kernel is declared.
#pragma once

#include <sage/ptx/grid.cuh>

// A kernel with one argument `p`, which runs the statement at the end. BOUNDS are those of __launch_bounds__, in parentheses. From
// sm_90 on the host may launch it while the kernel before it still runs, so that its blocks are in place when that one ends.
// Therefore it first waits for that kernel, and then allows the launch of the next one.
#define SAGE_KERNEL(name, Params, BOUNDS, ...)                                                 \
  extern "C" __global__ void __launch_bounds__ BOUNDS name(const __grid_constant__ Params p) { \
    sage::ptx::wait_for_earlier_grids();                                                       \
    sage::ptx::launch_dependent_grids();                                                       \
    __VA_ARGS__;                                                                               \
  }
