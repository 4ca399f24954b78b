// The wire formats on the host: strips of the flat buffer, each taken through the loops of
// codec_loops.h.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "codec.h"
#include "codec_dispatch.h"
#include "codec_loops.h"

namespace fastsync::kernels {
namespace {

using CodeLoop = void (*)(float*, uint8_t*, uint8_t*, int, RandomSource);
using SumLoop = void (*)(float*, const uint8_t*, const uint8_t*, int);

template <class Codec, bool kStochastic, bool kLost>
using Code = std::conditional_t<Codec::kScaled, CodeScaled<Codec, kStochastic, kLost>,
                                CodeUnscaled<Codec, kStochastic, kLost>>;

template <class Codec, bool kAdd>
using Sum = std::conditional_t<Codec::kScaled, SumScaled<Codec, kAdd>, SumUnscaled<Codec, kAdd>>;

template <class Codec>
CodeLoop code_loop(const Rounding& rounding, bool lost) {
  if (rounding.stochastic) {
    if (lost) return OnThisCpu<Code<Codec, true, true>>();
    return OnThisCpu<Code<Codec, true, false>>();
  }
  if (lost) return OnThisCpu<Code<Codec, false, true>>();
  return OnThisCpu<Code<Codec, false, false>>();
}

template <class T>
auto load_loop(bool residual) {
  using Pointer = typename OnThisCpu<Load<T, true>>::Pointer;
  return residual ? Pointer(OnThisCpu<Load<T, true>>()) : Pointer(OnThisCpu<Load<T, false>>());
}

// Part of a segment, within one chunk.
struct Strip {
  int64_t begin;  // in the segment
  int numel;
  int padded;  // numel up to the next multiple of the block
  Place place;
};

template <class Codec, class Visit>
void for_each_strip(const PayloadLayout& layout, int64_t offset, int64_t numel,
                    const Visit& visit) {
  for (int64_t begin = 0; begin < numel;) {
    const int64_t first = offset + begin;
    const int64_t chunk_left = layout.chunk_numel - first % layout.chunk_numel;
    const auto count = static_cast<int>(std::min({int64_t{kStrip}, numel - begin, chunk_left}));
    const int padded = (count + Codec::kBlock - 1) / Codec::kBlock * Codec::kBlock;
    visit(Strip{begin, count, padded, place_of<Codec>(layout, first)});
    begin += count;
  }
}

template <class Codec>
class Sums {
 public:
  Sums(const void* payload, int64_t source_bytes, int32_t sources)
      : wire_(static_cast<const uint8_t*>(payload)),
        source_bytes_(source_bytes),
        sources_(sources) {}

  // x = the sum over sources of the elements at `place`
  void operator()(float* x, const Place& place, int numel) const {
    first_(x, wire_ + place.code, wire_ + place.scale, numel);
    for (int32_t r = 1; r < sources_; ++r) {
      const uint8_t* source = wire_ + r * source_bytes_;
      next_(x, source + place.code, source + place.scale, numel);
    }
  }

 private:
  const uint8_t* wire_;
  int64_t source_bytes_;
  int32_t sources_;
  SumLoop first_ = OnThisCpu<Sum<Codec, false>>();
  SumLoop next_ = OnThisCpu<Sum<Codec, true>>();
};

template <class Codec, class T>
void encode_segment(const Segment& segment, float* residual, uint8_t* payload,
                    const EncodeArgs& args) {
  const auto tensor = static_cast<const T*>(segment.tensor);
  float* kept = tensor == nullptr || residual == nullptr ? nullptr : residual + segment.offset;
  const auto load = load_loop<T>(kept != nullptr);
  const CodeLoop code = code_loop<Codec>(args.rounding, kept != nullptr);
  const typename OnThisCpu<Keep<false>>::Pointer keep = OnThisCpu<Keep<false>>();
  const RandomKey key = random_key(args.rounding.seed);
  alignas(64) float x[kStrip];
  for_each_strip<Codec>(args.layout, segment.offset, segment.numel, [&](const Strip& strip) {
    if (tensor == nullptr) {
      std::fill_n(x, strip.numel, segment.fill);
    } else {
      const float* old = kept == nullptr ? nullptr : kept + strip.begin;
      load(x, tensor + strip.begin, old, strip.numel, static_cast<float>(args.scale.value));
    }
    std::fill(x + strip.numel, x + strip.padded, 0.0f);
    const auto first = static_cast<uint32_t>(segment.offset + strip.begin);
    code(x, payload + strip.place.code, payload + strip.place.scale, strip.padded, {key, first});
    if (kept != nullptr) keep(kept + strip.begin, x, strip.numel);
  });
}

template <class Codec>
void reduce_chunk(const void* received, uint8_t* result, float* residual, const ReduceArgs& args) {
  const Sums<Codec> sum(received, args.layout.chunk_bytes, args.sources);
  const CodeLoop code = code_loop<Codec>(args.rounding, residual != nullptr);
  const typename OnThisCpu<Keep<true>>::Pointer keep = OnThisCpu<Keep<true>>();
  const RandomKey key = random_key(args.rounding.seed);
  alignas(64) float x[kStrip];
  for_each_strip<Codec>(args.layout, 0, args.layout.chunk_numel, [&](const Strip& strip) {
    sum(x, strip.place, strip.numel);
    const auto first = static_cast<uint32_t>(args.first + strip.begin);
    code(x, result + strip.place.code, result + strip.place.scale, strip.numel, {key, first});
    if (residual != nullptr) keep(residual + strip.begin, x, strip.numel);
  });
}

template <class Codec, class T>
void decode_segment(const Segment& segment, const Sums<Codec>& sum, const PayloadLayout& layout) {
  const auto tensor = static_cast<T*>(segment.tensor);
  const typename OnThisCpu<Store<T>>::Pointer store = OnThisCpu<Store<T>>();
  alignas(64) float x[kStrip];
  for_each_strip<Codec>(layout, segment.offset, segment.numel, [&](const Strip& strip) {
    if constexpr (std::is_same_v<T, float>) {
      if (strip.padded == strip.numel) return sum(tensor + strip.begin, strip.place, strip.numel);
    }
    sum(x, strip.place, strip.padded);
    store(tensor + strip.begin, x, strip.numel);
  });
}

}  // namespace

void encode_cpu(const Segment* segments, size_t count, float* residual, void* payload,
                const EncodeArgs& args) {
  check_layout(args.layout);
  visit_codec(args.layout.format, args.tensor_dtype, [&](auto codec, auto type) {
    for (size_t i = 0; i < count; ++i) {
      check_offset(segments[i], args.layout);
      encode_segment<typename decltype(codec)::type, typename decltype(type)::type>(
          segments[i], residual, static_cast<uint8_t*>(payload), args);
    }
  });
}

void reduce_cpu(const void* received, void* result, float* residual, const ReduceArgs& args) {
  check_layout(args.layout);
  check_sources(args.sources);
  visit_format(args.layout.format, [&](auto codec) {
    reduce_chunk<typename decltype(codec)::type>(received, static_cast<uint8_t*>(result), residual,
                                                 args);
  });
}

void decode_cpu(const Segment* segments, size_t count, const void* payload,
                const DecodeArgs& args) {
  check_layout(args.layout);
  check_sources(args.sources);
  visit_codec(args.layout.format, args.tensor_dtype, [&](auto codec, auto type) {
    using Codec = typename decltype(codec)::type;
    const Sums<Codec> sum(payload, args.source_bytes, args.sources);
    for (size_t i = 0; i < count; ++i) {
      check_offset(segments[i], args.layout);
      decode_segment<Codec, typename decltype(type)::type>(segments[i], sum, args.layout);
    }
  });
}

}  // namespace fastsync::kernels
