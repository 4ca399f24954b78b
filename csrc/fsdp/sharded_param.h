// A parameter that is sharded over the ranks, and the part of it that each rank holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/items.h"

namespace fastsync::engine {

// The elements of a member that a rank holds.
struct UnitShare {
  ops::SlotLayout in_whole;  // of the member by itself
  std::vector<int64_t> sizes;
  int64_t numel = 0;
};

struct UnitMember {
  std::vector<int64_t> sizes;
  int64_t dim = 0;           // along which it is cut
  int64_t whole_offset = 0;  // of its elements, among those of all whole members

  int64_t numel() const { return product(0, sizes.size()); }

  UnitShare share(int rank, int ranks) const {
    const auto along = static_cast<size_t>(dim);
    const int64_t length = sizes[along];
    const int64_t each = (length + ranks - 1) / ranks;
    const int64_t begin = std::min(length, rank * each);
    const int64_t count = std::min(each, length - begin);
    const int64_t outer = product(0, along);
    const int64_t inner = product(along + 1, sizes.size());
    UnitShare share;
    share.numel = outer * count * inner;
    share.sizes = sizes;
    share.sizes[along] = count;
    share.in_whole = {
        begin * inner, share.numel, {outer, count, inner}, {length * inner, inner, 1}};
    return share;
  }

 private:
  int64_t product(size_t begin, size_t end) const {
    int64_t result = 1;
    for (size_t i = begin; i < end; ++i) result *= sizes[i];
    return result;
  }
};

}  // namespace fastsync::engine
