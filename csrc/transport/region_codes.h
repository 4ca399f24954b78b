// Codes of chunks that go to their owners: written for all of them, and added up for one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../codec/coder.h"
#include "coded_spec.h"
#include "regions.h"

namespace fastsync::engine {

class RegionCodes {
 public:
  // For chunks of `owners` ranks, each of which sends codes of every chunk.
  RegionCodes(const CodedSpec& spec, int64_t owners, at::Device device);

  const CodedSpec& spec() const { return spec_; }
  at::Device device() const { return device_; }
  bool works_on_parts() const { return writer_->works_on_parts(); }

  // Encodes to `payload`, a chunk for each owner. `residual`: fp32, of all elements, or undefined.
  void encode(const std::vector<ops::Item>& items, const at::Tensor& residual,
              const at::Tensor& payload, const ops::Encoding& how) const;
  // Encodes flags. Those of owner r begin at element r * stride of `flags`; 0: all owners get the
  // same flags.
  void encode_flags(const at::Tensor& flags, int64_t stride, const at::Tensor& payload) const;
  // Sums `payload`, one chunk from each owner, at places in that chunk: in fp32, rounded to the
  // tensors' dtype once.
  void sum(const at::Tensor& payload, const std::vector<ops::Item>& items, bool accumulate) const;
  void sum_flags(const at::Tensor& payload, const at::Tensor& flags) const;

 private:
  CodedSpec spec_;
  int64_t owners_;
  at::Device device_;
  std::shared_ptr<Coder> writer_;  // of all chunks
  std::shared_ptr<Coder> reader_;  // of one
};

}  // namespace fastsync::engine
