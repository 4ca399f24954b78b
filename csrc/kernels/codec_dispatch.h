// From run-time formats to codec classes, the checks of arguments and the addresses in a payload:
// what the CPU and the CUDA kernels do alike before their loops.
#pragma once

#include "../check.h"
#include "codec_element.h"
#include "dispatch.h"

namespace fastsync::kernels {

// Calls visit(TypeTag<Codec>{}).
template <class Visit>
void visit_format(Format format, const Visit& visit) {
  switch (format) {
    case Format::kFloat32:
      return visit(TypeTag<Float32Codec>{});
    case Format::kBFloat16:
      return visit(TypeTag<BFloat16Codec>{});
    case Format::kFloat16:
      return visit(TypeTag<Float16Codec>{});
    case Format::kFloat8E4M3:
      return visit(TypeTag<Float8E4M3Codec>{});
    case Format::kFloat8E5M2:
      return visit(TypeTag<Float8E5M2Codec>{});
    case Format::kInt8:
      return visit(TypeTag<Int8Codec>{});
    case Format::kInt4:
      return visit(TypeTag<Int4Codec>{});
  }
  FS_CHECK_VALUE(false, "unknown wire format ", static_cast<int>(format));
}

// Visits as visit_types does, for a codec and the type of the tensors.
template <class Visit>
void visit_codec(Format format, DType tensor, const Visit& visit) {
  visit_format(format, [&](auto codec) {
    const bool supported = visit_float_type(tensor, [&](auto type) { visit(codec, type); });
    FS_CHECK_VALUE(supported, "cannot code tensors of ", dtype_name(tensor), " as ",
                   name_of(format), ": float32, float16 and bfloat16 can be coded");
  });
}

inline void check_layout(const PayloadLayout& layout) {
  const int64_t block = traits_of(layout.format).block;
  FS_CHECK_VALUE(block > 0, "unknown wire format ", static_cast<int>(layout.format));
  FS_CHECK_VALUE(layout.chunk_numel > 0 && layout.chunk_numel % block == 0, "a chunk of ",
                 layout.chunk_numel, " elements does not consist of blocks of ", block, " (",
                 name_of(layout.format), ")");
  const int64_t end = layout.section + coded_bytes(layout.format, layout.chunk_numel);
  FS_CHECK_VALUE(layout.section >= 0 && end <= layout.chunk_bytes, "a section from byte ",
                 layout.section, " to ", end, " does not fit in a chunk of ", layout.chunk_bytes,
                 " bytes");
  FS_CHECK_VALUE(layout.section % 16 == 0 && layout.chunk_bytes % 16 == 0, "chunks of ",
                 layout.chunk_bytes, " bytes with a section from byte ", layout.section,
                 " are not aligned to 16 bytes");
}

inline void check_sources(int32_t sources) {
  FS_CHECK_VALUE(sources > 0, "expects one source or more but got ", sources);
}

inline void check_offset(const Segment& segment, const PayloadLayout& layout) {
  FS_CHECK_VALUE(segment.offset >= 0 && segment.offset % traits_of(layout.format).block == 0,
                 "a segment at element ", segment.offset, " does not start at a multiple of ",
                 traits_of(layout.format).block, " (", name_of(layout.format), ")");
}

// Positions of an element's code and of its block's scale: bytes from the start of the payload.
struct Place {
  int64_t code;
  int64_t scale;
};

// The place of an element of the same chunk, `elements` after one that starts a block. Two codes of
// int4 share a byte.
template <class Codec>
FS_HOST_DEVICE Place place_after(const Place& start, int64_t elements) {
  return {start.code + elements * Codec::kBits / 8,
          start.scale + elements / Codec::kBlock * Codec::kScaleBytes};
}

template <class Codec>
Place place_of(const PayloadLayout& layout, int64_t element) {
  const int64_t chunk = element / layout.chunk_numel;
  const int64_t codes = chunk * layout.chunk_bytes + layout.section;
  const Place start{codes, codes + layout.chunk_numel * Codec::kBits / 8};
  return place_after<Codec>(start, element - chunk * layout.chunk_numel);
}

}  // namespace fastsync::kernels
