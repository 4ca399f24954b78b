// From run-time dtypes to element types: what the CPU and the CUDA kernels do alike before their
// loops.
#pragma once

#include <type_traits>

#include "../check.h"
#include "element.h"
#include "pack.h"

namespace fastsync::kernels {

template <class T>
struct TypeTag {
  using type = T;
};

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown dtype";
}

// Calls visit(TypeTag<T>{}) for one of the types with float arithmetic; false for any other dtype.
template <class Visit>
bool visit_float_type(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kFloat32:
      visit(TypeTag<float>{});
      return true;
    case DType::kFloat16:
      visit(TypeTag<Half>{});
      return true;
    case DType::kBFloat16:
      visit(TypeTag<BFloat16>{});
      return true;
    default:
      return false;
  }
}

// Calls visit(TypeTag<Dst>{}, TypeTag<Src>{}); throws std::invalid_argument for an unsupported
// pair.
template <class Visit>
void visit_types(DType dst, DType src, const Visit& visit) {
  bool supported = false;
  if (dst == DType::kFloat64 && src == DType::kFloat64) {
    visit(TypeTag<double>{}, TypeTag<double>{});
    supported = true;
  } else {
    visit_float_type(dst, [&](auto dst_tag) {
      supported = visit_float_type(src, [&](auto src_tag) { visit(dst_tag, src_tag); });
    });
  }
  FS_CHECK_VALUE(
      supported, "cannot convert ", dtype_name(src), " to ", dtype_name(dst),
      ": float64 exchanges with float64 only; float32, float16 and bfloat16 with each other");
}

}  // namespace fastsync::kernels
