// What the words of an error of a backend, or of shared memory, tell of other ranks.
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

// Who shares memory with a rank sees that it has ended. Then its neighbours will hear of it, too.
inline bool tells_of_death(const std::string& error) { return holds_any(error, {" ended while"}); }

// Whether another rank may be the reason: an error of this one alone has none of these words.
inline bool is_networks(const std::string& error) {
  return tells_of_time(error) || tells_of_death(error) ||
         holds_any(error, {"onnect", "peer", "roken pipe", "socket", "NCCL"});
}

}  // namespace fastsync::engine
