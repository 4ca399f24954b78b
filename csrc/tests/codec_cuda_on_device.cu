// The CUDA kernels of the wire formats on a device, for the tests that know host memory only.
// clang-format off
#define encode_cuda encode_on_device
#define reduce_cuda reduce_on_device
#define decode_cuda decode_on_device
#include "../kernels/codec_cuda.cu"
#undef encode_cuda
#undef reduce_cuda
#undef decode_cuda
// clang-format on
#include <algorithm>
#include <vector>

#include "cuda_mirror.h"

namespace fastsync::kernels {
namespace {

using testing::Mirror;

int64_t end_of(const Segment* segments, size_t count) {
  int64_t end = 0;
  for (size_t i = 0; i < count; ++i) end = std::max(end, segments[i].offset + segments[i].numel);
  return end;
}

// Bytes of one source's payload that hold elements up to `end`.
size_t wire_bytes(const PayloadLayout& layout, int64_t end) {
  if (end == 0 || layout.chunk_numel <= 0) return 0;
  const int64_t last = (end - 1) / layout.chunk_numel;
  return static_cast<size_t>(last * layout.chunk_bytes + layout.section +
                             coded_bytes(layout.format, layout.chunk_numel));
}

void add_tensors(Mirror& mirror, const Segment* segments, size_t count, DType dtype) {
  for (size_t i = 0; i < count; ++i) {
    mirror.add(segments[i].tensor, static_cast<size_t>(segments[i].numel) * element_size(dtype));
  }
}

std::vector<Segment> on_device(const Mirror& mirror, const Segment* segments, size_t count) {
  std::vector<Segment> moved(segments, segments + count);
  for (Segment& segment : moved)
    segment.tensor = mirror.on_device(static_cast<char*>(segment.tensor));
  return moved;
}

}  // namespace

void encode_cuda(const Segment* segments, size_t count, float* residual, void* payload,
                 const EncodeArgs& args, CUstream_st*);
void reduce_cuda(const void* received, void* result, float* residual, const ReduceArgs& args,
                 CUstream_st*);
void decode_cuda(const Segment* segments, size_t count, const void* payload, const DecodeArgs& args,
                 CUstream_st*);

void encode_cuda(const Segment* segments, size_t count, float* residual, void* payload,
                 const EncodeArgs& args, CUstream_st*) {
  check_layout(args.layout);
  Mirror mirror;
  const int64_t end = end_of(segments, count);
  mirror.add(payload, wire_bytes(args.layout, end));
  mirror.add(residual, static_cast<size_t>(end) * sizeof(float));
  add_tensors(mirror, segments, count, args.tensor_dtype);
  mirror.upload();
  const std::vector<Segment> moved = on_device(mirror, segments, count);
  encode_on_device(moved.data(), count, mirror.on_device(residual),
                   mirror.on_device(static_cast<char*>(payload)), args, nullptr);
  mirror.download();
}

void reduce_cuda(const void* received, void* result, float* residual, const ReduceArgs& args,
                 CUstream_st*) {
  check_layout(args.layout);
  Mirror mirror;
  const auto sources = static_cast<size_t>(std::max(args.sources, 0));
  mirror.add(received, sources * static_cast<size_t>(args.layout.chunk_bytes));
  mirror.add(result, wire_bytes(args.layout, args.layout.chunk_numel));
  mirror.add(residual, static_cast<size_t>(args.layout.chunk_numel) * sizeof(float));
  mirror.upload();
  reduce_on_device(mirror.on_device(static_cast<const char*>(received)),
                   mirror.on_device(static_cast<char*>(result)), mirror.on_device(residual), args,
                   nullptr);
  mirror.download();
}

void decode_cuda(const Segment* segments, size_t count, const void* payload, const DecodeArgs& args,
                 CUstream_st*) {
  check_layout(args.layout);
  Mirror mirror;
  const size_t one = wire_bytes(args.layout, end_of(segments, count));
  const auto others = static_cast<size_t>(std::max(args.sources - 1, 0));
  mirror.add(payload, one == 0 ? 0 : others * static_cast<size_t>(args.source_bytes) + one);
  add_tensors(mirror, segments, count, args.tensor_dtype);
  mirror.upload();
  const std::vector<Segment> moved = on_device(mirror, segments, count);
  decode_on_device(moved.data(), count, mirror.on_device(static_cast<const char*>(payload)), args,
                   nullptr);
  mirror.download();
}

}  // namespace fastsync::kernels
