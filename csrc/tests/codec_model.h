// Model of encode, reduce and decode, byte by byte: tensors, residuals and payloads between guards,
// filled with numbers of every kind, and the comparison with the oracle. test_codec.cpp chooses the
// shapes.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/codec.h"
#include "../kernels/element.h"
#include "codec_oracle.h"
#include "harness.h"
#include "pack_model.h"

namespace fastsync::testing {

using kernels::DecodeArgs;
using kernels::EncodeArgs;
using kernels::PayloadLayout;
using kernels::ReduceArgs;

struct CodecBackend {
  const char* name;
  void (*encode)(const Segment*, size_t, float*, void*, const EncodeArgs&);
  void (*reduce)(const void*, void*, float*, const ReduceArgs&);
  void (*decode)(const Segment*, size_t, const void*, const DecodeArgs&);
};

inline int64_t block_of(Wire format) { return kernels::traits_of(format).block; }

// Chunks of some blocks, after `section` bytes that belong to others and before 16 that do.
inline PayloadLayout layout_of(Wire format, int64_t blocks, int64_t section) {
  const int64_t numel = blocks * block_of(format);
  const int64_t end = section + kernels::coded_bytes(format, numel);
  return {format, numel, (end + 15) / 16 * 16 + 16, section};
}

// A payload of some chunks between guards.
class WireBuffer {
 public:
  WireBuffer(const PayloadLayout& layout, int64_t chunks)
      : layout_(layout), memory_(DType::kFloat16, chunks * layout.chunk_bytes / 2, 0) {}

  char* data() { return memory_.data(); }
  std::vector<char> copy() const { return memory_.copy(); }
  void check_guards() { memory_.check_guards(); }

  uint32_t code(int64_t element) {
    const int64_t bits = kernels::traits_of(layout_.format).bits;
    const int64_t inside = element % layout_.chunk_numel;
    uint32_t code = 0;
    std::memcpy(&code, section_of(element) + inside * bits / 8, bits < 8 ? 1 : size_t(bits) / 8);
    return bits == 4 ? code >> (inside % 2 * 4) & 15 : code;
  }

  void set_code(int64_t element, uint32_t value) {
    const int64_t bits = kernels::traits_of(layout_.format).bits;
    const int64_t inside = element % layout_.chunk_numel;
    if (bits == 4) {
      const uint32_t other = code(inside % 2 == 0 ? element + 1 : element - 1);
      value = inside % 2 == 0 ? other << 4 | value : value << 4 | other;
    }
    std::memcpy(section_of(element) + inside * bits / 8, &value, bits < 8 ? 1 : size_t(bits) / 8);
  }

  uint32_t scale(int64_t element) {
    uint32_t scale = 0;
    std::memcpy(&scale, scale_address(element), scale_bytes());
    return scale;
  }
  void set_scale(int64_t element, uint32_t scale) {
    std::memcpy(scale_address(element), &scale, scale_bytes());
  }

  double value(int64_t element) { return decoded(layout_.format, code(element), scale(element)); }

  void set_block(int64_t element, const CodedBlock& block) {
    for (size_t i = 0; i < block.codes.size(); ++i) {
      set_code(element + static_cast<int64_t>(i), block.codes[i]);
    }
    set_scale(element, block.scale);
  }

 private:
  size_t scale_bytes() const {
    return static_cast<size_t>(kernels::traits_of(layout_.format).scale_bytes);
  }
  char* section_of(int64_t element) {
    return memory_.data() + element / layout_.chunk_numel * layout_.chunk_bytes + layout_.section;
  }
  char* scale_address(int64_t element) {
    const kernels::FormatTraits traits = kernels::traits_of(layout_.format);
    const int64_t block = element % layout_.chunk_numel / traits.block;
    return section_of(element) + layout_.chunk_numel * traits.bits / 8 + block * traits.scale_bytes;
  }

  PayloadLayout layout_;
  GuardedBuffer memory_;
};

// Numbers of one kind, which may lie in one block.
enum class Kind {
  kNormal,
  kMixed,
  kZero,
  kDenormal,
  kTiny,
  kHuge,
  kLimit,
  kEdge,
  kTiesOfInt4,
  kTiesOfInt8,
  kTiesOfFloat16,
  kOutlier,
  kEqual,
  kWithNan,
  kWithInfinity,
  kCount
};

class Numbers {
 public:
  double uniform() { return std::ldexp(static_cast<double>(random_.next() >> 6), -53); }
  double sign() { return random_.next() % 2 == 0 ? 1 : -1; }
  double power(int low, int high) {
    return std::ldexp(1 + uniform(), low + static_cast<int>(uniform() * (high - low)));
  }

  double next(Kind kind) {
    switch (kind) {
      case Kind::kMixed:
        return sign() * power(-40, 40);
      case Kind::kZero:
        return sign() * 0.0;
      case Kind::kDenormal:
        return sign() * std::floor(std::ldexp(uniform(), 23)) * std::ldexp(1, -149);
      case Kind::kTiny:
        return sign() * power(-130, -105);
      case Kind::kHuge:
        return sign() * uniform() * 1e38;
      case Kind::kLimit:
        return rare() ? std::ldexp(1, 127) : std::ldexp(1 - std::ldexp(1, -24), 127);
      case Kind::kEdge:
        return sign() * edge_;
      case Kind::kTiesOfInt4:  // halves of units where 7 is drawn, and with it a scale of 1
        return sign() * std::floor(uniform() * 15) / 2;
      case Kind::kTiesOfInt8:  // of fp8, too
        return sign() * std::floor(uniform() * 255) / 2;
      case Kind::kTiesOfFloat16:
        return sign() * std::floor(uniform() * 4096) / 16;
      case Kind::kOutlier:
        return sign() * (rare() ? 1e6 : 1) * uniform();
      case Kind::kEqual:
        return sign() * 0.3;
      case Kind::kWithNan:
        return rare() ? kNan : uniform();
      case Kind::kWithInfinity:
        return rare() ? sign() * HUGE_VAL : uniform();
      default:
        return sign() * uniform();
    }
  }

  // The kind changes every 256 numbers, so that every block has one.
  void fill(GuardedBuffer& buffer, DType dtype, int64_t numel) {
    Kind kind = Kind::kNormal;
    for (int64_t i = 0; i < numel; ++i) {
      if (i % 256 == 0) kind = random_kind();
      store_bits(dtype, buffer.at(i), narrowed(dtype, fp32(next(kind))));
    }
  }

  // Also chooses what kEdge stands for: a format's largest number times a power of two, or a float
  // next to it.
  Kind random_kind() {
    const double edges[] = {65504, 448, 57344, 127, 7};
    const double steps[] = {-1, 0, 1};
    const double edge = edges[random_.next() % 5] * std::ldexp(1, int(random_.next() % 40) - 20);
    edge_ = edge + steps[random_.next() % 3] * std::ldexp(1, std::ilogb(edge) - 23);
    return static_cast<Kind>(random_.next() % static_cast<int>(Kind::kCount));
  }

  static uint64_t narrowed(DType dtype, double value) {
    const auto number = static_cast<float>(value);
    if (dtype == DType::kFloat16) return kernels::narrow<kernels::Half>(number).bits;
    if (dtype == DType::kBFloat16) return kernels::narrow<kernels::BFloat16>(number).bits;
    return kernels::bits_of(number);
  }

 private:
  bool rare() { return random_.next() % 100 == 0; }

  double edge_ = 1;
  Random random_;
};

inline bool same_code(Wire format, uint32_t found, uint32_t expected) {
  if (found == expected) return true;
  return !is_scaled(format) && std::isnan(value_of_code(format, found)) &&
         std::isnan(value_of_code(format, expected));
}

inline void expect_block(WireBuffer& payload, Wire format, int64_t element,
                         const CodedBlock& block) {
  for (size_t i = 0; i < block.codes.size(); ++i) {
    const uint32_t found = payload.code(element + static_cast<int64_t>(i));
    EXPECT(same_code(format, found, block.codes[i]), "element ", element, " + ", i, " is coded as ",
           found, " instead of ", block.codes[i]);
  }
  const uint32_t found = payload.scale(element);
  EXPECT(found == block.scale, "scale of element ", element, " is ", found, " instead of ",
         block.scale);
}

inline double value_in(const CodedBlock& block, Wire format, size_t i) {
  return block.is_non_finite ? kNan : decoded(format, block.codes[i], block.scale);
}

inline void expect_number(DType dtype, uint64_t bits, double value, int64_t element,
                          const char* what) {
  EXPECT(matches(dtype, bits, value), what, " ", element, " is ", value_of_bits(dtype, bits),
         " instead of ", value);
}

// Bytes outside the blocks that were coded must be as the buffer was made.
inline void expect_untouched(WireBuffer& payload, WireBuffer& expected) {
  const std::vector<char> found = payload.copy();
  const std::vector<char> wanted = expected.copy();
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT(found[i] == wanted[i], "byte ", i, " of the payload is ", int(found[i]), " instead of ",
           int(wanted[i]));
  }
}

}  // namespace fastsync::testing
