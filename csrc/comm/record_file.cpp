#include "record_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

#include "../check.h"

namespace fastsync::comm {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPause{1};
constexpr milliseconds kPatience{5000};    // with a lock that is held for microseconds otherwise
constexpr size_t kBytes = 1 << 16;         // read at once
constexpr uint32_t kMostLength = 1 << 28;  // of a key or value: more is no store's

class OpenFile {
 public:
  OpenFile(const std::string& path, int flags) : number(open(path.c_str(), flags | O_CLOEXEC)) {
    FS_CHECK(number >= 0, "cannot open the store's file ", path, ": ", std::strerror(errno));
  }
  ~OpenFile() { close(number); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  const int number;
};

// Goes along the keys and values of a file: each has its length before it.
class Fields {
 public:
  explicit Fields(std::string_view bytes) : bytes_(bytes) {}

  // The next one; nothing where it is not all there.
  std::optional<std::string_view> next() {
    uint32_t length = 0;
    const std::string_view rest = bytes_.substr(at_);
    if (rest.size() < sizeof(length)) return std::nullopt;
    std::memcpy(&length, rest.data(), sizeof(length));
    if (rest.size() - sizeof(length) < length) return std::nullopt;
    at_ += sizeof(length) + length;
    return rest.substr(sizeof(length), length);
  }

  size_t at() const { return at_; }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
};

std::string field(const std::string& text) {
  const auto length = static_cast<uint32_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

// Appends what `bytes` lack of the field that begins at `at`. Returns where it ends; nothing where it cannot be one.
std::optional<size_t> complete_field(std::string& bytes, size_t at, char filler) {
  uint32_t length = 0;
  const size_t begin = at + sizeof(length);
  if (bytes.size() < begin) bytes.resize(begin, '\0');
  std::memcpy(&length, bytes.data() + at, sizeof(length));
  if (length > kMostLength) return std::nullopt;
  if (bytes.size() < begin + length) bytes.resize(begin + length, filler);
  return begin + length;
}

std::string read_from(int file, off_t at) {
  std::string bytes;
  while (true) {
    const size_t before = bytes.size();
    bytes.resize(before + kBytes);
    const ssize_t got = pread(file, bytes.data() + before, kBytes, at + static_cast<off_t>(before));
    bytes.resize(before + (got > 0 ? static_cast<size_t>(got) : 0));
    if (got <= 0) return bytes;
  }
}

// Until the file is closed.
void lock(const OpenFile& file, const std::string& path) {
  for (milliseconds waited{0}; flock(file.number, LOCK_EX | LOCK_NB) != 0; waited += kPause) {
    FS_CHECK(waited < kPatience, "another process has held the lock of the store's file ", path,
             " for ", kPatience.count() / 1000, " s: it is stopped, or reads what nobody writes");
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

std::optional<std::string> missing_of(std::string_view torn) {
  std::string record(torn);
  const std::optional<size_t> key_end = complete_field(record, 0, '\0');
  if (!key_end || !complete_field(record, *key_end, '0')) return std::nullopt;
  return record.substr(torn.size());
}

RecordFile::RecordFile(std::string path) : path_(std::move(path)) {}

std::vector<Record> RecordFile::take_news(int file, std::string& torn) {
  const std::string bytes = read_from(file, read_);
  std::vector<Record> news;
  Fields fields(bytes);
  size_t whole = 0;
  while (const auto key = fields.next()) {
    const auto value = fields.next();
    if (!value) break;
    news.push_back({std::string(*key), std::string(*value)});
    whole = fields.at();
  }
  read_ += static_cast<off_t>(whole);
  torn = bytes.substr(whole);
  return news;
}

std::vector<Record> RecordFile::news() {
  const OpenFile file(path_, O_RDONLY);
  std::string torn;
  return take_news(file.number, torn);
}

void RecordFile::update(const std::function<std::optional<Record>(std::vector<Record>)>& make) {
  const OpenFile file(path_, O_RDWR | O_APPEND);
  lock(file, path_);
  std::string torn;
  const std::optional<Record> made = make(take_news(file.number, torn));
  if (!made) return;
  std::string bytes;
  if (!torn.empty()) {
    const std::optional<std::string> missing = missing_of(torn);
    FS_CHECK(missing, "there is no store in the file ", path_);
    bytes = *missing;
  }
  bytes += field(made->key) + field(made->value);
  const ssize_t written = write(file.number, bytes.data(), bytes.size());
  FS_CHECK(written == static_cast<ssize_t>(bytes.size()), "cannot write the store's file ", path_,
           ": ", written < 0 ? std::strerror(errno) : "the disk is full");
}

}  // namespace fastsync::comm
