// A stand-in for CUDA's math_constants.h on a CPU.
#pragma once
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN double(NAN)
