#include "shm_messages.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

#include "../check.h"

namespace fastsync::comm {
namespace {

constexpr size_t kAlign = 64;

// At the beginning of each letter, by rank: where its messages stand in the letter.
struct Extent {
  uint64_t begin = 0;
  uint64_t bytes = 0;
};

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

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

// Whether two ranks are sent the same memory, which then stands in a letter once.
bool same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [](const at::Tensor& left, const at::Tensor& right) {
        return left.const_data_ptr() == right.const_data_ptr() && left.nbytes() == right.nbytes();
      });
}

std::shared_ptr<Mail> make_mail(const SharedMemory& memory, const at::Tensor& table,
                                SharedWords& words) {
  const auto places =
      words.exchange("a table of letters", static_cast<double>(*memory.place_of(table)));
  FS_ASSERT(places, "the ranks make letters at different moments");
  return std::make_shared<Mail>(memory.segments(), static_cast<size_t>(memory.rank()),
                                std::vector<size_t>(places->begin(), places->end()),
                                memory.timeout());
}

}  // namespace

// What this rank receives in one exchange.
class ShmMessages::Reading final : public CalledByWait<> {
 public:
  Reading(std::shared_ptr<Mail> mail, size_t tag, uint64_t number, std::vector<Message> received)
      : mail_(std::move(mail)), tag_(tag), number_(number), received_(std::move(received)) {}
  // Nobody shall wait for a rank that will not read.
  ~Reading() override { mail_->done(tag_, number_); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  at::Tensor wait() override {
    const size_t ranks = mail_->ranks();
    for (size_t i = 1; i < ranks; ++i) read((mail_->rank() + i) % ranks);
    mail_->done(tag_, number_);
    received_.clear();
    call();
    return {};
  }

  bool is_done_within(std::chrono::milliseconds time) override {
    if (!since_) since_ = Bell::Clock::now();
    return mail_->have_posted(tag_, number_, time, *since_);
  }
  bool can_be_asked() const override { return true; }

 private:
  void read(size_t sender) {
    const std::vector<at::Tensor> messages = of_rank(received_, static_cast<int>(sender));
    if (messages.empty()) return;
    const std::byte* const letter = mail_->letter(tag_, number_, sender);
    Extent mine;
    std::memcpy(&mine, letter + mail_->rank() * sizeof(Extent), sizeof(Extent));
    FS_CHECK(mine.bytes == bytes_of(messages), "rank ", mail_->rank(), " expects ",
             bytes_of(messages), " bytes of rank ", sender, ", which sends ", mine.bytes,
             "; do they train the same model?");
    const std::byte* from = letter + mine.begin;
    for (const at::Tensor& message : messages) {
      copy_bytes(message.mutable_data_ptr(), from, static_cast<int64_t>(message.nbytes()));
      from += message.nbytes();
    }
  }

  std::shared_ptr<Mail> mail_;
  size_t tag_;
  uint64_t number_;
  std::vector<Message> received_;
  std::optional<Bell::Clock::time_point> since_;  // somebody wants to know
};

ShmMessages::ShmMessages(std::shared_ptr<Collective> group, std::shared_ptr<SharedMemory> memory)
    : group_(std::move(group)),
      memory_(std::move(memory)),
      table_(memory_->make_flat(static_cast<int64_t>(sizeof(Mail::Table)), at::kByte)),
      words_(*memory_, 0, memory_->timeout()),
      mail_(make_mail(*memory_, table_, words_)),
      pool_(ops::BlockPool::kNoMark,
            [memory = memory_](int64_t bytes) { return memory->make_flat(bytes, at::kByte); }) {}

// See [Note: what outlives its collective] in shm_collective.cpp.
ShmMessages::~ShmMessages() {
  keep_for_good(table_);
  for (const Posted& posted : posted_) {
    if (!mail_->is_read(posted.tag, posted.number)) keep_for_good(posted.letter);
  }
}

std::unique_ptr<InFlight> ShmMessages::exchange(std::vector<Message> received,
                                                std::vector<Message> sent, int tag) {
  const auto box = static_cast<size_t>(tag);
  if (box >= Mail::kBoxes) return group_->exchange(std::move(received), std::move(sent), tag);
  uint64_t number = 0;
  at::Tensor letter;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    take_back();
    number = ++numbers_[box];
    letter = write(sent);
    posted_.push_back({box, number, letter});
  }
  mail_->post(box, number, *memory_->place_of(letter));
  return std::make_unique<Reading>(mail_, box, number, std::move(received));
}

at::Tensor ShmMessages::write(const std::vector<Message>& sent) {
  const auto ranks = static_cast<size_t>(size());
  std::vector<std::vector<at::Tensor>> messages;
  std::vector<Extent> extents;
  std::vector<size_t> written;  // the others are sent the same as one of these
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
  const at::Tensor letter = pool_.take(static_cast<int64_t>(end), at::kByte, at::kCPU);
  auto* const to = static_cast<std::byte*>(letter.mutable_data_ptr());
  std::memcpy(to, extents.data(), ranks * sizeof(Extent));
  for (const size_t r : written) {
    std::byte* place = to + extents[r].begin;
    for (const at::Tensor& message : messages[r]) {
      const auto* const from = static_cast<const std::byte*>(message.const_data_ptr());
      copy_bytes(place, from, static_cast<int64_t>(message.nbytes()));
      place += message.nbytes();
    }
  }
  return letter;
}

// What all have read.
void ShmMessages::take_back() {
  for (auto posted = posted_.begin(); posted != posted_.end();) {
    if (mail_->is_read(posted->tag, posted->number)) {
      pool_.give(posted->letter);
      posted = posted_.erase(posted);
    } else {
      ++posted;
    }
  }
}

void ShmMessages::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  take_back();
  pool_.trim();
}

}  // namespace fastsync::comm
