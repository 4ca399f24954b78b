// The wire formats against the oracle: encode, reduce and decode of whole payloads. Properties of
// the formats themselves are in test_codec_formats.cpp.
#include <utility>

#include "codec_backends.h"
#include "codec_model.h"

namespace fastsync::testing {
namespace {

constexpr Wire kFormats[] = {Wire::kFloat32,    Wire::kBFloat16, Wire::kFloat16, Wire::kFloat8E4M3,
                             Wire::kFloat8E5M2, Wire::kInt8,     Wire::kInt4};
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr Rounding kRoundings[] = {{false, 0}, {true, 0x123456789abcdef0}};

struct Piece {
  int64_t numel;
  int shift = 0;     // of the tensor's first element from a 64-byte boundary, in elements
  int64_t skip = 0;  // blocks that are left free before it
  bool has_tensor = true;
  float fill = 0;
};

// Tensors at places in a payload.
struct Pieces {
  Pieces(DType type, Wire format, const std::vector<Piece>& pieces, int64_t origin = 0)
      : dtype(type), block(block_of(format)), end(origin) {
    for (const Piece& piece : pieces) {
      tensors.emplace_back(type, piece.numel, piece.shift);
      end += piece.skip * block;
      void* tensor = piece.has_tensor ? tensors.back().data() : nullptr;
      segments.push_back({tensor, end, piece.numel, piece.fill});
      end += (piece.numel + block - 1) / block * block;
    }
  }

  void check_guards() {
    for (GuardedBuffer& tensor : tensors) tensor.check_guards();
  }

  DType dtype;
  int64_t block;
  int64_t end;  // first free element
  std::vector<GuardedBuffer> tensors;
  std::vector<Segment> segments;
};

int64_t chunks_for(int64_t numel, const PayloadLayout& layout) {
  return (numel + layout.chunk_numel - 1) / layout.chunk_numel;
}

// One call of encode and what it must leave behind.
class EncodeCheck {
 public:
  EncodeCheck(Pieces& pieces, const PayloadLayout& layout, const EncodeArgs& args, bool residual)
      : pieces_(pieces),
        args_(args),
        has_residual_(residual),
        chunks_(chunks_for(pieces.end, layout)),
        wire_(layout, chunks_),
        expected_(layout, chunks_),
        residual_(DType::kFloat32, chunks_ * layout.chunk_numel, 0),
        numel_(chunks_ * layout.chunk_numel) {
    Numbers numbers;
    for (size_t s = 0; s < pieces.tensors.size(); ++s) {
      numbers.fill(pieces.tensors[s], pieces.dtype, pieces.segments[s].numel);
    }
    numbers.fill(residual_, DType::kFloat32, numel_);
    for (int64_t i = 0; i < numel_; ++i) old_.push_back(old_residual(i));
    residual_wanted_ = old_;
  }

  void run(const CodecBackend& backend) {
    float* residual = has_residual_ ? reinterpret_cast<float*>(residual_.data()) : nullptr;
    backend.encode(pieces_.segments.data(), pieces_.segments.size(), residual, wire_.data(), args_);
    for (size_t s = 0; s < pieces_.segments.size(); ++s) {
      for (int64_t i = 0; i < pieces_.segments[s].numel; i += pieces_.block) check_block(s, i);
    }
    expect_untouched(wire_, expected_);
    for (int64_t i = 0; i < numel_; ++i) {
      expect_number(DType::kFloat32, residual_.bits(i), residual_wanted_[size_t(i)], i, "residual");
    }
    wire_.check_guards();
    residual_.check_guards();
    pieces_.check_guards();
  }

 private:
  double old_residual(int64_t i) { return value_of_bits(DType::kFloat32, residual_.bits(i)); }

  double input(size_t s, int64_t i) {
    const Segment& segment = pieces_.segments[s];
    if (i >= segment.numel) return 0;
    if (segment.tensor == nullptr) return static_cast<double>(segment.fill);
    const double value = value_of_bits(pieces_.dtype, pieces_.tensors[s].bits(i));
    const double product = fp32(value * static_cast<double>(static_cast<float>(args_.scale.value)));
    return has_residual_ ? fp32(product + old_[size_t(segment.offset + i)]) : product;
  }

  void check_block(size_t s, int64_t begin) {
    const Segment& segment = pieces_.segments[s];
    const int64_t first = segment.offset + begin;
    std::vector<double> x;
    for (int64_t i = 0; i < pieces_.block; ++i) x.push_back(input(s, begin + i));
    CodedBlock block = code_block(args_.layout.format, x, args_.rounding, first);
    expect_block(wire_, args_.layout.format, first, block);
    for (int64_t i = 0; i < pieces_.block; ++i) {
      const double lost = fp32(x[size_t(i)] - value_in(block, args_.layout.format, size_t(i)));
      const bool kept = has_residual_ && segment.tensor != nullptr && begin + i < segment.numel;
      if (kept && std::isfinite(lost)) residual_wanted_[size_t(first + i)] = lost;
      block.codes[size_t(i)] = wire_.code(first + i);  // a NaN's spare bits are free
    }
    expected_.set_block(first, block);
  }

  Pieces& pieces_;
  EncodeArgs args_;
  bool has_residual_;
  int64_t chunks_;
  WireBuffer wire_;
  WireBuffer expected_;
  GuardedBuffer residual_;
  int64_t numel_;
  std::vector<double> old_;
  std::vector<double> residual_wanted_;
};

// Any numbers coded by the oracle; now and then a block of zero bytes, or of any bytes but for its
// scale.
void fill_wire(WireBuffer& payload, const PayloadLayout& layout, int64_t chunks, Numbers& numbers) {
  const int64_t block = block_of(layout.format);
  for (int64_t first = 0; first < chunks * layout.chunk_numel; first += block) {
    const Kind kind = numbers.random_kind();
    std::vector<double> x;
    for (int64_t i = 0; i < block; ++i) x.push_back(fp32(numbers.next(kind)));
    CodedBlock coded = code_block(layout.format, x, {false, 0}, first);
    if (kind == Kind::kNormal) coded = {std::vector<uint32_t>(size_t(block), 0), 0, false};
    payload.set_block(first, coded);
  }
}

struct Sources {
  Sources(const PayloadLayout& layout, int64_t chunks, int count) {
    Numbers numbers;
    for (int r = 0; r < count; ++r) {
      payloads.push_back(std::make_unique<WireBuffer>(layout, chunks));
      fill_wire(*payloads.back(), layout, chunks, numbers);
    }
  }

  double sum(int64_t element) {
    double sum = payloads[0]->value(element);
    for (size_t r = 1; r < payloads.size(); ++r) sum = fp32(sum + payloads[r]->value(element));
    return sum;
  }

  // All payloads, one after another.
  std::vector<char> joined(size_t gap) const {
    std::vector<char> all;
    for (const auto& payload : payloads) {
      const std::vector<char> one = payload->copy();
      all.insert(all.end(), one.begin(), one.end());
      all.insert(all.end(), gap, 0x33);
    }
    return all;
  }

  std::vector<std::unique_ptr<WireBuffer>> payloads;
};

// 16-byte aligned, as payloads are.
GuardedBuffer aligned_copy(const std::vector<char>& bytes) {
  GuardedBuffer buffer(DType::kFloat16, static_cast<int64_t>(bytes.size() / 2), 0);
  std::memcpy(buffer.data(), bytes.data(), bytes.size());
  return buffer;
}

void check_decode(const CodecBackend& backend, Pieces& pieces, const PayloadLayout& layout,
                  int sources) {
  constexpr size_t kGap = 48;
  const int64_t chunks = chunks_for(pieces.end, layout);
  Sources payloads(layout, chunks, sources);
  GuardedBuffer received = aligned_copy(payloads.joined(kGap));
  const std::vector<char> before = received.copy();
  const int64_t source_bytes = chunks * layout.chunk_bytes + static_cast<int64_t>(kGap);
  backend.decode(pieces.segments.data(), pieces.segments.size(), received.data(),
                 {layout, pieces.dtype, sources, source_bytes});
  EXPECT(received.copy() == before, "decode wrote to the payload");
  for (size_t s = 0; s < pieces.segments.size(); ++s) {
    const Segment& segment = pieces.segments[s];
    for (int64_t i = 0; i < segment.numel; ++i) {
      const double sum = rounded(payloads.sum(segment.offset + i), pieces.dtype);
      expect_number(pieces.dtype, pieces.tensors[s].bits(i), sum, segment.offset + i, "element");
    }
  }
  pieces.check_guards();
}

struct ReduceCase {
  int64_t blocks;
  int sources;
  bool residual;
  bool in_place;
};

// Compares the chunk at `result` and what became of `old`.
void expect_reduced(WireBuffer& result, Sources& payloads, const ReduceArgs& args,
                    GuardedBuffer& residual, const std::vector<double>& old) {
  const Wire format = args.layout.format;
  const int64_t block = block_of(format);
  for (int64_t first = 0; first < args.layout.chunk_numel; first += block) {
    std::vector<double> x;
    for (int64_t i = 0; i < block; ++i) x.push_back(payloads.sum(first + i));
    const CodedBlock coded = code_block(format, x, args.rounding, args.first + first);
    expect_block(result, format, first, coded);
    for (int64_t i = 0; !old.empty() && i < block; ++i) {
      const double was = old[size_t(first + i)];
      const double wanted = fp32(was + fp32(x[size_t(i)] - value_in(coded, format, size_t(i))));
      expect_number(DType::kFloat32, residual.bits(first + i), std::isfinite(wanted) ? wanted : was,
                    first + i, "residual");
    }
  }
}

void check_reduce(const CodecBackend& backend, Wire format, const Rounding& rounding,
                  const ReduceCase& shape) {
  const PayloadLayout layout = layout_of(format, shape.blocks, 32);
  Sources payloads(layout, 1, shape.sources);
  GuardedBuffer received = aligned_copy(payloads.joined(0));
  GuardedBuffer residual(DType::kFloat32, layout.chunk_numel, 0);
  Numbers().fill(residual, DType::kFloat32, layout.chunk_numel);
  std::vector<double> old;
  for (int64_t i = 0; shape.residual && i < layout.chunk_numel; ++i) {
    old.push_back(value_of_bits(DType::kFloat32, residual.bits(i)));
  }
  const ReduceArgs args{layout, rounding, shape.sources, 3 * layout.chunk_numel};
  WireBuffer result(layout, 1);
  char* target = shape.in_place ? received.data() : result.data();
  backend.reduce(received.data(), target,
                 shape.residual ? reinterpret_cast<float*>(residual.data()) : nullptr, args);
  if (shape.in_place) std::memcpy(result.data(), target, static_cast<size_t>(layout.chunk_bytes));
  expect_reduced(result, payloads, args, residual, old);
  result.check_guards();
  residual.check_guards();
  received.check_guards();
}

// --- Cases ---

template <class Function>
void for_each_format(const Function& function) {
  for (const Wire format : kFormats) {
    for (const Rounding& rounding : kRoundings) {
      try {
        function(format, rounding);
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(concat("format ", static_cast<int>(format),
                                        rounding.stochastic ? " stochastic: " : ": ",
                                        error.what()));
      }
    }
  }
}

void check_encode(const CodecBackend& backend, Wire format, const Rounding& rounding, DType dtype,
                  const std::vector<Piece>& specs, int64_t chunk_blocks) {
  for (const bool residual : {false, true}) {
    for (const float scale : {1.0f, 0.3f}) {
      Pieces pieces(dtype, format, specs);
      const PayloadLayout layout = layout_of(format, chunk_blocks, 48);
      EncodeCheck(pieces, layout, {layout, rounding, dtype, scale}, residual).run(backend);
    }
  }
}

// Sizes around a thread's, a block's and a strip's number of elements, tensors at every alignment.
std::vector<Piece> odd_sizes() {
  std::vector<Piece> pieces = {{0}};
  int shift = 0;
  for (const int64_t numel :
       {1,   7,   8,   9,   15,  16,  17,  31,  33,   63,   64,   65,   127,
        128, 129, 200, 255, 256, 257, 511, 513, 1000, 1023, 1024, 1025, 2049}) {
    pieces.push_back({numel, shift++ % 9, shift % 4 == 0 ? 1 : 0});
  }
  return pieces;
}

void encodes_odd_sizes(const CodecBackend& backend) {
  for_each_format([&](Wire format, const Rounding& rounding) {
    for (const DType dtype : kDTypes) {
      check_encode(backend, format, rounding, dtype, odd_sizes(), 1000);
      check_encode(backend, format, rounding, dtype, odd_sizes(), 3);
    }
  });
}

void encodes_large_tensors(const CodecBackend& backend) {
  for_each_format([&](Wire format, const Rounding& rounding) {
    check_encode(backend, format, rounding, DType::kFloat32, {{70'001}, {30'000, 1}}, 77);
  });
}

void encodes_fills(const CodecBackend& backend) {
  std::vector<Piece> pieces = {{300, 0, 0, false, 0.7f}, {1000}, {5, 0, 1, false, -3e-6f}};
  pieces.push_back({2000, 0, 0, false, 0.0f});
  pieces.push_back({70, 0, 0, false, HUGE_VALF});
  for_each_format([&](Wire format, const Rounding& rounding) {
    check_encode(backend, format, rounding, DType::kFloat32, pieces, 7);
    check_encode(backend, format, rounding, DType::kBFloat16, pieces, 7);
  });
}

void encodes_many_segments(const CodecBackend& backend) {
  std::vector<Piece> pieces;
  for (int i = 0; i < 1100; ++i) pieces.push_back({1 + i * 7 % 40, i % 3});
  for (const Wire format : {Wire::kInt4, Wire::kBFloat16}) {
    check_encode(backend, format, {false, 0}, DType::kFloat32, pieces, 64);
  }
}

void decodes_odd_sizes(const CodecBackend& backend) {
  for (const Wire format : kFormats) {
    for (const DType dtype : kDTypes) {
      for (const int sources : {1, 2, 3, 5}) {
        Pieces pieces(dtype, format, odd_sizes());
        check_decode(backend, pieces, layout_of(format, sources == 1 ? 1000 : 3, 16), sources);
      }
    }
  }
}

void decodes_large_tensors(const CodecBackend& backend) {
  for (const Wire format : kFormats) {
    Pieces pieces(DType::kFloat32, format, {{70'001}, {30'000, 1}});
    check_decode(backend, pieces, layout_of(format, 77, 0), 2);
  }
}

void reduces_any_number_of_sources(const CodecBackend& backend) {
  for_each_format([&](Wire format, const Rounding& rounding) {
    for (int sources = 1; sources <= 9; ++sources) {
      check_reduce(backend, format, rounding, {1 + sources * 7, sources, sources % 2 == 0, false});
    }
    check_reduce(backend, format, rounding, {130, 2, true, true});
    check_reduce(backend, format, rounding, {1, 3, false, true});
  });
}

std::string refusal(const std::function<void()>& call) {
  return message_of<std::invalid_argument>(call);
}

void refuses_wrong_arguments(const CodecBackend& backend) {
  const PayloadLayout good = layout_of(Wire::kInt8, 4, 0);
  PayloadLayout ragged = good, crowded = good, crooked = good, unknown = good;
  ragged.chunk_numel += 1;
  crowded.section = 32;
  crooked.section = 8;
  unknown.format = static_cast<Wire>(9);
  for (const auto& [layout, part] : {std::pair{ragged, "blocks of 128"},
                                     {crowded, "does not fit"},
                                     {crooked, "aligned to 16"},
                                     {unknown, "unknown wire format 9"}}) {
    const PayloadLayout& wrong = layout;
    for (const std::string& message :
         {refusal([&] { backend.encode(nullptr, 0, nullptr, nullptr, {wrong, {}, {}, 1}); }),
          refusal([&] { backend.reduce(nullptr, nullptr, nullptr, {wrong, {}, 1, 0}); }),
          refusal([&] { backend.decode(nullptr, 0, nullptr, {wrong, {}, 1, 0}); })}) {
      EXPECT(message.find(part) != std::string::npos, message);
    }
  }
  const Segment misplaced{nullptr, 64, 1, 0};
  for (const std::string& message :
       {refusal([&] { backend.encode(&misplaced, 1, nullptr, nullptr, {good, {}, {}, 1}); }),
        refusal([&] { backend.decode(&misplaced, 1, nullptr, {good, {}, 1, 0}); })}) {
    EXPECT(message.find("a multiple of 128") != std::string::npos, message);
  }
  for (const std::string& message :
       {refusal(
            [&] { backend.encode(nullptr, 0, nullptr, nullptr, {good, {}, DType::kFloat64, 1}); }),
        refusal([&] { backend.decode(nullptr, 0, nullptr, {good, DType::kFloat64, 1, 0}); })}) {
    EXPECT(message.find("float64") != std::string::npos, message);
  }
  for (const std::string& message :
       {refusal([&] { backend.reduce(nullptr, nullptr, nullptr, {good, {}, 0, 0}); }),
        refusal([&] { backend.decode(nullptr, 0, nullptr, {good, {}, 0, 0}); })}) {
    EXPECT(message.find("one source or more") != std::string::npos, message);
  }
}

}  // namespace
}  // namespace fastsync::testing

int main(int argc, char** argv) {
  using namespace fastsync::testing;
  std::vector<Case> cases;
  for (const CodecBackend& backend : kCodecBackends) {
    const auto add = [&](const char* test, auto function) {
      cases.push_back(
          {fastsync::concat(backend.name, "/", test), [&backend, function] { function(backend); }});
    };
    add("encodes_odd_sizes", encodes_odd_sizes);
    add("encodes_large_tensors", encodes_large_tensors);
    add("encodes_fills", encodes_fills);
    add("encodes_many_segments", encodes_many_segments);
    add("decodes_odd_sizes", decodes_odd_sizes);
    add("decodes_large_tensors", decodes_large_tensors);
    add("reduces_any_number_of_sources", reduces_any_number_of_sources);
    add("refuses_wrong_arguments", refuses_wrong_arguments);
  }
  return run_cases(cases, argc, argv);
}
