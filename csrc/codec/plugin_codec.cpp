#include "plugin_codec.h"

#include "../check.h"

namespace fastsync::engine {
namespace {

class PluginCodec final : public Codec {
 public:
  explicit PluginCodec(const fastsync_codec* table) : table_(table) {}

  void encode(const at::Tensor& values, const at::Tensor& payload) override {
    check_host(values);
    check("encode",
          table_->encode(table_->context, values.mutable_data_ptr<float>(), values.numel(),
                         payload.mutable_data_ptr<uint8_t>(), payload.numel()));
  }

  void decode(const at::Tensor& payload, const at::Tensor& values) override {
    check_host(values);
    check("decode",
          table_->decode(table_->context, payload.const_data_ptr<uint8_t>(), payload.numel(),
                         values.mutable_data_ptr<float>(), values.numel()));
  }

 private:
  void check_host(const at::Tensor& values) const {
    FS_CHECK(values.is_cpu(), "the codec ", table_->name, " works on the CPU, not on ",
             values.device());
  }
  void check(const char* what, const char* error) const {
    FS_CHECK(error == nullptr, "the codec ", table_->name, " failed to ", what, ": ", error);
  }

  const fastsync_codec* table_;
};

}  // namespace

std::shared_ptr<Codec> make_plugin_codec(const fastsync_codec* table) {
  FS_CHECK_VALUE(table != nullptr && table->version == FASTSYNC_CODEC_VERSION,
                 "expects a codec table of version ", FASTSYNC_CODEC_VERSION);
  return std::make_shared<PluginCodec>(table);
}

}  // namespace fastsync::engine
