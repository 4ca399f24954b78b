// Single-threaded bandwidth of pack_cpu and unpack_cpu against memcpy, in GB/s of bytes read plus written.
//
//   pack_cpu_bench [elements] [rounds]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "../csrc/kernels/pack.h"

namespace {

using namespace fastsync::kernels;

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

void report(const char* name, size_t bytes, double seconds, double reference) {
  const double rate = static_cast<double>(bytes) / seconds * 1e-9;
  std::printf("%-28s %8.3f ms %7.1f GB/s  %5.2f of memcpy\n", name, seconds * 1e3, rate,
              rate / reference);
}

struct Case {
  const char* name;
  DType tensor;
  DType flat;
  double scale;
  enum { kPack, kUnpack, kAccumulate } kind;
};

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
constexpr Case kCases[] = {
    {"pack fp32->fp32", kF32, kF32, 1.0, Case::kPack},
    {"pack fp32->fp32 scaled", kF32, kF32, 0.25, Case::kPack},
    {"pack fp32->bf16 scaled", kF32, kBF16, 0.25, Case::kPack},
    {"pack fp32->fp16 scaled", kF32, kF16, 0.25, Case::kPack},
    {"pack bf16->bf16 scaled", kBF16, kBF16, 0.25, Case::kPack},
    {"pack fp16->fp16 scaled", kF16, kF16, 0.25, Case::kPack},
    {"unpack bf16->fp32", kF32, kBF16, 1.0, Case::kUnpack},
    {"unpack fp16->fp32", kF32, kF16, 1.0, Case::kUnpack},
    {"unpack fp32 += fp32", kF32, kF32, 0.5, Case::kAccumulate},
    {"unpack fp32 += bf16", kF32, kBF16, 0.5, Case::kAccumulate},
};

double run_case(const Case& c, int64_t numel, int rounds, std::vector<char>& tensor,
                std::vector<char>& flat) {
  const Segment segment{tensor.data(), 0, numel, 0.0f};
  const Transfer transfer{c.tensor, c.flat, c.scale, c.kind == Case::kAccumulate};
  return best_seconds(rounds, [&] {
    if (c.kind == Case::kPack) {
      pack_cpu(&segment, 1, flat.data(), transfer);
    } else {
      unpack_cpu(&segment, 1, flat.data(), transfer);
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t numel = argc > 1 ? std::atoll(argv[1]) : int64_t{1} << 24;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 20;
  const size_t bytes = static_cast<size_t>(numel) * 4;
  // 0x3c repeated is a normal number of about 0.01 to 1 in every type.
  std::vector<char> tensor(bytes, 0x3c), flat(bytes, 0x3c);
  const double copy = best_seconds(rounds, [&] { std::memcpy(flat.data(), tensor.data(), bytes); });
  const double reference = 2.0 * static_cast<double>(bytes) / copy * 1e-9;
  report("memcpy", 2 * bytes, copy, reference);
  for (const Case& c : kCases) {
    const size_t per_element =
        element_size(c.tensor) * (c.kind == Case::kAccumulate ? 2 : 1) + element_size(c.flat);
    const double seconds = run_case(c, numel, rounds, tensor, flat);
    report(c.name, per_element * static_cast<size_t>(numel), seconds, reference);
  }
  return 0;
}
