#include "reducer/bucket.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "check.h"
#include "ops/buffers.h"
#include "ops/checks.h"
#include "transport/coding.h"

namespace fastsync::engine {

const char* to_string(BucketState state) {
  switch (state) {
    case BucketState::kFilling:
      return "filling";
    case BucketState::kReady:
      return "ready";
    case BucketState::kPacked:
      return "packed";
    case BucketState::kInFlight:
      return "in flight";
    case BucketState::kReceived:
      return "received";
  }
  return "unknown";
}

Bucket::Bucket(const BucketSpec& spec, const Parameters& params, const Routes& routes, size_t index,
               size_t count)
    : slots_(std::make_unique<Slots>()), group_(spec.group), pending_(spec.slots.size()) {
  FS_CHECK_VALUE(!spec.slots.empty(), "a bucket needs at least one parameter");
  FS_CHECK_VALUE(!spec.sparse || spec.slots.size() == 1, "a sparse bucket holds one parameter");
  for (const SlotSpec& slot : spec.slots) {
    const auto param = static_cast<size_t>(slot.param);
    Parameter* const known = params.at(param).get();
    slots_->push_back(Slot{known, param, ops::SlotLayout::of(known->tensor, slot.offset)});
  }
  transport_ = choose_transport(spec, *slots_, routes, index, count);
}

int64_t Bucket::gradient_bytes() const {
  int64_t bytes = 0;
  for (const Slot& slot : *slots_) {
    const at::ScalarType real = c10::toRealValueType(slot.param->dtype());
    bytes += slot.layout.numel * static_cast<int64_t>(c10::elementSize(real));
  }
  return bytes;
}

namespace {

std::string in_words(int64_t bytes) {
  if (bytes < 1 << 10) return concat(bytes, " bytes");
  const bool small = bytes < 1 << 20;
  const double units = static_cast<double>(bytes) / (small ? 1 << 10 : 1 << 20);
  return concat(std::round(units * 10) / 10, small ? " KiB" : " MiB");
}

}  // namespace

std::string Bucket::describe() const {
  const std::string size = in_words(transport_->bytes());
  const std::string& first = slots_->front().param->name;
  const std::string& last = slots_->back().param->name;
  if (slots_->size() == 1) return concat("parameter '", first, "', ", size);
  return concat(slots_->size(), " parameters, '", first, "' to '", last, "', ", size);
}

void Bucket::move_to(BucketState from, BucketState to) {
  FS_ASSERT(state_ == from, "bucket (", describe(), ") is ", to_string(state_), ", cannot go from ",
            to_string(from), " to ", to_string(to));
  state_ = to;
}

bool Bucket::mark_ready(size_t index, std::optional<c10::Stream> stream) {
  Slot& slot = slots_->at(index);
  slot.stream = std::move(stream);
  ++slot.accumulations;
  missed_ = missed_ || !slot.param->used;
  const bool repeated = slot.accumulations > slot.param->expected_accumulations;
  if (repeated) slot.param->expected_accumulations = slot.accumulations;
  slot.early = slot.early && !repeated;  // pack it again
  slot.checked = false;
  if (repeated || slot.accumulations < slot.param->expected_accumulations || --pending_ > 0)
    return false;
  move_to(BucketState::kFilling, BucketState::kReady);
  return true;
}

void Bucket::offer(size_t index, const Packing& how) {
  const Slot& slot = slots_->at(index);
  if (slot.accumulations != slot.param->expected_accumulations || !slot.grad().defined()) return;
  if (how.check_finite && device().is_cpu()) check({index});
  transport_->take(index, how);
}

void Bucket::check_finite() {
  if (!device().is_cpu()) {
    infinities_ = find_infinities();
    checked_ = true;
    return;
  }
  std::vector<size_t> unseen;
  for (size_t i = 0; i < slots_->size(); ++i) {
    const Slot& slot = (*slots_)[i];
    if (!slot.checked && !slot.early && slot.grad().defined()) unseen.push_back(i);
  }
  check(unseen);
}

void Bucket::check(const std::vector<size_t>& indices) {
  std::vector<at::Tensor> grads;
  for (const size_t i : indices) grads.push_back((*slots_)[i].grad());
  const std::vector<bool> finite = ops::all_finite(grads);
  for (size_t k = 0; k < indices.size(); ++k) {
    Slot& slot = (*slots_)[indices[k]];
    slot.finite = finite[k];
    slot.checked = true;
  }
  checked_ = true;
}

// Returns, per slot and in fp32, infinity if this rank's gradient holds NaN or infinity, else zero.
at::Tensor Bucket::find_infinities() const {
  const at::NoGradGuard no_grad;
  const at::Tensor found =
      ops::make_flat(static_cast<int64_t>(slots_->size()), at::kFloat, device());
  std::vector<at::Tensor> grads;
  std::vector<at::Tensor> places;
  for (size_t i = 0; i < slots_->size(); ++i) {
    const Slot& slot = (*slots_)[i];
    if (!slot.param->used || !slot.grad().defined() || slot.grad().numel() == 0) continue;
    grads.push_back(slot.grad());
    places.push_back(found.narrow(0, static_cast<int64_t>(i), 1));
  }
  if (grads.empty()) return found;
  const at::Tensor broken = ops::finite_on_device(grads).logical_not();
  const auto infinity = std::numeric_limits<double>::infinity();
  if (grads.size() == slots_->size()) return found.masked_fill_(broken, infinity);
  const std::vector<at::Tensor> each = broken.split(1);
  for (size_t i = 0; i < places.size(); ++i) places[i].masked_fill_(each[i], infinity);
  return found;
}

void Bucket::close() {
  if (state_ != BucketState::kFilling) return;
  for (Slot& slot : *slots_) {
    // Gradients accumulated before this backward may have been set to None since.
    if (slot.accumulations == 0 && !slot.grad().defined()) slot.param->used = false;
    missed_ = missed_ || !slot.param->used;
  }
  pending_ = 0;
  move_to(BucketState::kFilling, BucketState::kReady);
}

// Gradients that autograd produced on another stream than the current one must be finished, and
// their memory must not be handed out again, before the pack kernel has read them.
void Bucket::wait_for_producers() const {
  if (device().is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device().type());
  const c10::Stream current = guard.getStream(device());
  std::vector<c10::Stream> seen{current};
  for (const Slot& slot : *slots_) {
    if (!slot.stream || *slot.stream == current) continue;
    const at::Tensor& grad = slot.grad();
    if (grad.defined() && grad.has_storage()) {
      guard.recordDataPtrOnStream(grad.storage().data_ptr(), current);
    }
    if (std::find(seen.begin(), seen.end(), *slot.stream) != seen.end()) continue;
    seen.push_back(*slot.stream);
    c10::Event event(device().type());
    event.record(*slot.stream);
    event.block(current);
  }
}

void Bucket::pack(Packing how) {
  move_to(BucketState::kReady, BucketState::kPacked);
  wait_for_producers();
  how.missed = missed_;
  if (how.check_finite) check_finite();
  how.infinities = infinities_;
  transport_->pack(how);
}

void Bucket::launch() {
  move_to(BucketState::kPacked, BucketState::kInFlight);
  in_flight_ = transport_->launch();
  if (transport_->ends_early()) arrives_within({});  // which has it watched
}

void Bucket::receive() {
  move_to(BucketState::kInFlight, BucketState::kReceived);
  const at::Tensor result = in_flight_->wait();
  in_flight_.reset();
  transport_->receive(result);
}

void Bucket::finish(const std::vector<bool>& used_anywhere) {
  move_to(BucketState::kReceived, BucketState::kFilling);
  if (checked_) note_finite(/*travelled=*/true);
  transport_->deliver(used_on_any_rank(used_anywhere));
  abandon();
}

std::vector<float> Bucket::used_flags() const {
  std::vector<float> flags;
  for (const Slot& slot : *slots_) flags.push_back(used_flag(slot));
  return flags;
}

void Bucket::keep_flags(bool travelled) {
  UnreadFlags kept;
  for (size_t i = 0; i < slots_->size(); ++i) {
    kept.params.push_back((*slots_)[i].param);
    kept.added.push_back(transport_->adds(i));
  }
  kept.own = std::exchange(infinities_, at::Tensor());
  const bool sent = travelled && transport_->has_flags();
  const auto count = static_cast<int64_t>(slots_->size());
  kept.sums =
      sent ? ops::copy_of(sums_of_flags()) : flags_on(device(), used_flags(), count, kept.own);
  unread_ = std::move(kept);
}

void Bucket::note_finite(bool travelled) {
  if (infinities_.defined()) return keep_flags(travelled);
  const at::Tensor flags = travelled && transport_->has_flags() ? flags_on_host() : at::Tensor();
  for (size_t i = 0; i < slots_->size(); ++i) {
    const Slot& slot = (*slots_)[i];
    const float flag = flags.defined() ? flags.const_data_ptr<float>()[i] : used_flag(slot);
    if (flag == 0.0F) continue;  // the gradient stays as it was
    const bool added = transport_->adds(i) && slot.param->nonfinite;
    slot.param->nonfinite = !std::isfinite(flag) || added;
    slot.param->nonfinite_here = !slot.finite;
  }
}

void Bucket::abandon() {
  state_ = BucketState::kFilling;
  // An abandoned collective still writes to its buffer, so the buffer is not reused. On a device
  // its end makes the current stream wait, before the transport copies anything.
  const bool in_flight = std::exchange(in_flight_, nullptr) != nullptr;
  transport_->abandon(in_flight);
  pending_ = slots_->size();
  missed_ = checked_ = false;
  infinities_ = at::Tensor();
  for (Slot& slot : *slots_) {
    slot.accumulations = 0;
    slot.early = slot.checked = false;
    slot.finite = true;
    slot.stream.reset();
  }
}

std::vector<bool> Bucket::used_on_any_rank(const std::vector<bool>& used_anywhere) const {
  std::vector<bool> used(slots_->size(), true);
  if (!missed_) return used;
  const bool flags_travelled = used_anywhere.empty() && transport_->has_flags();
  const at::Tensor flags = flags_travelled ? flags_on_host() : at::Tensor();
  const float* values = flags_travelled ? flags.const_data_ptr<float>() : nullptr;
  for (size_t i = 0; i < slots_->size(); ++i) {
    const Slot& slot = (*slots_)[i];
    used[i] = slot.param->used || (flags_travelled && values[i] > 0.0F) ||
              (!used_anywhere.empty() && used_anywhere.at(slot.index));
  }
  return used;
}

at::Tensor Bucket::sums_of_flags() const {
  if (!transport_->has_flags()) return {};
  // Those of a coded bucket fill up its chunks.
  return transport_->flags().narrow(0, 0, static_cast<int64_t>(slots_->size())).to(at::kFloat);
}

at::Tensor Bucket::flags_on_host() const {
  return transport_->flags().to(at::TensorOptions().device(at::kCPU).dtype(at::kFloat));
}

void Bucket::count_uses(std::vector<int64_t>& counts) const {
  if (!transport_->has_flags()) return;
  const at::Tensor flags = flags_on_host();
  const float* values = flags.const_data_ptr<float>();
  for (size_t i = 0; i < slots_->size(); ++i) {
    // At least one rank flagged infinity.
    counts.at((*slots_)[i].index) = std::isfinite(values[i]) ? std::lround(values[i]) : 1;
  }
}

}  // namespace fastsync::engine
