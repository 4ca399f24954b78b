// Numbers in the messages between ranks, whose machines have the same byte order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

namespace fastsync::engine {

inline void put_word(std::string& bytes, int64_t value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Returns the number that begins at `at`, and advances `at`. Zero after the end.
inline int64_t take_word(const std::string& bytes, size_t& at) {
  int64_t value = 0;
  if (at + sizeof value <= bytes.size()) std::memcpy(&value, bytes.data() + at, sizeof value);
  at = std::min(bytes.size(), at + sizeof value);
  return value;
}

}  // namespace fastsync::engine
