// The codec of custom_codec.py in C++: one bit per element, and the mean magnitude of each 64.
#include <codec_plugin.h>

#include <cmath>
#include <cstring>

namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kBytes = kBlock / 8 + 4;  // of a block: signs, then its scale

int64_t coded_bytes(void* /*context*/, int64_t numel) { return numel / kBlock * kBytes; }

const char* encode(void* /*context*/, float* values, int64_t numel, uint8_t* payload,
                   int64_t bytes) {
  if (bytes != coded_bytes(nullptr, numel)) return "the buffer has another size than promised";
  for (; numel > 0; numel -= kBlock, values += kBlock, payload += kBytes) {
    uint64_t signs = 0;
    float sum = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      signs |= uint64_t{values[i] >= 0} << i;
      sum += std::fabs(values[i]);
    }
    const float scale = sum / kBlock;  // NaN or infinity where an element is
    std::memcpy(payload, &signs, sizeof(signs));
    std::memcpy(payload + sizeof(signs), &scale, sizeof(scale));
  }
  return nullptr;
}

const char* decode(void* /*context*/, const uint8_t* payload, int64_t /*bytes*/, float* values,
                   int64_t numel) {
  for (; numel > 0; numel -= kBlock, values += kBlock, payload += kBytes) {
    uint64_t signs = 0;
    float scale = 0;
    std::memcpy(&signs, payload, sizeof(signs));
    std::memcpy(&scale, payload + sizeof(signs), sizeof(scale));
    for (int64_t i = 0; i < kBlock; ++i) values[i] = (signs >> i & 1) != 0 ? scale : -scale;
  }
  return nullptr;
}

}  // namespace

const fastsync_codec* FASTSYNC_CODEC_ENTRY(void) {
  static const fastsync_codec table = {
      FASTSYNC_CODEC_VERSION,
      FASTSYNC_GATHER,
      1,  // error feedback
      0,  // chunks of any multiple of the block
      kBlock,
      "signs-cpp",
      nullptr,  // context
      coded_bytes,
      encode,
      decode,
  };
  return &table;
}
