// Single-threaded speed of encode_cpu, reduce_cpu and decode_cpu in every wire format, in GB/s of fp32 elements coded, summed
// or decoded (4 bytes each, whatever the format), next to memcpy's in GB/s of bytes copied.
//
//   codec_cpu_bench [elements] [rounds]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../csrc/kernels/codec.h"

namespace {

using namespace fastsync::kernels;

constexpr int64_t kChunk = int64_t{1} << 18;  // elements
constexpr int32_t kSources = 2;

template <class Function>
double best_seconds(int rounds, const Function& function) {
  function();
  double best = 1e30;
  for (int i = 0; i < rounds; ++i) {
    const auto start = std::chrono::steady_clock::now();
    function();
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  return best;
}

// Buffers of aligned memory, sized for the widest format.
class Bench {
 public:
  Bench(int64_t numel, int rounds)
      : numel_(numel / kChunk * kChunk),
        rounds_(rounds),
        tensor_(allocate(4)),
        residual_(allocate(4)),
        wires_(allocate(4 * kSources)) {
    for (int64_t i = 0; i < numel_; ++i) {
      tensor_[i] = 1e-3f * static_cast<float>(static_cast<int32_t>(i * 2654435761u)) * 0x1p-31f;
      residual_[i] = 0;
    }
  }

  double copy_rate() {
    const size_t bytes = static_cast<size_t>(numel_) * 4;
    return rate(best_seconds(rounds_, [&] { std::memcpy(residual_.get(), tensor_.get(), bytes); }));
  }

  void report(Format format) {
    layout_ = {format, kChunk, coded_bytes(format, kChunk), 0};
    std::printf("%-12s %7.1f %7.1f %7.1f %7.1f %7.1f %7.1f %7.1f %7.1f\n", name_of(format),
                encode(false, false), encode(true, false), encode(false, true), encode(true, true),
                reduce(false), reduce(true), decode(1), decode(kSources));
  }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  using Memory = std::unique_ptr<float[], Free>;

  Memory allocate(int64_t bytes_per_element) const {
    const auto bytes = static_cast<size_t>(numel_ * bytes_per_element);
    const auto memory = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (memory == nullptr) std::abort();
    std::memset(static_cast<void*>(memory), 0, bytes);
    return Memory(memory);
  }

  double rate(double seconds) const { return static_cast<double>(numel_) * 4 / seconds * 1e-9; }
  int64_t wire_bytes() const { return numel_ / kChunk * layout_.chunk_bytes; }
  char* wire(int32_t source) const {
    return reinterpret_cast<char*>(wires_.get()) + source * wire_bytes();
  }

  double encode(bool residual, bool stochastic) {
    const Segment segment{tensor_.get(), 0, numel_, 0};
    const EncodeArgs args{layout_, {stochastic, 7}, DType::kFloat32, 0.5f};
    for (int32_t source = 1; source < kSources; ++source) {
      encode_cpu(&segment, 1, nullptr, wire(source), args);
    }
    return rate(best_seconds(rounds_, [&] {
      encode_cpu(&segment, 1, residual ? residual_.get() : nullptr, wire(0), args);
    }));
  }

  // Every chunk of this wire as one of kSources received ones; the result replaces nothing that a later round reads.
  double reduce(bool residual) {
    std::vector<char> result(static_cast<size_t>(layout_.chunk_bytes));
    const int64_t results = numel_ / kChunk / kSources;
    const double seconds = best_seconds(rounds_, [&] {
      for (int64_t c = 0; c < results; ++c) {
        float* lost = residual ? residual_.get() + c * kChunk : nullptr;
        const ReduceArgs args{layout_, {false, 7}, kSources, c * kChunk};
        reduce_cpu(wire(0) + c * kSources * layout_.chunk_bytes, result.data(), lost, args);
      }
    });
    return rate(seconds) / kSources;
  }

  double decode(int32_t sources) {
    const Segment segment{tensor_.get(), 0, numel_, 0};
    const DecodeArgs args{layout_, DType::kFloat32, sources, wire_bytes()};
    return rate(best_seconds(rounds_, [&] { decode_cpu(&segment, 1, wire(0), args); }));
  }

  int64_t numel_;
  int rounds_;
  WireLayout layout_{};
  Memory tensor_, residual_, wires_;
};

}  // namespace

int main(int argc, char** argv) {
  const int64_t numel = argc > 1 ? std::atoll(argv[1]) : int64_t{1} << 23;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 20;
  Bench bench(numel, rounds);
  std::printf("memcpy %.1f\n%-12s %7s %7s %7s %7s %7s %7s %7s %7s\n", bench.copy_rate(), "",
              "encode", "+resid", "random", "+resid", "reduce2", "+resid", "decode", "decode2");
  for (int i = 0; i < kFormats; ++i) bench.report(static_cast<Format>(i));
  return 0;
}
