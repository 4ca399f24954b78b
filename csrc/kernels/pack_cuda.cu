// pack and unpack on the device: one launch moves every segment that its table holds
// ([Note: segment table]).
//
// [Note: one routine for every alignment]
// A chunk is moved by move_chunk<kVec>: kVec elements, 16 bytes of the wider type, per access where
// both sides are aligned to that, else kVec = 1. The misaligned case and the tail are therefore the
// same code with another constant.
#include <cstdint>
#include <cstring>

#include "cuda_access.h"
#include "cuda_launch.h"
#include "cuda_table.h"
#include "dispatch.h"
#include "element.h"
#include "pack.h"

namespace fastsync::kernels {
namespace {

constexpr int kThreads = 256;
// Moved per thread and round, counted in the wider type, so at least half as much is loaded at
// once. With 1024 resident threads that is 32 to 64 KiB in flight per multiprocessor; hiding HBM3's
// latency needs 4.8 TB/s * 0.8 us / 132 = 29 KiB.
constexpr int kBytesPerThread = 64;

struct Run {
  const void* src;  // nullptr: write the fill value
  void* dst;
  int64_t numel;
};

template <int kSegments>
struct Table {
  static constexpr int kCapacity = kSegments;
  int count;
  // Ascending. Not in Run, so that the search touches few cache lines.
  uint32_t first_block[kSegments];
  float fill[kSegments];
  Run run[kSegments];
};

constexpr int kSmallTable = 127;
constexpr int kMediumTable = kMediumParameters > kSmallParameters ? 254 : kSmallTable;
constexpr int kLargeTable = kLargeParameters > kSmallParameters ? 1022 : kSmallTable;
using SmallTable = Table<kSmallTable>;
using MediumTable = Table<kMediumTable>;
using LargeTable = Table<kLargeTable>;
static_assert(sizeof(SmallTable) + sizeof(Scale) <= kSmallParameters);
static_assert(sizeof(MediumTable) + sizeof(Scale) <= kMediumParameters);
static_assert(sizeof(LargeTable) + sizeof(Scale) <= kLargeParameters);

template <class Dst, class Src>
struct Shape {
  static constexpr int kWide = sizeof(Dst) < sizeof(Src) ? sizeof(Src) : sizeof(Dst);
  static constexpr int kVec = kAccessBytes / kWide;  // [Note: whole sectors]
  static constexpr int kUnroll = kBytesPerThread / kAccessBytes;
  static constexpr int kChunk = kThreads * kVec * kUnroll;  // elements per block
};

template <bool kAccumulate, int kCount, class Dst, class Src>
__device__ __forceinline__ Vec<Dst, kCount> combine(const Vec<Dst, kCount>& old,
                                                    const Vec<Src, kCount>& in,
                                                    Compute<Dst> scale) {
  Vec<Dst, kCount> out;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (kAccumulate) {
      out.item[i] = accumulated(old.item[i], in.item[i], scale);
    } else {
      out.item[i] = scaled<Dst>(in.item[i], scale);
    }
  }
  return out;
}

// Moves `groups` groups of kVec elements. Every load of a round is issued before the first use of
// any.
template <int kVec, int kUnroll, bool kAccumulate, class Dst, class Src>
__device__ __forceinline__ void move_chunk(Dst* dst, const Src* src, int groups,
                                           Compute<Dst> scale) {
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < groups; first += kThreads * kUnroll) {
    Vec<Src, kVec> in[kUnroll];
    Vec<Dst, kVec> old[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int group = first + i * kThreads;
      if (group < groups) {
        in[i] = load<kVec>(src + group * kVec);
        if constexpr (kAccumulate) old[i] = load<kVec>(dst + group * kVec);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int group = first + i * kThreads;
      if (group < groups) {
        store(dst + group * kVec, combine<kAccumulate>(old[i], in[i], scale));
      }
    }
  }
}

template <class Dst>
__device__ __forceinline__ void fill_chunk(Dst* dst, int numel, float fill) {
  constexpr int kVec = kAccessBytes / static_cast<int>(sizeof(Dst));
  const Dst value = narrow<Dst>(fill);
  Vec<Dst, kVec> values;
#pragma unroll
  for (int i = 0; i < kVec; ++i) values.item[i] = value;
  const int vectors = aligned<kVec>(dst) ? numel / kVec : 0;
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int i = thread; i < vectors; i += kThreads) store(dst + i * kVec, values);
#pragma unroll 1
  for (int i = vectors * kVec + thread; i < numel; i += kThreads) dst[i] = value;
}

template <class Dst, class Src, bool kAccumulate, class AnyTable>
__global__ void __launch_bounds__(kThreads)
    transfer_kernel(const __grid_constant__ AnyTable table, const Scale factor) {
  using S = Shape<Dst, Src>;
  const int segment = find_segment(table, blockIdx.x);
  const Run& run = table.run[segment];
  const int64_t begin = static_cast<int64_t>(blockIdx.x - table.first_block[segment]) * S::kChunk;
  const int64_t left = run.numel - begin;
  const int numel = left < S::kChunk ? static_cast<int>(left) : S::kChunk;
  Dst* dst = static_cast<Dst*>(run.dst) + begin;
  if constexpr (!kAccumulate) {
    if (run.src == nullptr) return fill_chunk(dst, numel, table.fill[segment]);
  }
  const Src* src = static_cast<const Src*>(run.src) + begin;
  const auto scale = static_cast<Compute<Dst>>(factor.get());
  const int vectors = aligned<S::kVec>(dst) && aligned<S::kVec>(src) ? numel / S::kVec : 0;
  move_chunk<S::kVec, S::kUnroll, kAccumulate>(dst, src, vectors, scale);
  const int done = vectors * S::kVec;
  move_chunk<1, 4, kAccumulate>(dst + done, src + done, numel - done, scale);
}

// Parameters that all launches of one call share.
struct Call {
  const char* name;
  Scale scale;
  cudaStream_t stream;
};

template <class Dst, class Src, bool kAccumulate, class AnyTable>
void launch(const AnyTable& table, int64_t blocks, const Call& call) {
  FS_CHECK(blocks <= INT32_MAX, call.name, ": ", blocks, " blocks exceed one launch's ", INT32_MAX);
  const auto kernel = transfer_kernel<Dst, Src, kAccumulate, AnyTable>;
  FS_CUDA_LAUNCH(kernel, static_cast<unsigned>(blocks), kThreads, call.stream, table, call.scale);
  FS_CUDA_CHECK(cudaGetLastError(), call.name, ": launching ", table.count, " segments in ", blocks,
                " blocks");
}

// Launches as many of the segments as fit one table; returns how many that were, empty ones
// included.
template <class Dst, class Src, bool kAccumulate, class AnyTable, class ToRun>
size_t launch_table(const Segment* segments, size_t count, const Call& call, const ToRun& to_run) {
  constexpr int64_t kChunk = Shape<Dst, Src>::kChunk;
  AnyTable table;
  table.count = 0;
  int64_t blocks = 0;
  size_t taken = 0;
  for (; taken < count && table.count < AnyTable::kCapacity; ++taken) {
    const Segment& segment = segments[taken];
    if (segment.numel == 0) continue;
    table.first_block[table.count] = static_cast<uint32_t>(blocks);
    table.fill[table.count] = segment.fill;
    table.run[table.count] = to_run(segment);
    table.count += 1;
    blocks += (segment.numel + kChunk - 1) / kChunk;
  }
  if (table.count > 0) launch<Dst, Src, kAccumulate>(table, blocks, call);
  return taken;
}

template <class Dst, class Src, bool kAccumulate, class ToRun>
void launch_all(const Segment* segments, size_t count, const Call& call, const ToRun& to_run) {
  for (size_t begin = 0; begin < count;) {
    const Segment* first = segments + begin;
    const size_t left = count - begin;
    if (left <= kSmallTable) {
      begin += launch_table<Dst, Src, kAccumulate, SmallTable>(first, left, call, to_run);
    } else if (left <= kMediumTable) {
      begin += launch_table<Dst, Src, kAccumulate, MediumTable>(first, left, call, to_run);
    } else {
      begin += launch_table<Dst, Src, kAccumulate, LargeTable>(first, left, call, to_run);
    }
  }
}

}  // namespace

void pack_cuda(const Segment* segments, size_t count, void* flat, const Transfer& transfer,
               CUstream_st* stream) {
  const Call call{"pack_cuda", transfer.scale, stream};
  visit_types(transfer.flat_dtype, transfer.tensor_dtype, [&](auto dst, auto src) {
    using Flat = typename decltype(dst)::type;
    using Tensor = typename decltype(src)::type;
    launch_all<Flat, Tensor, false>(segments, count, call, [flat](const Segment& segment) {
      return Run{segment.tensor, static_cast<Flat*>(flat) + segment.offset, segment.numel};
    });
  });
}

void unpack_cuda(const Segment* segments, size_t count, const void* flat, const Transfer& transfer,
                 CUstream_st* stream) {
  const Call call{"unpack_cuda", transfer.scale, stream};
  visit_types(transfer.tensor_dtype, transfer.flat_dtype, [&](auto dst, auto src) {
    using Tensor = typename decltype(dst)::type;
    using Flat = typename decltype(src)::type;
    const auto to_run = [flat](const Segment& segment) {
      return Run{static_cast<const Flat*>(flat) + segment.offset, segment.tensor, segment.numel};
    };
    if (transfer.accumulate) {
      launch_all<Tensor, Flat, true>(segments, count, call, to_run);
    } else {
      launch_all<Tensor, Flat, false>(segments, count, call, to_run);
    }
  });
}

}  // namespace fastsync::kernels
