// Errors with one form: what was expected, what was found, and what to do about it.
//
//   FS_CHECK(cond, ...)        the caller's mistake   -> std::runtime_error (Python: RuntimeError)
//   FS_CHECK_VALUE(cond, ...)  a wrong argument       -> std::invalid_argument (Python: ValueError)
//   FS_ASSERT(cond, ...)       a bug inside fastsync  -> std::logic_error, with file and line
//
// The message is everything after the condition, streamed in order. No torch header: the kernels
// use this too.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fastsync {

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace fastsync

#define FS_CHECK(cond, ...)                                                               \
  do {                                                                                    \
    if (!(cond)) throw std::runtime_error(::fastsync::concat("fastsync: ", __VA_ARGS__)); \
  } while (false)

#define FS_CHECK_VALUE(cond, ...)                                                            \
  do {                                                                                       \
    if (!(cond)) throw std::invalid_argument(::fastsync::concat("fastsync: ", __VA_ARGS__)); \
  } while (false)

#define FS_ASSERT(cond, ...)                                                                   \
  do {                                                                                         \
    if (!(cond)) {                                                                             \
      throw std::logic_error(::fastsync::concat("fastsync bug, please report it: " #cond " (", \
                                                __FILE__, ":", __LINE__, ") ", __VA_ARGS__));  \
    }                                                                                          \
  } while (false)
