#include "codec_ops.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "../check.h"
#include "buffers.h"

namespace fastsync::ops {
namespace {

using kernels::DType;
using kernels::Rounding;
using kernels::Segment;
using Way = SegmentTable::Way;

void check_wire(const at::Tensor& payload, int64_t bytes) {
  FS_CHECK_VALUE(payload.defined() && payload.scalar_type() == at::kByte &&
                     payload.is_contiguous() && payload.numel() == bytes,
                 "expects a payload buffer of ", bytes, " bytes");
  check_supported(payload.device());
}

float* residual_data(const at::Tensor& residual, int64_t numel) {
  if (!residual.defined()) return nullptr;
  FS_CHECK_VALUE(
      residual.scalar_type() == at::kFloat && residual.is_contiguous() && residual.numel() == numel,
      "expects a residual of ", numel, " fp32 elements");
  return residual.mutable_data_ptr<float>();
}

int64_t chunks(const CodePlan& plan) { return plan.numel / plan.layout.chunk_numel; }

int64_t block(const CodePlan& plan) { return kernels::traits_of(plan.layout.format).block; }

}  // namespace

CodePlan one_chunk(kernels::Format format, int64_t numel) {
  const int64_t bytes = (kernels::coded_bytes(format, numel) + 15) / 16 * 16;
  return {{format, numel, bytes, 0}, numel};
}

void encode(const std::vector<Item>& items, const at::Tensor& residual, const at::Tensor& payload,
            const CodePlan& plan, const Encoding& how) {
  const at::NoGradGuard no_grad;
  const int64_t chunk_bytes = plan.layout.chunk_bytes;
  check_wire(payload, chunks(plan) * chunk_bytes * how.sources);
  const SegmentTable table(items, Way::kGather, plan.numel, payload.device(), at::kFloat);
  float* lost = residual_data(residual, plan.numel);
  void* out = payload.mutable_data_ptr<uint8_t>() + how.source * chunk_bytes;
  table.for_each([&](DType dtype, const std::vector<Segment>& all) {
    const size_t size = kernels::element_size(dtype);
    kernels::EncodeArgs args{plan.layout, Rounding{plan.stochastic, how.seed}, dtype,
                             how.scale.for_kernels()};
    args.layout.chunk_bytes *= how.sources;  // the same chunk of all sources lies together
    run_on_segments(
        clip(all, how.begin, how.end, size), payload.device(), {size, block(plan)},
        [&](const Segment* part, size_t count) {
          kernels::encode_cpu(part, count, lost, out, args);
        },
        [&](const Segment* whole, size_t count, auto stream) {
          kernels::encode_cuda(whole, count, lost, out, args, stream);
        });
  });
}

void reduce(const at::Tensor& received, const at::Tensor& result, const at::Tensor& residual,
            const CodePlan& plan, int64_t first, uint64_t seed) {
  check_wire(result, plan.layout.chunk_bytes);
  const int64_t sources = received.numel() / plan.layout.chunk_bytes;
  check_wire(received, sources * plan.layout.chunk_bytes);
  const kernels::ReduceArgs args{plan.layout, Rounding{plan.stochastic, seed},
                                 static_cast<int32_t>(sources), first};
  const void* in = received.const_data_ptr();
  void* out = result.mutable_data_ptr();
  float* lost = residual_data(residual, plan.layout.chunk_numel);
  run_kernel(
      result.device(), [&] { kernels::reduce_cpu(in, out, lost, args); },
      [&](auto stream) { kernels::reduce_cuda(in, out, lost, args, stream); });
}

void decode(const std::vector<Item>& items, const at::Tensor& payload, const CodePlan& plan,
            int32_t sources, int64_t begin, int64_t end) {
  const at::NoGradGuard no_grad;
  const int64_t chunk_bytes = plan.layout.chunk_bytes;
  check_wire(payload, chunks(plan) * chunk_bytes * sources);
  SegmentTable table(items, Way::kScatter, plan.numel, payload.device(), at::kFloat);
  const void* in = payload.const_data_ptr();
  table.for_each([&](DType dtype, const std::vector<Segment>& all) {
    const size_t size = kernels::element_size(dtype);
    kernels::DecodeArgs args{plan.layout, dtype, sources, chunk_bytes};
    args.layout.chunk_bytes *= sources;  // the same chunk of all sources lies together
    run_on_segments(
        clip(all, begin, end, size), payload.device(), {size, block(plan)},
        [&](const Segment* part, size_t count) { kernels::decode_cpu(part, count, in, args); },
        [&](const Segment* whole, size_t count, auto stream) {
          kernels::decode_cuda(whole, count, in, args, stream);
        });
  });
  table.finish();
}

at::Tensor wire_average(const std::vector<at::Tensor>& tensors, kernels::Format format,
                        bool gather) {
  FS_CHECK_VALUE(!tensors.empty(), "an average needs at least one tensor");
  const at::NoGradGuard no_grad;
  const int64_t numel = tensors.front().numel();
  const int64_t block = kernels::traits_of(format).block;
  const auto ranks = static_cast<int64_t>(tensors.size());
  const CodePlan plan =
      one_chunk(format, std::max<int64_t>(1, (numel + block - 1) / block) * block);
  const int64_t bytes = plan.layout.chunk_bytes;
  const SlotLayout run = SlotLayout::run(0, numel);
  const at::Device device = tensors.front().device();
  const at::Tensor received = make_flat(ranks * bytes, at::kByte, device);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const at::Tensor& mine = tensors[static_cast<size_t>(rank)];
    FS_CHECK_VALUE(mine.numel() == numel, "ranks have tensors of different sizes");
    encode({{mine.reshape({numel}), &run}}, at::Tensor(), received.narrow(0, rank * bytes, bytes),
           plan, {1.0 / static_cast<double>(ranks)});
  }
  const at::Tensor result = make_flat(numel, at::kFloat, device);
  if (gather) {
    decode({{result, &run}}, received, plan, static_cast<int32_t>(ranks), 0, plan.numel);
    return result;
  }
  const at::Tensor sum = make_flat(bytes, at::kByte, device);
  reduce(received, sum, at::Tensor(), plan, 0, 0);
  decode({{result, &run}}, sum, plan, 1, 0, plan.numel);
  return result;
}

}  // namespace fastsync::ops
