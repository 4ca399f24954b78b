// How a bucket's elements become bytes and back: the built-in formats, fused, and codecs of users.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../ops/codec_ops.h"

namespace fastsync::engine {

class Coder {
 public:
  virtual ~Coder() = default;

  // See codec_ops.h. `residual` is undefined without error feedback.
  virtual void encode(const std::vector<ops::Item>& items, const at::Tensor& residual,
                      const at::Tensor& payload, const ops::Encoding& how) = 0;
  virtual void reduce(const at::Tensor& received, const at::Tensor& result,
                      const at::Tensor& residual, int64_t first, uint64_t seed) = 0;
  virtual void decode(const std::vector<ops::Item>& items, const at::Tensor& payload,
                      int32_t sources) = 0;
  // Whether it can code a part of the flat buffer: encode() follows how.begin and how.end, and
  // there is decode_part().
  virtual bool works_on_parts() const { return false; }
  virtual void decode_part(const std::vector<ops::Item>& items, const at::Tensor& payload,
                           int32_t sources, int64_t begin, int64_t end);
};

// A format of the kernels.
std::shared_ptr<Coder> make_block_coder(const ops::CodePlan& plan);

// A user's codec, on chunks of a flat fp32 buffer. Called from the backward and from a worker
// thread, one call at a time.
class Codec {
 public:
  virtual ~Codec() = default;
  // payload = code(values). `values` is fp32 [chunk_numel] and may be overwritten, `payload` uint8
  // [coded bytes].
  virtual void encode(const at::Tensor& values, const at::Tensor& payload) = 0;
  // values = decode(payload)
  virtual void decode(const at::Tensor& payload, const at::Tensor& values) = 0;
};

// `coded_bytes`: bytes of a coded chunk, at its beginning.
std::shared_ptr<Coder> make_flat_coder(std::shared_ptr<Codec> codec, const ops::CodePlan& plan,
                                       int64_t coded_bytes);

// Sparsification: sends the `kept` elements of largest magnitude. plan.numel is one chunk.
std::shared_ptr<Coder> make_topk_coder(const ops::CodePlan& plan, int64_t kept);

}  // namespace fastsync::engine
