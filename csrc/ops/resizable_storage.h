// Tensors whose memory comes and goes, and the pool of memory that they share.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace fastsync::ops {

// Memory for a part of a step, in blocks of any dtype. A CPU's fresh memory costs as much as
// filling it; devices' allocators have pools themselves.
class BlockPool {
 public:
  static constexpr int64_t kNoMark = std::numeric_limits<int64_t>::max();

  // `mark`: bytes that all blocks together should not exceed. A request beyond it is granted, but
  // no free block is kept then.
  explicit BlockPool(int64_t mark = kNoMark) : mark_(mark) {}

  // One-dimensional, uninitialised.
  at::Tensor take(int64_t numel, at::ScalarType dtype, at::Device device);
  // Takes back a block of take() that has no other user; undefined: nothing.
  void give(const at::Tensor& block);
  // Frees blocks that are not in use.
  void trim() { free_.clear(); }
  // Returns the peak of the bytes of all blocks, used and free.
  int64_t most() const { return most_; }

 private:
  // A block that is in use, unless it has been freed.
  struct UsedBlock {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int64_t bytes = 0;
  };

  at::Tensor find(int64_t bytes);
  at::Tensor make(int64_t bytes, at::Device device);
  int64_t used_bytes();
  int64_t free_bytes() const;

  std::vector<UsedBlock> used_;
  std::vector<at::Tensor> free_;  // bytes
  int64_t mark_;
  int64_t most_ = 0;
  int64_t largest_ = 0;  // bytes that were ever asked for at once
};

// A one-dimensional tensor, which has memory only while it holds a block. Tensors that share its
// storage see the memory come and go.
class ResizableStorage {
 public:
  ResizableStorage(int64_t numel, at::ScalarType dtype, at::Device device);

  // Shares the storage, but no version counter: autograd does not notice writes to it.
  const at::Tensor& flat() const { return flat_; }
  bool has_memory() const { return block_.defined(); }
  // Sets the error of an operation that reads or writes the elements while there is no memory.
  // Versions of torch that cannot raise there (before 2.13) crash or find a storage of no bytes.
  void set_absence(std::string message);
  // Gives the tensor memory. `block`: of as many elements.
  void acquire(const at::Tensor& block);
  // Takes the memory away and returns the block; undefined: there was none.
  at::Tensor take_back();

 private:
  // Marks the storage as without memory, so that access raises if torch can.
  void mark_absent();

  std::string absence_;
  at::Tensor flat_;
  at::Tensor block_;
};

}  // namespace fastsync::ops
