// The wire formats on the device: kernels over groups of elements (codec_group.h), and tables of
// work for them.
#include <algorithm>
#include <cstdint>

#include "codec_group.h"
#include "cuda_launch.h"
#include "cuda_table.h"

namespace fastsync::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kRounds = 2;        // groups of a thread that has searched for its segment
constexpr int kBlocksAtOnce = 4;  // per multiprocessor: 1024 threads load 64 KiB at once
template <class Codec>
constexpr int kPerRound = kThreads * Shape<Codec>::kGroup;  // elements of a block of threads
template <class Codec>
constexpr int kTile = kPerRound<Codec> * kRounds;
constexpr int64_t kMaxRun = int64_t{1} << 30;  // elements, a multiple of kTile<Codec>

// Part of a segment, within one chunk of the payload.
struct Run {
  void* tensor;   // nullptr: code the fill value
  int64_t first;  // element of the flat buffer
  Place place;    // of `first`
};

template <int kRuns>
struct Table {
  static constexpr int kCapacity = kRuns;
  int count;
  uint32_t first_block[kRuns];  // ascending
  int numel[kRuns];
  float fill[kRuns];
  Run run[kRuns];
};

struct EncodeCall {
  uint8_t* payload;
  float* residual;
  RandomKey key;
  Scale scale;
  bool stochastic;
};

struct ReduceCall {
  DecodeCall sum;
  uint8_t* result;
  float* residual;
  Place place;
  int64_t numel;
  RandomKey key;
  uint32_t first;
  bool stochastic;
};

constexpr int kBytesPerRun = 12 + sizeof(Run);
constexpr int kOtherBytes = 64;
using SmallTable = Table<(kSmallParameters - kOtherBytes) / kBytesPerRun>;
using LargeTable = Table<(kLargeParameters - kOtherBytes) / kBytesPerRun>;
static_assert(sizeof(SmallTable) + sizeof(EncodeCall) <= kSmallParameters);
static_assert(sizeof(LargeTable) + sizeof(EncodeCall) <= kLargeParameters);

// --- Kernels ---

// The tensor's elements, scaled and with the residual added.
template <class Codec, class T>
__device__ __forceinline__ void load_input(Group<Codec>& x, Group<Codec>& old, const T* from,
                                           const float* residual, int numel, float scale) {
  load_group<Codec>(x, from, numel);
  if (residual != nullptr) load_group<Codec>(old, residual, numel);
#pragma unroll
  for (int i = 0; i < Shape<Codec>::kGroup; ++i) x[i] *= scale;
  if (residual == nullptr) return;
#pragma unroll
  for (int i = 0; i < Shape<Codec>::kGroup; ++i) x[i] += old[i];
}

template <class Codec>
__device__ __forceinline__ void fill_group(Group<Codec>& x, float fill, int numel) {
#pragma unroll
  for (int i = 0; i < Shape<Codec>::kGroup; ++i) x[i] = element_at<Codec>(i) < numel ? fill : 0;
}

// First element of this thread's group in a round, in its run.
template <class Codec>
__device__ __forceinline__ int group_begin(uint32_t block, int round) {
  return static_cast<int>(block) * kTile<Codec> + round * kPerRound<Codec> +
         group_in_tile<Codec>(static_cast<int>(threadIdx.x));
}

template <class Codec, class T, class AnyTable>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    encode_kernel(const __grid_constant__ AnyTable table, const EncodeCall call) {
  const int segment = find_segment(table, blockIdx.x);
  const Run& run = table.run[segment];
  const int numel = table.numel[segment];
  const int padded = (numel + Codec::kBlock - 1) / Codec::kBlock * Codec::kBlock;
  const auto scale = static_cast<float>(call.scale.get());
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const int begin = group_begin<Codec>(blockIdx.x - table.first_block[segment], round);
    if (!warp_inside<Codec>(begin, padded)) return;
    const bool kept = call.residual != nullptr && run.tensor != nullptr;
    float* residual = kept ? call.residual + run.first + begin : nullptr;
    Group<Codec> x;
    Group<Codec> old;
    if (run.tensor == nullptr) {
      fill_group<Codec>(x, table.fill[segment], numel - begin);
    } else {
      const T* from = static_cast<const T*>(run.tensor) + begin;
      load_input<Codec>(x, old, from, residual, numel - begin, scale);
    }
    const auto first = static_cast<uint32_t>(run.first + begin);
    code_group<Codec>(x, call.payload, place_after<Codec>(run.place, begin),
                      quads_inside<Codec>(padded - begin), {call.stochastic, call.key, first},
                      kept);
    if (kept) keep_group<Codec, false>(residual, x, old, numel - begin);
  }
}

template <class Codec, class T, class AnyTable>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    decode_kernel(const __grid_constant__ AnyTable table, const DecodeCall call) {
  const int segment = find_segment(table, blockIdx.x);
  const Run& run = table.run[segment];
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const int begin = group_begin<Codec>(blockIdx.x - table.first_block[segment], round);
    const int left = table.numel[segment] - begin;
    if (left <= 0) return;
    Group<Codec> x;
    sum_group<Codec>(x, call, place_after<Codec>(run.place, begin), quads_inside<Codec>(left));
    store_group<Codec>(static_cast<T*>(run.tensor) + begin, x, left);
  }
}

template <class Codec>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) reduce_kernel(const ReduceCall call) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kPerRound<Codec> +
                        group_in_tile<Codec>(static_cast<int>(threadIdx.x));
  if (!warp_inside<Codec>(begin, call.numel)) return;
  const int64_t left = call.numel - begin;
  const int quads = quads_inside<Codec>(left);
  const Place place = place_after<Codec>(call.place, begin);
  const bool kept = quads > 0 && call.residual != nullptr;
  float* residual = kept ? call.residual + begin : nullptr;
  const int numel = left < kPerRound<Codec> ? static_cast<int>(left) : kPerRound<Codec>;
  Group<Codec> x = {};
  Group<Codec> old;
  if (quads > 0) sum_group<Codec>(x, call.sum, place, quads);
  if (kept) load_group<Codec>(old, residual, numel);
  const uint32_t first = call.first + static_cast<uint32_t>(begin);
  code_group<Codec>(x, call.result, place, quads, {call.stochastic, call.key, first}, kept);
  if (kept) keep_group<Codec, true>(residual, x, old, numel);
}

// --- Launches ---

void check_blocks(const char* name, int64_t blocks) {
  FS_CHECK(blocks <= INT32_MAX, name, ": ", blocks, " blocks exceed one launch's ", INT32_MAX);
}

// Fills tables with runs and hands each to launch(table, blocks).
template <class Codec>
class Tables {
 public:
  explicit Tables(const PayloadLayout& layout) : layout_(layout) { table_.count = 0; }

  template <class Launch>
  void add(const Segment& segment, size_t element_bytes, const Launch& launch) {
    check_offset(segment, layout_);
    for (int64_t begin = 0; begin < segment.numel;) {
      const int64_t first = segment.offset + begin;
      const int64_t chunk_left = layout_.chunk_numel - first % layout_.chunk_numel;
      const int64_t numel = std::min({segment.numel - begin, chunk_left, kMaxRun});
      const auto tensor = static_cast<char*>(segment.tensor);
      const int64_t skipped = begin * static_cast<int64_t>(element_bytes);
      append(
          {tensor == nullptr ? nullptr : tensor + skipped, first, place_of<Codec>(layout_, first)},
          static_cast<int>(numel), segment.fill);
      if (table_.count == LargeTable::kCapacity) flush(launch);
      begin += numel;
    }
  }

  template <class Launch>
  void flush(const Launch& launch) {
    if (table_.count == 0) return;
    if (table_.count <= SmallTable::kCapacity) {
      launch(small_copy(), blocks_);
    } else {
      launch(table_, blocks_);
    }
    table_.count = 0;
    blocks_ = 0;
  }

 private:
  void append(const Run& run, int numel, float fill) {
    const int i = table_.count++;
    table_.first_block[i] = static_cast<uint32_t>(blocks_);
    table_.numel[i] = numel;
    table_.fill[i] = fill;
    table_.run[i] = run;
    blocks_ += (numel + kTile<Codec> - 1) / kTile<Codec>;
  }

  SmallTable small_copy() const {
    SmallTable small;
    small.count = table_.count;
    std::copy_n(table_.first_block, table_.count, small.first_block);
    std::copy_n(table_.numel, table_.count, small.numel);
    std::copy_n(table_.fill, table_.count, small.fill);
    std::copy_n(table_.run, table_.count, small.run);
    return small;
  }

  PayloadLayout layout_;
  int64_t blocks_ = 0;
  LargeTable table_;
};

template <class Codec, class Launch>
void launch_tables(const Segment* segments, size_t count, const PayloadLayout& layout, DType dtype,
                   const Launch& launch) {
  Tables<Codec> tables(layout);
  for (size_t i = 0; i < count; ++i) tables.add(segments[i], element_size(dtype), launch);
  tables.flush(launch);
}

}  // namespace

void encode_cuda(const Segment* segments, size_t count, float* residual, void* payload,
                 const EncodeArgs& args, CUstream_st* stream) {
  check_layout(args.layout);
  const EncodeCall call{static_cast<uint8_t*>(payload), residual, random_key(args.rounding.seed),
                        args.scale, args.rounding.stochastic};
  visit_codec(args.layout.format, args.tensor_dtype, [&](auto codec, auto type) {
    using Codec = typename decltype(codec)::type;
    using T = typename decltype(type)::type;
    const auto launch = [&](const auto& table, int64_t blocks) {
      check_blocks("encode_cuda", blocks);
      const auto kernel = encode_kernel<Codec, T, std::decay_t<decltype(table)>>;
      FS_CUDA_LAUNCH(kernel, static_cast<unsigned>(blocks), kThreads, stream, table, call);
      FS_CUDA_CHECK(cudaGetLastError(), "encode_cuda: launching ", table.count, " runs in ", blocks,
                    " blocks");
    };
    launch_tables<Codec>(segments, count, args.layout, args.tensor_dtype, launch);
  });
}

void reduce_cuda(const void* received, void* result, float* residual, const ReduceArgs& args,
                 CUstream_st* stream) {
  check_layout(args.layout);
  check_sources(args.sources);
  visit_format(args.layout.format, [&](auto codec) {
    using Codec = typename decltype(codec)::type;
    const int64_t blocks = (args.layout.chunk_numel + kPerRound<Codec> - 1) / kPerRound<Codec>;
    check_blocks("reduce_cuda", blocks);
    const DecodeCall sum{static_cast<const uint8_t*>(received), args.layout.chunk_bytes,
                         args.sources};
    const ReduceCall call{sum,
                          static_cast<uint8_t*>(result),
                          residual,
                          place_of<Codec>(args.layout, 0),
                          args.layout.chunk_numel,
                          random_key(args.rounding.seed),
                          static_cast<uint32_t>(args.first),
                          args.rounding.stochastic};
    FS_CUDA_LAUNCH(reduce_kernel<Codec>, static_cast<unsigned>(blocks), kThreads, stream, call);
    FS_CUDA_CHECK(cudaGetLastError(), "reduce_cuda: launching ", blocks, " blocks");
  });
}

void decode_cuda(const Segment* segments, size_t count, const void* payload, const DecodeArgs& args,
                 CUstream_st* stream) {
  check_layout(args.layout);
  check_sources(args.sources);
  const DecodeCall call{static_cast<const uint8_t*>(payload), args.source_bytes, args.sources};
  visit_codec(args.layout.format, args.tensor_dtype, [&](auto codec, auto type) {
    using Codec = typename decltype(codec)::type;
    using T = typename decltype(type)::type;
    const auto launch = [&](const auto& table, int64_t blocks) {
      check_blocks("decode_cuda", blocks);
      const auto kernel = decode_kernel<Codec, T, std::decay_t<decltype(table)>>;
      FS_CUDA_LAUNCH(kernel, static_cast<unsigned>(blocks), kThreads, stream, table, call);
      FS_CUDA_CHECK(cudaGetLastError(), "decode_cuda: launching ", table.count, " runs in ", blocks,
                    " blocks");
    };
    launch_tables<Codec>(segments, count, args.layout, args.tensor_dtype, launch);
  });
}

}  // namespace fastsync::kernels
