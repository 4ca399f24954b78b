// Numbers in the messages between ranks, whose machines have the same byte order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

namespace fastsync::comm {

template <typename T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// Zero after the end.
template <typename T>
T value_at(const std::string& bytes, size_t offset) {
  T value{};
  if (offset + sizeof value <= bytes.size()) {
    std::memcpy(&value, bytes.data() + offset, sizeof value);
  }
  return value;
}

inline void put_word(std::string& bytes, int64_t value) { bytes += bytes_of(value); }

// Returns the number that begins at `at`, and advances `at`.
inline int64_t take_word(const std::string& bytes, size_t& at) {
  const auto value = value_at<int64_t>(bytes, at);
  at = std::min(bytes.size(), at + sizeof value);
  return value;
}

}  // namespace fastsync::comm
