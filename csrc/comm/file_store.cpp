#include "file_store.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

namespace fastsync::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kPause{10};  // between two looks at the file
// Marks of keys, as in torch's FileStore: those of programs, and those that have been deleted.
constexpr char kKey = '/';
constexpr char kDeleted = '-';

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

template <class Function>
void as_store_errors(const Function& function) {
  try {
    function();
  } catch (const std::exception& error) {
    TORCH_CHECK_WITH(DistStoreError, false, error.what());
  }
}

}  // namespace

FileStore::FileStore(std::string path) : file_(std::move(path)) {}

c10::intrusive_ptr<c10d::Store> FileStore::clone() {
  auto made = c10::make_intrusive<FileStore>(file_.path());
  made->setTimeout(getTimeout());
  return made;
}

void FileStore::learn(std::vector<Record> news) {
  for (Record& record : news) {
    if (!record.key.empty() && record.key.front() == kDeleted) {
      known_.erase(record.key.substr(1));
    } else {
      known_[record.key] = std::move(record.value);
    }
  }
}

void FileStore::refresh() {
  as_store_errors([&] { learn(file_.news()); });
}

template <class Make>
void FileStore::update(const Make& make) {
  as_store_errors([&] {
    file_.update([&](std::vector<Record> news) -> std::optional<Record> {
      learn(std::move(news));
      return make();
    });
  });
}

const std::string* FileStore::find(const std::string& key) const {
  const auto found = known_.find(kKey + key);
  return found == known_.end() ? nullptr : &found->second;
}

void FileStore::set(const std::string& key, const std::vector<uint8_t>& value) {
  const std::lock_guard hold(mutex_);
  update([&] { return Record{kKey + key, text_of(value)}; });
}

std::vector<uint8_t> FileStore::compareSet(const std::string& key,
                                           const std::vector<uint8_t>& expected,
                                           const std::vector<uint8_t>& wanted) {
  const std::lock_guard hold(mutex_);
  std::string result;
  update([&]() -> std::optional<Record> {
    const std::string* now = find(key);
    const std::string before = text_of(expected);
    if (now == nullptr ? !before.empty() : *now != before) {
      result = now == nullptr ? before : *now;
      return std::nullopt;
    }
    result = text_of(wanted);
    return Record{kKey + key, result};
  });
  return bytes_of(result);
}

int64_t FileStore::add(const std::string& key, int64_t value) {
  const std::lock_guard hold(mutex_);
  int64_t sum = value;
  update([&] {
    const std::string* now = find(key);
    if (now != nullptr && !now->empty()) sum += std::stoll(*now);
    return Record{kKey + key, std::to_string(sum)};
  });
  return sum;
}

bool FileStore::deleteKey(const std::string& key) {
  const std::lock_guard hold(mutex_);
  update([&] { return Record{std::string{kDeleted, kKey} + key, ""}; });
  return true;
}

bool FileStore::check(const std::vector<std::string>& keys) {
  const std::lock_guard hold(mutex_);
  refresh();
  return std::all_of(keys.begin(), keys.end(),
                     [&](const std::string& key) { return find(key) != nullptr; });
}

int64_t FileStore::getNumKeys() {
  const std::lock_guard hold(mutex_);
  refresh();
  return static_cast<int64_t>(known_.size());
}

std::vector<uint8_t> FileStore::get(const std::string& key) {
  while (true) {
    wait({key});
    const std::lock_guard hold(mutex_);
    const std::string* value = find(key);
    if (value != nullptr) return bytes_of(*value);  // or it has been deleted meanwhile
  }
}

void FileStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void FileStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  const auto deadline = steady_clock::now() + timeout;
  while (!check(keys)) {
    TORCH_CHECK_WITH(DistStoreError, timeout == kNoTimeout || steady_clock::now() < deadline,
                     "nobody has written ", keys.front(), ", or another of ", keys.size(),
                     " keys, for ", timeout.count(), " ms");
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace fastsync::comm
