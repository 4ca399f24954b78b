// Launches of the wire formats' CUDA kernels, counted by the shim: as many as needed, of blocks
// that all have work.
#include <utility>

#include "codec_model.h"
#include "cuda_shim.h"
#include "harness.h"

namespace fastsync::testing {
namespace {

constexpr Wire kFormat = Wire::kInt8;
constexpr int64_t kBlock = 128;
// Elements of a block of threads.
constexpr int64_t kTile = 8192;
constexpr int64_t kReduced = 4096;

// A payload of one chunk and its tensor.
struct Fixture {
  explicit Fixture(int64_t numel)
      : layout(layout_of(kFormat, (numel + kBlock - 1) / kBlock, 0)),
        tensor(static_cast<size_t>(layout.chunk_numel)),
        payload(layout, 1) {
    cuda_shim::launches = 0;
    cuda_shim::blocks = 0;
  }

  void encode(const std::vector<Segment>& segments) {
    kernels::encode_cuda(segments.data(), segments.size(), nullptr, payload.data(),
                         {layout, {}, DType::kFloat32, 1}, nullptr);
  }
  void decode(const std::vector<Segment>& segments) {
    kernels::decode_cuda(segments.data(), segments.size(), payload.data(),
                         {layout, DType::kFloat32, 1, 0}, nullptr);
  }
  void reduce() {
    kernels::reduce_cuda(payload.data(), payload.data(), nullptr, {layout, {}, 1, 0}, nullptr);
  }

  PayloadLayout layout;
  std::vector<float> tensor;
  WireBuffer payload;
};

void grid_fits_the_work() {
  struct Call {
    const char* name;
    int64_t tile;
    std::function<void(Fixture&, const std::vector<Segment>&)> call;
  };
  const Call calls[] = {
      {"encode", kTile, [](Fixture& fixture, const auto& segments) { fixture.encode(segments); }},
      {"decode", kTile, [](Fixture& fixture, const auto& segments) { fixture.decode(segments); }},
      {"reduce", kReduced, [](Fixture& fixture, const auto&) { fixture.reduce(); }}};
  for (const auto& [name, tile, call] : calls) {
    const std::pair<int64_t, unsigned> blocks_of[] = {
        {1, 1}, {tile, 1}, {tile + 1, 2}, {3 * tile, 3}};
    for (const auto& [numel, blocks] : blocks_of) {
      Fixture fixture(numel);
      call(fixture, {{fixture.tensor.data(), 0, numel, 0}});
      EXPECT(cuda_shim::blocks == blocks, cuda_shim::blocks, " blocks to ", name, " ", numel,
             " elements");
      EXPECT(cuda_shim::launches == 1, cuda_shim::launches, " launches to ", name);
    }
  }
}

int launches_for(int64_t count) {
  Fixture fixture(count * kBlock);
  std::vector<Segment> segments;
  for (int64_t i = 0; i < count; ++i) {
    segments.push_back({fixture.tensor.data() + i * kBlock, i * kBlock, 3, 0});
  }
  fixture.encode(segments);
  return cuda_shim::launches;
}

void one_launch_serves_a_table() {
  for (const int count : {1, 91, 92, 93, 700, 743}) {
    const int launches = launches_for(count);
    EXPECT(launches == 1, launches, " launches for ", count, " segments");
  }
  const int launches = launches_for(744);
  EXPECT(launches == 2, launches, " launches for 744 segments");
}

// A segment is one run in each chunk that it touches.
void segments_are_split_at_chunks() {
  const PayloadLayout layout = layout_of(kFormat, 4, 0);
  WireBuffer payload(layout, 3);
  std::vector<float> tensor(1000);
  const Segment segment{tensor.data(), 256, 1000, 0};
  kernels::encode_cuda(&segment, 1, nullptr, payload.data(), {layout, {}, DType::kFloat32, 1},
                       nullptr);
  EXPECT(cuda_shim::blocks == 3, cuda_shim::blocks, " blocks for three chunks");
}

void nothing_to_do() {
  Fixture fixture(1);
  fixture.encode({});
  fixture.decode({});
  fixture.encode({{nullptr, 0, 0, 0}});
  fixture.decode({{nullptr, 0, 0, 0}});
  EXPECT(cuda_shim::launches == 0, cuda_shim::launches, " launches of nothing");
}

void reports_a_refused_launch() {
  Fixture fixture(300);
  const std::vector<Segment> segments = {{fixture.tensor.data(), 0, 300, 0}};
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"encode_cuda: launching 1 runs in 1 blocks", [&] { fixture.encode(segments); }},
      {"decode_cuda: launching 1 runs in 1 blocks", [&] { fixture.decode(segments); }},
      {"reduce_cuda: launching 1 blocks", [&] { fixture.reduce(); }}};
  for (const auto& [expected, call] : calls) {
    cuda_shim::failure = cudaErrorInvalidConfiguration;
    const std::string message = message_of<std::runtime_error>(call);
    EXPECT(message.find(expected) != std::string::npos, message);
    EXPECT(message.find("invalid configuration argument") != std::string::npos, message);
  }
}

// The shim's own promise.
void a_divided_warp_is_an_error() {
  const auto shuffle_in_half = [](unsigned odd) {
    if (threadIdx.x % 2 == odd) static_cast<void>(__shfl_xor_sync(0xffffffff, 1, 1));
  };
  const std::string message =
      message_of<std::logic_error>([&] { cuda_shim::run(shuffle_in_half, 1, 64, 1u); });
  EXPECT(message.find("disagree") != std::string::npos, message);
  grid_fits_the_work();  // and does no harm to what runs next
}

}  // namespace
}  // namespace fastsync::testing

int main(int argc, char** argv) {
  using namespace fastsync::testing;
  const std::vector<Case> cases = {
      {"grid_fits_the_work", grid_fits_the_work},
      {"one_launch_serves_a_table", one_launch_serves_a_table},
      {"segments_are_split_at_chunks", segments_are_split_at_chunks},
      {"nothing_to_do", nothing_to_do},
      {"reports_a_refused_launch", reports_a_refused_launch},
      {"a_divided_warp_is_an_error", a_divided_warp_is_an_error},
  };
  return run_cases(cases, argc, argv);
}
