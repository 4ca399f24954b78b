// The file of a rendezvous store, in the format of torch's FileStore, which the death of a process does not harm.
//
// torch (torch/csrc/distributed/c10d/FileStore.cpp) appends a record in four pieces, under the file's lock. A process that
// is killed between two of them leaves half a record, and whoever reads it waits for bytes that nobody writes, for ever and
// with the lock held. Here a record is appended by one write(2), which no signal interrupts half way; whoever appends, and
// finds half a record of torch's, completes it; and whoever reads needs no lock, and takes half a record for none.
#pragma once

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fastsync::comm {

struct Record {
  std::string key;
  std::string value;
};

// What completes the first part of a record; nothing where it cannot be one. Zero bytes complete a key, so that it is nobody's;
// the digit 0 a value, so that a number stays one.
std::optional<std::string> missing_of(std::string_view torn);

class RecordFile {
 public:
  explicit RecordFile(std::string path);

  const std::string& path() const { return path_; }

  // What has been written since the last call.
  std::vector<Record> news();

  // Gives `make` what has been written since the last call, and appends what it returns, while no other process writes.
  // Throws std::runtime_error where another one does so for long, and where the file cannot be written.
  void update(const std::function<std::optional<Record>(std::vector<Record>)>& make);

 private:
  std::vector<Record> take_news(int file, std::string& torn);

  std::string path_;
  off_t read_ = 0;  // where the last whole record ends
};

}  // namespace fastsync::comm
