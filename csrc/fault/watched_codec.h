// A codec of the user that notes in the training's progress when it runs: it may hang on a thread
// that no wait names.
#pragma once

#include <memory>
#include <utility>

#include "codec/coder.h"
#include "fault/progress.h"

namespace fastsync::engine {

class WatchedCodec final : public Codec {
 public:
  WatchedCodec(std::shared_ptr<Codec> codec, std::shared_ptr<Progress> progress)
      : codec_(std::move(codec)), progress_(std::move(progress)) {}

  void encode(const at::Tensor& values, const at::Tensor& payload) override {
    const Progress::Coding at_work(*progress_);
    codec_->encode(values, payload);
  }
  void decode(const at::Tensor& payload, const at::Tensor& values) override {
    const Progress::Coding at_work(*progress_);
    codec_->decode(payload, values);
  }

 private:
  std::shared_ptr<Codec> codec_;
  std::shared_ptr<Progress> progress_;
};

}  // namespace fastsync::engine
