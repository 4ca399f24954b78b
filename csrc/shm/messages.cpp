#include "shm/messages.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

#include "check.h"
#include "ops/buffers.h"

namespace fastsync::comm {
namespace {

constexpr size_t kAlign = 64;
// Packets of a unit's parameters and of its gradients differ by a few flags: they shall fit into
// the same memory.
constexpr size_t kGrain = 16 << 10;

size_t rounded(size_t bytes, size_t up_to) { return (bytes + up_to - 1) / up_to * up_to; }
size_t aligned(size_t bytes) { return rounded(bytes, kAlign); }

std::vector<at::Tensor> of_rank(const std::vector<Message>& messages, int rank) {
  std::vector<at::Tensor> found;
  for (const Message& message : messages) {
    if (message.rank == rank) found.push_back(message.tensor);
  }
  return found;
}

size_t bytes_of(const std::vector<at::Tensor>& tensors) {
  size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

// Whether two ranks are sent the same memory, which then stands in a packet once.
bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [](const at::Tensor& left, const at::Tensor& right) {
        return left.const_data_ptr() == right.const_data_ptr() && left.nbytes() == right.nbytes();
      });
}

std::shared_ptr<Mailbox> make_mailbox(const SharedMemory& memory, const at::Tensor& table,
                                      SharedStatements& words) {
  const auto places =
      words.exchange("a table of packets", static_cast<double>(*memory.place_of(table)));
  FS_ASSERT(places, "the ranks make packets at different moments");
  return std::make_shared<Mailbox>(memory.segments(), static_cast<size_t>(memory.rank()),
                                   std::vector<size_t>(places->begin(), places->end()),
                                   memory.timeout());
}

}  // namespace

// Contents of a message, by rank.
struct ShmMessages::Contents {
  // At the beginning of each packet, by rank: where that rank's messages stand in it.
  struct Extent {
    uint64_t begin = 0;
    uint64_t bytes = 0;
  };

  Contents(const std::vector<Message>& sent, size_t ranks) {
    size_t end = aligned(ranks * sizeof(Extent));
    for (size_t r = 0; r < ranks; ++r) {
      messages.push_back(of_rank(sent, static_cast<int>(r)));
      const auto twin = std::find_if(written.begin(), written.end(), [&](size_t earlier) {
        return same(messages[earlier], messages[r]);
      });
      if (twin != written.end()) {
        extents.push_back(extents[*twin]);
        continue;
      }
      written.push_back(r);
      extents.push_back({end, bytes_of(messages[r])});
      end += aligned(extents.back().bytes);
    }
    bytes = rounded(end, kGrain);
  }

  std::vector<std::vector<at::Tensor>> messages;
  std::vector<Extent> extents;
  std::vector<size_t> written;  // the others are sent the same as one of these
  size_t bytes = 0;
};

// Messages that the others have written in one exchange, for this rank to read until it is done
// with them.
class ShmMessages::Packets {
 public:
  Packets(std::shared_ptr<Mailbox> mailbox, size_t tag, uint64_t number)
      : mailbox_(std::move(mailbox)), tag_(tag), number_(number) {}
  // No rank shall wait for one that will not read.
  ~Packets() { done(); }
  Packets(const Packets&) = delete;
  Packets& operator=(const Packets&) = delete;

  // The messages of `sender`, one after another. Waits for them.
  const std::byte* from(size_t sender, size_t bytes) {
    const std::byte* const packet = mailbox_->packet(tag_, number_, sender);
    Contents::Extent mine;
    std::memcpy(&mine, packet + mailbox_->rank() * sizeof(mine), sizeof(mine));
    FS_CHECK(mine.bytes == bytes, "rank ", mailbox_->rank(), " expects ", bytes, " bytes of rank ",
             sender, ", which sends ", mine.bytes, "; do they train the same model?");
    return packet + mine.begin;
  }

  bool have_come(std::chrono::milliseconds time) {
    if (!since_) since_ = FutexEvent::Clock::now();
    return mailbox_->have_posted(tag_, number_, time, *since_);
  }
  void done() { mailbox_->done(tag_, number_); }
  size_t rank() const { return mailbox_->rank(); }
  size_t ranks() const { return mailbox_->ranks(); }

 private:
  std::shared_ptr<Mailbox> mailbox_;
  size_t tag_;
  uint64_t number_;
  std::optional<FutexEvent::Clock::time_point> since_;  // set once the caller wants to know
};

// Copies that this rank makes from the others' messages.
class ShmMessages::Reading final : public CalledByWait<> {
 public:
  Reading(std::unique_ptr<Packets> packets, std::vector<Message> received)
      : packets_(std::move(packets)), received_(std::move(received)) {}

  at::Tensor wait() override {
    const size_t ranks = packets_->ranks();
    for (size_t i = 1; i < ranks; ++i) read((packets_->rank() + i) % ranks);
    packets_->done();
    received_.clear();
    call();
    return {};
  }

  bool is_done_within(std::chrono::milliseconds time) override { return packets_->have_come(time); }
  bool can_be_asked() const override { return true; }

 private:
  void read(size_t sender) {
    const std::vector<at::Tensor> messages = of_rank(received_, static_cast<int>(sender));
    if (messages.empty()) return;
    const std::byte* from = packets_->from(sender, bytes_of(messages));
    for (const at::Tensor& message : messages) {
      copy_bytes(message.mutable_data_ptr(), from, static_cast<int64_t>(message.nbytes()));
      from += message.nbytes();
    }
  }

  std::unique_ptr<Packets> packets_;
  std::vector<Message> received_;
};

// Packets where they stand.
class ShmMessages::InPlace final : public CalledByWait<Incoming> {
 public:
  InPlace(std::unique_ptr<Packets> packets, std::vector<Expected> expected, at::ScalarType dtype)
      : packets_(std::move(packets)), expected_(std::move(expected)), dtype_(dtype) {}

  at::Tensor wait() override {
    if (parts_.empty()) find_parts();
    call();
    return {};
  }
  bool is_done_within(std::chrono::milliseconds time) override { return packets_->have_come(time); }
  bool can_be_asked() const override { return true; }

  const std::vector<at::Tensor>& parts() const override { return parts_; }
  void release() override {
    parts_.clear();
    packets_->done();
  }

 private:
  void find_parts() {
    for (const Expected& each : expected_) {
      const auto bytes = static_cast<size_t>(each.numel) * c10::elementSize(dtype_);
      // The memory that was sent is not written to.
      const std::byte* const begin = packets_->from(static_cast<size_t>(each.rank), bytes);
      parts_.push_back(ops::make_over(const_cast<std::byte*>(begin), each.numel, dtype_, [] {}));
    }
  }

  std::unique_ptr<Packets> packets_;  // holds the memory, too
  std::vector<Expected> expected_;
  at::ScalarType dtype_;
  std::vector<at::Tensor> parts_;
};

ShmMessages::ShmMessages(std::shared_ptr<Collective> group, std::shared_ptr<SharedMemory> memory)
    : group_(std::move(group)),
      memory_(std::move(memory)),
      table_(memory_->make_flat(static_cast<int64_t>(sizeof(Mailbox::Table)), at::kByte)),
      words_(*memory_, 0, memory_->timeout()),
      mailbox_(make_mailbox(*memory_, table_, words_)) {
  memory_->keep_pages();
}

// See [Note: memory that stays after its collective] in collective.cpp.
ShmMessages::~ShmMessages() {
  memory_->leave(table_);
  for (const Posted& posted : posted_) {
    if (!mailbox_->is_read(posted.tag, posted.number)) memory_->leave(posted.packet);
  }
}

std::unique_ptr<InFlight> ShmMessages::exchange(std::vector<Message> received,
                                                std::vector<Message> sent, int tag) {
  const auto slot = static_cast<size_t>(tag);
  if (slot >= Mailbox::kSlots) return group_->exchange(std::move(received), std::move(sent), tag);
  return std::make_unique<Reading>(post(sent, slot), std::move(received));
}

std::shared_ptr<Incoming> ShmMessages::borrow(const std::vector<Expected>& expected,
                                              at::ScalarType dtype,
                                              const std::vector<Message>& sent, int tag) {
  const auto slot = static_cast<size_t>(tag);
  if (slot >= Mailbox::kSlots) return nullptr;
  return std::make_shared<InPlace>(post(sent, slot), expected, dtype);
}

std::unique_ptr<ShmMessages::Packets> ShmMessages::post(const std::vector<Message>& sent,
                                                        size_t slot) {
  uint64_t number = 0;
  at::Tensor packet;
  const Contents contents(sent, static_cast<size_t>(size()));
  await_readers(contents.bytes);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    take_back();
    number = ++numbers_[slot];
    packet = write(contents);
    posted_.push_back({slot, number, packet});
  }
  mailbox_->post(slot, number, *memory_->place_of(packet));
  return std::make_unique<Packets>(mailbox_, slot, number);
}

// A rank that is ahead lets the others read before it takes memory that a step has not needed yet:
// see [Note: one copy instead of two] in collective.cpp.
void ShmMessages::await_readers(size_t bytes) {
  constexpr std::chrono::milliseconds kMoment{200};
  const auto end = std::chrono::steady_clock::now() + kMoment;
  for (auto left = kMoment; left.count() > 0;) {
    const std::optional<Posted> unread = unread_by_others(bytes);
    if (!unread || !mailbox_->is_read_within(unread->tag, unread->number, left)) return;
    left = std::chrono::duration_cast<std::chrono::milliseconds>(end -
                                                                 std::chrono::steady_clock::now());
  }
}

// The first packet that waiting for makes sense, if the next one, of so many bytes, takes memory.
std::optional<ShmMessages::Posted> ShmMessages::unread_by_others(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  take_back();
  if (posted_.empty() || memory_->is_warm(bytes)) return {};
  const auto found = std::find_if(posted_.begin(), posted_.end(), [&](const Posted& posted) {
    return mailbox_->is_done_here(posted.tag, posted.number);
  });
  return found == posted_.end() ? std::nullopt : std::make_optional(*found);
}

at::Tensor ShmMessages::write(const Contents& contents) {
  const at::Tensor packet = memory_->make_flat(static_cast<int64_t>(contents.bytes), at::kByte);
  auto* const to = static_cast<std::byte*>(packet.mutable_data_ptr());
  std::memcpy(to, contents.extents.data(), contents.extents.size() * sizeof(Contents::Extent));
  for (const size_t r : contents.written) {
    std::byte* place = to + contents.extents[r].begin;
    for (const at::Tensor& message : contents.messages[r]) {
      const auto* const from = static_cast<const std::byte*>(message.const_data_ptr());
      copy_bytes(place, from, static_cast<int64_t>(message.nbytes()));
      place += message.nbytes();
    }
  }
  return packet;
}

// Takes back the messages that all ranks have read.
void ShmMessages::take_back() {
  for (auto posted = posted_.begin(); posted != posted_.end();) {
    if (mailbox_->is_read(posted->tag, posted->number)) {
      posted = posted_.erase(posted);
    } else {
      ++posted;
    }
  }
}

void ShmMessages::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  take_back();
  memory_->trim();
}

}  // namespace fastsync::comm
