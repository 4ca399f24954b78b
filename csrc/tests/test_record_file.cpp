// A store's file after a process has died within a record.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../comm/record_file.h"
#include "harness.h"

namespace fastsync::comm {
namespace {

std::string field(const std::string& text) {
  const auto length = static_cast<uint32_t>(text.size());
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

std::string record(const std::string& key, const std::string& value) {
  return field(key) + field(value);
}

// A file that is gone with this.
class Scratch {
 public:
  Scratch() : file(mkstemp(path)) {}
  ~Scratch() {
    close(file);
    unlink(path);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void append(const std::string& bytes) {
    FS_CHECK(lseek(file, 0, SEEK_END) >= 0, "lseek");
    FS_CHECK(write(file, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
             "write");
  }

  char path[32] = "/tmp/fastsync-records-XXXXXX";
  int file;
};

std::string keys_of(const std::vector<Record>& records) {
  std::string keys;
  for (const Record& each : records) keys += each.key + "=" + each.value + " ";
  return keys;
}

void put(RecordFile& file, const std::string& key, const std::string& value) {
  file.update([&](const std::vector<Record>&) { return Record{key, value}; });
}

void completes_a_record_that_is_cut_anywhere() {
  const std::string last = record("/rank 1", "17");
  for (size_t cut = 1; cut < last.size(); ++cut) {
    Scratch scratch;
    scratch.append(record("/a", "1") + last.substr(0, cut));
    RecordFile mine(scratch.path);
    RecordFile other(scratch.path);
    EXPECT(keys_of(mine.news()) == "/a=1 ", "what is whole; cut after ", cut);
    put(mine, "/b", "2");
    const std::vector<Record> news = other.news();
    EXPECT(news.size() == 3 && news[2].key == "/b" && news[2].value == "2", "cut after ", cut);
    const bool key_was_whole = cut >= field("/rank 1").size();
    EXPECT((news[1].key == "/rank 1") == key_was_whole, "no key of a rank's; cut after ", cut);
  }
  EXPECT(missing_of(last.substr(0, last.size() - 1)) == "0", "a number stays one");
}

void refuses_what_is_no_store() {
  Scratch scratch;
  scratch.append("not a store");
  RecordFile mine(scratch.path);
  EXPECT(mine.news().empty(), "nothing is whole");
  const auto error = testing::message_of<std::runtime_error>([&] { put(mine, "/b", "2"); });
  EXPECT(error.find("there is no store in the file") != std::string::npos, error);
}

void says_who_writes_for_long() {
  Scratch scratch;
  RecordFile mine(scratch.path);
  FS_CHECK(flock(scratch.file, LOCK_EX) == 0, "flock");
  const auto error = testing::message_of<std::runtime_error>([&] { put(mine, "/b", "2"); });
  EXPECT(error.find("another process has held the lock") != std::string::npos, error);
  EXPECT(mine.news().empty(), "reading needs no lock");
}

void gives_what_is_new_once() {
  Scratch scratch;
  const std::string large(1 << 20, 'x');
  RecordFile mine(scratch.path);
  RecordFile other(scratch.path);
  put(mine, "/a", large);
  put(other, "/b", "2");
  const std::vector<Record> news = mine.news();
  EXPECT(news.size() == 2 && news[0].value == large && news[1].key == "/b", "all in their order");
  EXPECT(mine.news().empty(), "nothing since");
  mine.update([](const std::vector<Record>& since) {
    FS_CHECK(since.empty(), "likewise");
    return std::optional<Record>();
  });
  EXPECT(other.news().size() == 1 && other.news().empty(), "nothing was written since its own");
}

void counts_of_processes_add_up() {
  constexpr int kProcesses = 4;
  constexpr int kTimes = 200;
  Scratch scratch;
  for (int i = 0; i < kProcesses; ++i) {
    if (fork() != 0) continue;
    RecordFile mine(scratch.path);
    std::string last = "0";
    for (int j = 0; j < kTimes; ++j) {
      mine.update([&](const std::vector<Record>& news) {
        if (!news.empty()) last = news.back().value;
        return Record{"/count", last = std::to_string(std::stoi(last) + 1)};
      });
    }
    _exit(0);
  }
  while (wait(nullptr) > 0) {
  }
  RecordFile mine(scratch.path);
  EXPECT(mine.news().back().value == std::to_string(kProcesses * kTimes), "no turn is lost");
}

}  // namespace
}  // namespace fastsync::comm

int main(int argc, char** argv) {
  using namespace fastsync::comm;
  return fastsync::testing::run_cases(
      {
          {"completes a record that is cut anywhere", completes_a_record_that_is_cut_anywhere},
          {"refuses what is no store", refuses_what_is_no_store},
          {"says who writes for long", says_who_writes_for_long},
          {"gives what is new once", gives_what_is_new_once},
          {"counts of processes add up", counts_of_processes_add_up},
      },
      argc, argv);
}
