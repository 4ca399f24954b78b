// Runs a kernel's launcher on a device for tests that hold host memory: every buffer that they name
// gets a copy on the device, at the same distance from a 256-byte boundary, and what the kernel
// wrote is copied back.
//
// Each buffer is an allocation of its own, which ends where the buffer ends, so that
// compute-sanitizer sees accesses past it. Bytes in front of it hold a pattern, which must survive.
// Where there are too many for that they share one allocation.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../check.h"
#include "../kernels/cuda_launch.h"

namespace fastsync::testing {

class Mirror {
 public:
  // Gives the device `bytes` bytes from `host` on. Parts that it has already are found there.
  void add(const void* host, size_t bytes) {
    if (host == nullptr || bytes == 0 || find(host) != nullptr) return;
    const auto* begin = static_cast<const char*>(host);
    copies_.push_back({const_cast<char*>(begin), bytes, kLead + place(host), 0, nullptr});
  }

  // Copies everything to the device.
  void upload() {
    size_t total = 0;
    for (Copy& copy : copies_) {
      copy.offset = total;
      total += (copy.lead + copy.bytes + kLead - 1) / kLead * kLead;
    }
    apart_ = copies_.size() <= kMostApart;
    if (!apart_) shared_ = allocate(total);
    for (Copy& copy : copies_) {
      copy.memory = apart_ ? allocate(copy.lead + copy.bytes) : shared_ + copy.offset;
      FS_CUDA_CHECK(cudaMemset(copy.memory, kPattern, copy.lead), "filling a guard");
      FS_CUDA_CHECK(
          cudaMemcpy(copy.memory + copy.lead, copy.host, copy.bytes, cudaMemcpyHostToDevice),
          "copying to the device");
    }
  }

  // The device's address of what the host has at `host`; nullptr for nullptr.
  template <class T>
  T* on_device(T* host) const {
    const Copy* copy = find(host);
    if (copy == nullptr) return nullptr;
    const auto skipped = reinterpret_cast<const char*>(host) - copy->host;
    return reinterpret_cast<T*>(copy->memory + copy->lead + skipped);
  }

  // Waits for the kernels and copies everything back.
  void download() {
    FS_CUDA_CHECK(cudaDeviceSynchronize(), "running the kernel");
    for (const Copy& copy : copies_) {
      std::vector<char> bytes(copy.lead + copy.bytes);
      FS_CUDA_CHECK(cudaMemcpy(bytes.data(), copy.memory, bytes.size(), cudaMemcpyDeviceToHost),
                    "copying from the device");
      for (size_t i = 0; i < copy.lead; ++i) {
        FS_CHECK(bytes[i] == kPattern, "the kernel wrote ", copy.lead - i,
                 " bytes before a buffer");
      }
      std::memcpy(copy.host, bytes.data() + copy.lead, copy.bytes);
    }
  }

  Mirror() = default;
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;
  ~Mirror() {
    for (const Copy& copy : copies_) {
      if (apart_) cudaFree(copy.memory);
    }
    cudaFree(shared_);
  }

 private:
  struct Copy {
    char* host;
    size_t bytes;
    size_t lead;    // bytes of the allocation in front of it
    size_t offset;  // of the guard, where all share one allocation
    char* memory;
  };
  static constexpr size_t kLead = 256;  // what cudaMalloc aligns to
  static constexpr size_t kMostApart = 64;
  static constexpr char kPattern = 0x5a;

  static size_t place(const void* host) { return reinterpret_cast<uintptr_t>(host) % kLead; }

  static char* allocate(size_t bytes) {
    void* memory = nullptr;
    FS_CUDA_CHECK(cudaMalloc(&memory, bytes), "allocating ", bytes, " bytes");
    return static_cast<char*>(memory);
  }

  const Copy* find(const void* host) const {
    const auto* wanted = static_cast<const char*>(host);
    for (const Copy& copy : copies_) {
      if (wanted >= copy.host && wanted < copy.host + copy.bytes) return &copy;
    }
    return nullptr;
  }

  std::vector<Copy> copies_;
  bool apart_ = true;
  char* shared_ = nullptr;
};

}  // namespace fastsync::testing
