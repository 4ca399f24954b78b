// Numbers in the messages that ranks tell each other, all of them machines of one kind.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

namespace fastsync::engine {

inline void put_word(std::string& bytes, int64_t value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// The one that begins at `at`, which goes on. Zeros after the end.
inline int64_t take_word(const std::string& bytes, size_t& at) {
  int64_t value = 0;
  if (at + sizeof value <= bytes.size()) std::memcpy(&value, bytes.data() + at, sizeof value);
  at = std::min(bytes.size(), at + sizeof value);
  return value;
}

}  // namespace fastsync::engine
