// A list of named cases and a check macro; no framework.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../check.h"

namespace fastsync::testing {

struct Case {
  std::string name;
  std::function<void()> function;
};

// Runs the cases whose name contains one of the arguments (all without one). The exit code is 1
// when a case fails.
inline int run_cases(const std::vector<Case>& cases, int argc, char** argv) {
  const std::vector<std::string> filters(argv + 1, argv + argc);
  const auto wanted = [&](const Case& test) {
    return filters.empty() ||
           std::any_of(filters.begin(), filters.end(), [&](const std::string& part) {
             return test.name.find(part) != std::string::npos;
           });
  };
  int passed = 0;
  int failed = 0;
  for (const Case& test : cases) {
    if (!wanted(test)) continue;
    try {
      test.function();
      ++passed;
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s: %s\n", test.name.c_str(), error.what());
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

template <class Error, class Function>
std::string message_of(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  throw std::runtime_error("expected an exception, got none");
}

}  // namespace fastsync::testing

// Ends the case unless `cond` holds; the parts after it say what was found.
#define EXPECT(cond, ...)                                                                  \
  do {                                                                                     \
    if (!(cond)) {                                                                         \
      throw std::runtime_error(::fastsync::concat(__FILE__, ":", __LINE__, ": ",           \
                                                  #cond " does not hold: ", __VA_ARGS__)); \
    }                                                                                      \
  } while (false)
