#include <cstring>

#include "digest.h"
#include "simd.h"

namespace fastsync::kernels {
namespace {

constexpr int64_t kRow = kDigestLanes * static_cast<int64_t>(sizeof(uint64_t));  // bytes

struct DigestLoop {
  FS_HOST_DEVICE static void run(const char* data, int64_t rows, uint64_t* lanes) {
    uint64_t kept[kDigestLanes];
    for (int64_t lane = 0; lane < kDigestLanes; ++lane) kept[lane] = lanes[lane];
    for (int64_t row = 0; row < rows; ++row) {
      const char* words = data + row * kRow;
      for (int64_t lane = 0; lane < kDigestLanes; ++lane) {
        uint64_t word = 0;
        std::memcpy(&word, words + lane * 8, sizeof word);
        kept[lane] = digest_step(kept[lane], word);
      }
    }
    for (int64_t lane = 0; lane < kDigestLanes; ++lane) lanes[lane] = kept[lane];
  }
};

}  // namespace

uint64_t digest_block_cpu(const void* data, int64_t bytes) {
  static const OnThisCpu<DigestLoop>::Pointer loop = OnThisCpu<DigestLoop>();
  const auto* from = static_cast<const char*>(data);
  const int64_t rows = bytes / kRow;
  uint64_t lanes[kDigestLanes] = {};
  loop(from, rows, lanes);
  if (const int64_t rest = bytes - rows * kRow; rest > 0) {
    char row[kRow] = {};
    std::memcpy(row, from + rows * kRow, static_cast<size_t>(rest));
    loop(row, 1, lanes);
  }
  return fold_digests(lanes, kDigestLanes, bytes);
}

uint64_t fold_digests(const uint64_t* digests, int64_t blocks, int64_t bytes) {
  auto folded = static_cast<uint64_t>(bytes);
  for (int64_t i = 0; i < blocks; ++i) folded = digest_step(folded, digests[i]);
  return folded;
}

}  // namespace fastsync::kernels
