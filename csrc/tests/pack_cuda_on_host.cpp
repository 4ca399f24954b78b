// The CUDA kernels as C++: the same source, run through the shim.
// clang-format off
#include "cuda_shim.h"
#include "../kernels/pack_cuda.cu"
