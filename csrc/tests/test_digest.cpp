// Digests of blocks against a loop over words, on each instruction set.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../kernels/digest.h"
#include "harness.h"
#include "pack_model.h"

namespace fastsync::testing {
namespace {

using kernels::digest_block_cpu;
using kernels::kDigestBlock;
using kernels::kDigestLanes;

// One word after the other; a reader need not know of rows.
uint64_t digest_by_words(const char* data, int64_t bytes) {
  std::vector<uint64_t> lanes(kDigestLanes);
  const int64_t row = kDigestLanes * 8;
  const int64_t filled = (bytes + row - 1) / row * row;
  for (int64_t begin = 0; begin < filled; begin += 8) {
    uint64_t word = 0;
    const int64_t held = std::clamp<int64_t>(bytes - begin, 0, 8);
    if (held > 0) std::memcpy(&word, data + begin, static_cast<size_t>(held));
    uint64_t& lane = lanes[static_cast<size_t>(begin / 8 % kDigestLanes)];
    lane = kernels::digest_step(lane, word);
  }
  auto folded = static_cast<uint64_t>(bytes);
  for (const uint64_t lane : lanes) folded = kernels::digest_step(folded, lane);
  return folded;
}

// Numbers of bytes; the memory begins wherever an element of 16 bits may.
void blocks_of_any_size() {
  for (const int64_t elements : {0, 1, 3, 4, 5, 127, 128, 129, 5000, 16384}) {
    GuardedBuffer from(DType::kFloat16, elements, static_cast<int>(elements % 5));
    for (int64_t i = 0; i < 2 * elements; ++i) from.data()[i] = static_cast<char>(i * i + 7 * i);
    const uint64_t found = digest_block_cpu(from.data(), 2 * elements);
    const uint64_t wanted = digest_by_words(from.data(), 2 * elements);
    EXPECT(found == wanted, elements, " elements: ", found, " instead of ", wanted);
  }
}

// Signs are the highest bits of words: those of two must not cancel out, in one lane or in two.
void signs_of_two_words() {
  std::vector<uint64_t> words(kDigestBlock / 8, 1);
  const uint64_t before = digest_block_cpu(words.data(), kDigestBlock);
  for (const size_t other : {1, 31, 32, 64, 4095}) {
    std::vector<uint64_t> changed = words;
    changed[0] ^= uint64_t{1} << 63;
    changed[other] ^= uint64_t{1} << 63;
    EXPECT(digest_block_cpu(changed.data(), kDigestBlock) != before, "word ", other);
  }
}

}  // namespace
}  // namespace fastsync::testing

int main(int argc, char** argv) {
  using namespace fastsync::testing;
  return run_cases(
      {{"blocks_of_any_size", blocks_of_any_size}, {"signs_of_two_words", signs_of_two_words}},
      argc, argv);
}
