// The CUDA kernels as C++: the same source, run through the shim.
// clang-format off
#include "cuda_shim.h"
#define FS_DEVICE_FORMS 1
#include "../kernels/codec_cuda.cu"
