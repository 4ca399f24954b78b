#include "coding.h"

#include <ATen/core/grad_mode.h>

#include "../check.h"
#include "../ops/buffers.h"

namespace fastsync::engine {

void add_flags(ops::ItemList& items, const std::vector<float>& flags, int64_t begin) {
  for (size_t from = 0, to = 0; from < flags.size(); from = to) {
    while (to < flags.size() && flags[to] == flags[from]) ++to;
    FS_ASSERT(to > from, "a flag is no number");
    items.add_run({}, begin + static_cast<int64_t>(from), static_cast<int64_t>(to - from),
                  flags[from]);
  }
}

void write_flags(const std::vector<float>& flags, const at::Tensor& to) {
  FS_ASSERT(static_cast<int64_t>(flags.size()) <= to.numel(), "more flags than room for them");
  std::vector<float> all = flags;
  all.resize(static_cast<size_t>(to.numel()), 0.0F);
  ops::ItemList items;
  add_flags(items, all, 0);
  items.pack(to, 1.0);
}

at::Tensor flags_on(at::Device device, const std::vector<float>& flags, int64_t numel,
                    const at::Tensor& added) {
  const at::NoGradGuard no_grad;
  at::Tensor found = ops::make_scratch({numel}, at::kFloat, device);
  write_flags(flags, found);
  add_to_first(found, added);
  return found;
}

void add_to_first(const at::Tensor& flags, const at::Tensor& terms) {
  const at::NoGradGuard no_grad;
  if (terms.defined()) flags.narrow(0, 0, terms.numel()).add_(terms);
}

}  // namespace fastsync::engine
