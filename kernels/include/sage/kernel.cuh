// How every kernel is declared.
#pragma once

#include <sage/ptx/grid.cuh>

// A kernel with one argument `p`, which runs the statement at the end. BOUNDS are those of __launch_bounds__, in parentheses. The
// host launches a kernel before the one before it has ended, so that its blocks are there when the last of those end: therefore
// each first waits for them, and then lets the blocks of the next kernel come.
#define SAGE_KERNEL(name, Params, BOUNDS, ...)                                                 \
  extern "C" __global__ void __launch_bounds__ BOUNDS name(const __grid_constant__ Params p) { \
    sage::ptx::wait_for_earlier_grids();                                                       \
    sage::ptx::launch_dependent_grids();                                                       \
    __VA_ARGS__;                                                                               \
  }
