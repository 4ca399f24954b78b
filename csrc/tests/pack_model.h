// Model of pack and unpack, element by element: buffers with guards, random tensors, and the
// comparison with the oracle. test_pack.cpp chooses the shapes.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "../kernels/pack.h"
#include "harness.h"
#include "oracle.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) (static_cast<void>(address))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (static_cast<void>(address))
#endif

namespace fastsync::testing {

using kernels::element_size;
using kernels::Segment;
using kernels::Transfer;

// `numel` elements that start `shift` elements after a 64-byte boundary, between guard bytes:
// AddressSanitizer reports any access to them, and check_guards() a write in other builds.
class GuardedBuffer {
 public:
  GuardedBuffer(DType dtype, int64_t numel, int shift)
      : dtype_(dtype), bytes_(static_cast<size_t>(numel) * element_size(dtype)) {
    const size_t lead = kGuard + static_cast<size_t>(shift) * element_size(dtype);
    total_ = (lead + bytes_ + kGuard + kGuard - 1) / kGuard * kGuard;
    memory_.reset(static_cast<char*>(std::aligned_alloc(kGuard, total_)));
    if (memory_ == nullptr) throw std::bad_alloc();
    std::memset(memory_.get(), kPattern, total_);
    data_ = memory_.get() + lead;
    ASAN_POISON_MEMORY_REGION(memory_.get(), lead);
    ASAN_POISON_MEMORY_REGION(data_ + bytes_, total_ - lead - bytes_);
  }
  GuardedBuffer(GuardedBuffer&&) = default;
  ~GuardedBuffer() {
    if (memory_ != nullptr) ASAN_UNPOISON_MEMORY_REGION(memory_.get(), total_);
  }

  char* data() { return data_; }
  char* at(int64_t i) { return data_ + static_cast<size_t>(i) * element_size(dtype_); }
  uint64_t bits(int64_t i) { return load_bits(dtype_, at(i)); }
  std::vector<char> copy() const { return std::vector<char>(data_, data_ + bytes_); }

  bool untouched(int64_t i) {
    for (size_t byte = 0; byte < element_size(dtype_); ++byte) {
      if (at(i)[byte] != kPattern) return false;
    }
    return true;
  }

  void check_guards() {
    ASAN_UNPOISON_MEMORY_REGION(memory_.get(), total_);
    for (size_t i = 0; i < total_; ++i) {
      const char* byte = memory_.get() + i;
      if (byte >= data_ && byte < data_ + bytes_) continue;
      EXPECT(*byte == kPattern, "byte ", byte - data_, " of a buffer of ", bytes_, " was written");
    }
  }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };
  static constexpr size_t kGuard = 64;
  static constexpr char kPattern = 0x5a;

  DType dtype_;
  size_t bytes_;
  size_t total_ = 0;
  std::unique_ptr<char, Free> memory_;
  char* data_ = nullptr;
};

// Deterministic: the same bits in every run.
class Random {
 public:
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ >> 5;
  }

  // Any bit pattern one time in four, NaNs and subnormals included; else a number between 1/8 and
  // 16.
  uint64_t element(DType dtype) {
    const Format format = format_of(dtype);
    const uint64_t any = next() << 5 ^ next();
    const int sign_bit = format.fraction_bits + format.exponent_bits;
    const uint64_t mask = sign_bit == 63 ? ~uint64_t{0} : (uint64_t{1} << (sign_bit + 1)) - 1;
    if (next() % 4 == 0) return any & mask;
    const auto field = static_cast<uint64_t>(format.bias() - 3) + next() % 7;
    const uint64_t fraction = any & ((uint64_t{1} << format.fraction_bits) - 1);
    return (next() & 1) << sign_bit | field << format.fraction_bits | fraction;
  }

  void fill(GuardedBuffer& buffer, DType dtype, int64_t numel) {
    for (int64_t i = 0; i < numel; ++i) store_bits(dtype, buffer.at(i), element(dtype));
  }

 private:
  uint64_t state_ = 0x9e3779b97f4a7c15;
};

struct Types {
  DType tensor;
  DType flat;
};

struct Backend {
  const char* name;
  void (*pack)(const Segment*, size_t, void*, const Transfer&);
  void (*unpack)(const Segment*, size_t, const void*, const Transfer&);
};

struct Spec {
  int64_t numel;
  int shift;               // of the tensor's first element from a 64-byte boundary, in elements
  int gap;                 // elements of the flat buffer left free before the run
  bool has_tensor = true;  // pack only
  float fill = 0;
};

// Tensors and a flat buffer laid out as `specs` say, with random elements where the kernels read.
class Scenario {
 public:
  Scenario(Types types, const std::vector<Spec>& specs) : types_(types) {
    int64_t end = 0;
    for (const Spec& spec : specs) {
      tensors_.emplace_back(types.tensor, spec.numel, spec.shift);
      random_.fill(tensors_.back(), types.tensor, spec.numel);
      void* tensor = spec.has_tensor ? tensors_.back().data() : nullptr;
      segments_.push_back({tensor, end + spec.gap, spec.numel, spec.fill});
      end += spec.gap + spec.numel;
    }
    flat_numel_ = end + 3;
    flat_ = std::make_unique<GuardedBuffer>(types.flat, flat_numel_, 0);
  }

  void check_pack(const Backend& backend, double scale) {
    backend.pack(segments_.data(), segments_.size(), flat_->data(), transfer(scale, false));
    int64_t next = 0;
    for (size_t s = 0; s < segments_.size(); ++s) {
      const Segment& segment = segments_[s];
      for (; next < segment.offset; ++next) EXPECT(flat_->untouched(next), "gap element ", next);
      for (int64_t i = 0; i < segment.numel; ++i, ++next) {
        const double value =
            segment.tensor == nullptr
                ? rounded(static_cast<double>(segment.fill), types_.flat)
                : model(value_of_bits(types_.tensor, tensors_[s].bits(i)), scale, types_.flat);
        expect(types_.flat, flat_->bits(next), value, s, i);
      }
    }
    for (; next < flat_numel_; ++next) EXPECT(flat_->untouched(next), "last element ", next);
    check_guards();
  }

  void check_unpack(const Backend& backend, double scale, bool accumulate) {
    random_.fill(*flat_, types_.flat, flat_numel_);
    const std::vector<char> before = flat_->copy();
    std::vector<std::vector<char>> old;
    for (const GuardedBuffer& tensor : tensors_) old.push_back(tensor.copy());
    backend.unpack(segments_.data(), segments_.size(), flat_->data(), transfer(scale, accumulate));
    EXPECT(flat_->copy() == before, "unpack wrote to the flat buffer");
    for (size_t s = 0; s < segments_.size(); ++s) {
      for (int64_t i = 0; i < segments_[s].numel; ++i) {
        const double in = value_of_bits(types_.flat, flat_->bits(segments_[s].offset + i));
        const char* previous = old[s].data() + static_cast<size_t>(i) * element_size(types_.tensor);
        const double was = value_of_bits(types_.tensor, load_bits(types_.tensor, previous));
        const double value =
            accumulate ? model_sum(was, in, scale) : model(in, scale, types_.tensor);
        expect(types_.tensor, tensors_[s].bits(i), value, s, i);
      }
    }
    check_guards();
  }

 private:
  Transfer transfer(double scale, bool accumulate) const {
    return {types_.tensor, types_.flat, scale, accumulate};
  }

  DType compute() const {
    return types_.flat == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  }

  double product(double value, double scale) const {
    return multiplied(value, rounded(scale, compute()), compute());
  }

  double model(double value, double scale, DType to) const {
    return rounded(product(value, scale), to);
  }

  double model_sum(double old, double value, double scale) const {
    return rounded(added(old, product(value, scale), compute()), types_.tensor);
  }

  static void expect(DType dtype, uint64_t bits, double value, size_t segment, int64_t element) {
    EXPECT(matches(dtype, bits, value), "segment ", segment, " element ", element, " is ",
           value_of_bits(dtype, bits), " instead of ", value);
  }

  void check_guards() {
    for (GuardedBuffer& tensor : tensors_) tensor.check_guards();
    flat_->check_guards();
  }

  Types types_;
  Random random_;
  std::vector<GuardedBuffer> tensors_;
  std::vector<Segment> segments_;
  int64_t flat_numel_ = 0;
  std::unique_ptr<GuardedBuffer> flat_;
};

}  // namespace fastsync::testing
