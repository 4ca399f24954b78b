// Reads from the text of a backend's error, or an error of shared memory, what happened to other
// ranks.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

namespace fastsync::engine {

inline bool holds_any(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return text.find(word) != std::string::npos; });
}

inline bool tells_of_time(const std::string& error) {
  return holds_any(error, {"imed out", "imeout", "did not come"});
}

// A rank that shares memory with another one sees when that one ends. The neighbours of the ended
// rank learn of it, too.
inline bool tells_of_death(const std::string& error) { return holds_any(error, {" ended while"}); }

// Whether another rank may be the cause: an error of this rank alone contains none of these words.
inline bool is_networks(const std::string& error) {
  return tells_of_time(error) || tells_of_death(error) ||
         holds_any(error, {"onnect", "peer", "roken pipe", "socket", "NCCL"});
}

}  // namespace fastsync::engine
