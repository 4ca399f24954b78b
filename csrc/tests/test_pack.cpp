// pack and unpack against the model in pack_model.h, for the CPU kernels and for the CUDA kernels
// run through the shim.
#include <limits>
#include <utility>

#include "cuda_shim.h"
#include "harness.h"
#include "pack_model.h"

namespace fastsync::testing {
namespace {

const Backend kBackends[] = {
    {"cpu", kernels::pack_cpu, kernels::unpack_cpu},
    {"cuda",
     [](const Segment* segments, size_t count, void* flat, const Transfer& transfer) {
       kernels::pack_cuda(segments, count, flat, transfer, nullptr);
     },
     [](const Segment* segments, size_t count, const void* flat, const Transfer& transfer) {
       kernels::unpack_cuda(segments, count, flat, transfer, nullptr);
     }},
};
const Backend& kCudaOnHost = kBackends[1];

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16,
                kF64 = DType::kFloat64;
constexpr Types kTypes[] = {
    {kF32, kF32},  {kF32, kF16},  {kF32, kBF16}, {kF16, kF32},   {kF16, kF16},
    {kF16, kBF16}, {kBF16, kF32}, {kBF16, kF16}, {kBF16, kBF16}, {kF64, kF64},
};

constexpr double kThird = 1.0 / 3;

enum class Direction { kPack, kUnpack, kAccumulate };

// Runs one layout and names the combination in the failure.
void check(const Backend& backend, Direction direction, Types types, const std::vector<Spec>& specs,
           double scale) {
  try {
    Scenario scenario(types, specs);
    if (direction == Direction::kPack) {
      scenario.check_pack(backend, scale);
    } else {
      scenario.check_unpack(backend, scale, direction == Direction::kAccumulate);
    }
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(concat("tensor dtype ", static_cast<int>(types.tensor),
                                    ", flat dtype ", static_cast<int>(types.flat), ", scale ",
                                    scale, ", first shift ", specs[0].shift, ", first gap ",
                                    specs[0].gap, ": ", error.what()));
  }
}

// One segment per size, each `tensor_shift` and `flat_shift` elements from a 16-element boundary.
std::vector<Spec> shifted(const std::vector<int64_t>& sizes, int tensor_shift, int flat_shift) {
  std::vector<Spec> specs;
  int64_t end = 0;
  for (const int64_t numel : sizes) {
    const int64_t begin = (end + 15) / 16 * 16 + flat_shift;
    specs.push_back({numel, tensor_shift, static_cast<int>(begin - end)});
    end = begin + numel;
  }
  return specs;
}

std::vector<int64_t> small_sizes() {
  std::vector<int64_t> sizes = {0, 1, 2, 3, 7, 8, 9};
  for (int64_t numel = 15; numel <= 33; ++numel) sizes.push_back(numel);
  return sizes;
}

void small_sizes_at_every_alignment(const Backend& backend, Direction direction) {
  for (const Types& types : kTypes) {
    for (int tensor_shift = 0; tensor_shift <= 8; ++tensor_shift) {
      for (int flat_shift = 0; flat_shift <= 8; ++flat_shift) {
        check(backend, direction, types, shifted(small_sizes(), tensor_shift, flat_shift), kThird);
      }
    }
  }
}

// Around a block's threads and its chunk of 2048 (fp64), 4096 or 8192 (fp16 and bf16) elements.
void chunk_sizes(const Backend& backend, Direction direction) {
  const std::vector<int64_t> sizes = {255,  256,  257,  2047, 2048, 2049, 4095,
                                      4096, 4097, 8191, 8192, 8193, 20011};
  for (const Types& types : kTypes) {
    for (const int tensor_shift : {0, 1}) {
      for (const int flat_shift : {0, 2}) {
        check(backend, direction, types, shifted(sizes, tensor_shift, flat_shift), kThird);
      }
    }
  }
}

void large_tensor(const Backend& backend, Direction direction) {
  for (const Types& types : kTypes) check(backend, direction, types, {{400'003, 0, 0}}, kThird);
}

void every_scale(const Backend& backend, Direction direction) {
  for (const Types& types : kTypes) {
    for (const double scale : {1.0, 0.25, 0.1, 0.0, -2.0, 1e-30, 1e30}) {
      check(backend, direction, types, shifted({100, 17}, 0, 0), scale);
    }
  }
}

// Without gaps, so that one element too many in any segment shows in the next.
void contiguous_segments(const Backend& backend, Direction direction) {
  std::vector<Spec> specs;
  for (int i = 0; i < 40; ++i) specs.push_back({(i * 7) % 37, i % 3, 0});
  for (const Types& types : kTypes) check(backend, direction, types, specs, kThird);
}

// On both sides of each table's capacity, with empty segments among them.
void many_segments(const Backend& backend, Direction direction) {
  for (const int count : {127, 128, 1022, 1023, 2100}) {
    std::vector<Spec> specs;
    for (int i = 0; i < count; ++i) specs.push_back({1 + i % 5, i % 2, i % 3});
    specs[static_cast<size_t>(count) / 2].numel = 0;
    check(backend, direction, {kF32, kBF16}, specs, kThird);
    for (Spec& spec : specs) spec.numel = 1 + spec.numel % 2;
    check(backend, direction, {kF32, kF32}, specs, 1.0);
  }
}

void fills_segments_without_tensor(const Backend& backend) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Types& types : kTypes) {
    for (const float fill : {0.0f, -0.0f, 0.1f, 1e-8f, 65520.0f, nan}) {
      for (const int flat_shift : {0, 1, 8}) {
        std::vector<Spec> specs = shifted({1, 8, 33, 257, 5000, 40}, 0, flat_shift);
        for (Spec& spec : specs) spec.fill = fill;
        for (const size_t i : {0u, 2u, 3u, 4u}) specs[i].has_tensor = false;
        check(backend, Direction::kPack, types, specs, kThird);
      }
    }
  }
}

// A product applied twice to an element, or not at all, shows here.
void check_in_place(const Backend& backend, DType dtype, double scale, Direction direction) {
  constexpr int64_t kNumel = 9001;
  GuardedBuffer buffer(dtype, kNumel, 1);
  Random().fill(buffer, dtype, kNumel);
  const std::vector<char> before = buffer.copy();
  const Segment segments[] = {{buffer.at(0), 0, 4500, 0}, {buffer.at(4500), 4500, 4501, 0}};
  const Transfer transfer{dtype, dtype, scale, false};
  if (direction == Direction::kPack) {
    backend.pack(segments, 2, buffer.data(), transfer);
  } else {
    backend.unpack(segments, 2, buffer.data(), transfer);
  }
  const DType compute = dtype == kF64 ? kF64 : kF32;
  for (int64_t i = 0; i < kNumel; ++i) {
    const char* old = before.data() + static_cast<size_t>(i) * element_size(dtype);
    const double value = multiplied(value_of_bits(dtype, load_bits(dtype, old)), scale, compute);
    EXPECT(matches(dtype, buffer.bits(i), rounded(value, dtype)), backend.name, " dtype ",
           static_cast<int>(dtype), " element ", i, " in place times ", scale);
  }
  buffer.check_guards();
}

void scales_in_place(const Backend& backend) {
  for (const DType dtype : {kF32, kF16, kBF16, kF64}) {
    for (const double scale : {1.0, 3.0}) {
      check_in_place(backend, dtype, scale, Direction::kPack);
      check_in_place(backend, dtype, scale, Direction::kUnpack);
    }
  }
}

void nothing_to_do(const Backend& backend) {
  const Segment empty{nullptr, 0, 0, 0};
  const Transfer transfer{kF32, kF32, 1.0, false};
  cuda_shim::launches = 0;
  backend.pack(nullptr, 0, nullptr, transfer);
  backend.unpack(nullptr, 0, nullptr, transfer);
  backend.pack(&empty, 1, nullptr, transfer);
  backend.unpack(&empty, 1, nullptr, transfer);
  EXPECT(cuda_shim::launches == 0, cuda_shim::launches, " launches of nothing");
}

int launches_for(int count) {
  cuda_shim::launches = 0;
  Scenario scenario({kF32, kF32}, std::vector<Spec>(static_cast<size_t>(count), Spec{3, 0, 0}));
  scenario.check_pack(kCudaOnHost, 1.0);
  return cuda_shim::launches;
}

void one_launch_serves_a_table() {
  for (const int count : {1, 127, 128, 800, 1022}) {
    const int launches = launches_for(count);
    EXPECT(launches == 1, launches, " launches for ", count, " segments");
  }
  const int launches = launches_for(1023);
  EXPECT(launches == 2, launches, " launches for 1023 segments");
}

void grid_fits_the_work() {
  const std::pair<int64_t, unsigned> blocks_of[] = {{1, 1}, {4096, 1}, {4097, 2}, {3 * 4096, 3}};
  for (const auto& [numel, blocks] : blocks_of) {
    Scenario({kF32, kF32}, {{numel, 0, 0}}).check_pack(kCudaOnHost, 1.0);
    EXPECT(cuda_shim::blocks == blocks, cuda_shim::blocks, " blocks for ", numel, " elements");
  }
}

void refuses_unsupported_types(const Backend& backend) {
  for (const Types& types : {Types{kF64, kF32}, {kF32, kF64}, {kF16, kF64}, {DType{9}, kF32}}) {
    const Transfer transfer{types.tensor, types.flat, 1.0, false};
    const std::string pack =
        message_of<std::invalid_argument>([&] { backend.pack(nullptr, 0, nullptr, transfer); });
    EXPECT(pack.find("cannot convert") != std::string::npos, pack);
    const std::string unpack =
        message_of<std::invalid_argument>([&] { backend.unpack(nullptr, 0, nullptr, transfer); });
    EXPECT(unpack.find("cannot convert") != std::string::npos, unpack);
  }
}

void reports_a_refused_launch() {
  float tensor = 1;
  float flat = 0;
  const Segment segment{&tensor, 0, 1, 0};
  cuda_shim::failure = cudaErrorInvalidConfiguration;
  const std::string message = message_of<std::runtime_error>(
      [&] { kCudaOnHost.pack(&segment, 1, &flat, {kF32, kF32, 1.0, false}); });
  for (const char* part :
       {"pack_cuda", "1 segments in 1 blocks", "invalid configuration argument"}) {
    EXPECT(message.find(part) != std::string::npos, message);
  }
}

void add_cases(const Backend& backend, std::vector<Case>& cases) {
  const std::string name = backend.name;
  const auto add = [&](const char* test, auto function) {
    cases.push_back({name + "/" + test, [&backend, function] { function(backend); }});
  };
  const auto add_directions = [&](const char* test, auto function) {
    const std::pair<const char*, Direction> directions[] = {
        {"/pack/", Direction::kPack},
        {"/unpack/", Direction::kUnpack},
        {"/accumulate/", Direction::kAccumulate},
    };
    for (const auto& [label, direction] : directions) {
      cases.push_back({name + label + test, [&backend, function, direction = direction] {
                         function(backend, direction);
                       }});
    }
  };
  add_directions("small_sizes_at_every_alignment", small_sizes_at_every_alignment);
  add_directions("chunk_sizes", chunk_sizes);
  add_directions("large_tensor", large_tensor);
  add_directions("every_scale", every_scale);
  add_directions("contiguous_segments", contiguous_segments);
  add_directions("many_segments", many_segments);
  add("fills_segments_without_tensor", fills_segments_without_tensor);
  add("scales_in_place", scales_in_place);
  add("nothing_to_do", nothing_to_do);
  add("refuses_unsupported_types", refuses_unsupported_types);
}

}  // namespace
}  // namespace fastsync::testing

int main(int argc, char** argv) {
  using namespace fastsync::testing;
  std::vector<Case> cases = {
      {"cuda_on_host/one_launch_serves_a_table", one_launch_serves_a_table},
      {"cuda_on_host/grid_fits_the_work", grid_fits_the_work},
      {"cuda_on_host/reports_a_refused_launch", reports_a_refused_launch},
  };
  for (const Backend& backend : kBackends) add_cases(backend, cases);
  return run_cases(cases, argc, argv);
}
