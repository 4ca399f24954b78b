// A rendezvous store in the file that torch's FileStore uses, for ranks that may die; see record_file.h.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <vector>

#include "record_file.h"

namespace fastsync::comm {

// Keys and values are seen by torch's own stores in that file, and theirs here. Errors are c10::DistStoreError.
class FileStore : public c10d::Store {
 public:
  using Interface = c10d::Store;

  explicit FileStore(std::string path);

  c10::intrusive_ptr<c10d::Store> clone() override;
  using c10d::Store::compareSet;
  using c10d::Store::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override;
  std::vector<uint8_t> compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                  const std::vector<uint8_t>& wanted) override;
  std::vector<uint8_t> get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override;

 private:
  // Each with `mutex_` held.
  void learn(std::vector<Record> news);
  void refresh();
  template <class Make>
  void update(const Make& make);
  const std::string* find(const std::string& key) const;

  std::mutex mutex_;
  RecordFile file_;
  std::unordered_map<std::string, std::string> known_;
};

}  // namespace fastsync::comm
