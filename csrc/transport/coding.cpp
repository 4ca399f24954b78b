#include "coding.h"

#include "../check.h"
#include "../ops/buffers.h"
#include "../ops/ops.h"

namespace fastsync::engine {

void write_flags(const std::vector<float>& flags, const at::Tensor& to) {
  const auto count = static_cast<int64_t>(flags.size());
  FS_ASSERT(count <= to.numel(), "more flags than room for them");
  const auto value_at = [&](int64_t i) { return i < count ? flags[static_cast<size_t>(i)] : 0.0F; };
  std::vector<ops::SlotLayout> runs;  // of equal values
  for (int64_t begin = 0, end = 0; begin < to.numel(); begin = end) {
    while (end < to.numel() && value_at(end) == value_at(begin)) ++end;
    FS_ASSERT(end > begin, "a flag is no number");
    runs.push_back(ops::SlotLayout::run(begin, end - begin));
  }
  std::vector<ops::Item> items;
  for (const ops::SlotLayout& run : runs) {
    items.push_back({at::Tensor(), &run, value_at(run.offset)});
  }
  ops::pack(items, to, 1.0);
}

at::Tensor flags_on(at::Device device, const std::vector<float>& flags, int64_t numel) {
  at::Tensor found = ops::make_scratch({numel}, at::kFloat, device);
  write_flags(flags, found);
  return found;
}

}  // namespace fastsync::engine
