#include "coding.h"

#include <algorithm>

#include "../check.h"
#include "../ops/buffers.h"

namespace fastsync::engine {

at::Tensor on_host(const std::vector<float>& flags, int64_t numel) {
  FS_ASSERT(static_cast<int64_t>(flags.size()) <= numel, "more flags than room for them");
  at::Tensor host = ops::make_host_floats(numel);
  std::copy(flags.begin(), flags.end(), host.mutable_data_ptr<float>());
  return host;
}

}  // namespace fastsync::engine
