// The CUDA kernels of pack and unpack on a device, for the tests that know host memory only.
// clang-format off
#define pack_cuda pack_on_device
#define unpack_cuda unpack_on_device
#include "../kernels/pack_cuda.cu"
#undef pack_cuda
#undef unpack_cuda
// clang-format on
#include <algorithm>
#include <vector>

#include "cuda_mirror.h"

namespace fastsync::kernels {
namespace {

using Launch = void (*)(const Segment*, size_t, void*, const Transfer&, CUstream_st*);

void run(const Segment* segments, size_t count, void* flat, const Transfer& transfer,
         const Launch& launch) {
  testing::Mirror mirror;
  int64_t end = 0;
  for (size_t i = 0; i < count; ++i) end = std::max(end, segments[i].offset + segments[i].numel);
  mirror.add(flat, static_cast<size_t>(end) * element_size(transfer.flat_dtype));
  for (size_t i = 0; i < count; ++i) {
    const auto numel = static_cast<size_t>(segments[i].numel);
    mirror.add(segments[i].tensor, numel * element_size(transfer.tensor_dtype));
  }
  mirror.upload();
  std::vector<Segment> moved(segments, segments + count);
  for (Segment& segment : moved)
    segment.tensor = mirror.on_device(static_cast<char*>(segment.tensor));
  launch(moved.data(), count, mirror.on_device(static_cast<char*>(flat)), transfer, nullptr);
  mirror.download();
}

}  // namespace

void pack_cuda(const Segment* segments, size_t count, void* flat, const Transfer& transfer,
               CUstream_st*);
void unpack_cuda(const Segment* segments, size_t count, const void* flat, const Transfer& transfer,
                 CUstream_st*);

void pack_cuda(const Segment* segments, size_t count, void* flat, const Transfer& transfer,
               CUstream_st*) {
  run(segments, count, flat, transfer, pack_on_device);
}

void unpack_cuda(const Segment* segments, size_t count, const void* flat, const Transfer& transfer,
                 CUstream_st*) {
  run(segments, count, const_cast<void*>(flat), transfer,
      [](const Segment* s, size_t n, void* from, const Transfer& how, CUstream_st* stream) {
        unpack_on_device(s, n, from, how, stream);
      });
}

}  // namespace fastsync::kernels
