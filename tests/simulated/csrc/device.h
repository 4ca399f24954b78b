// The simulated device: streams, moments in them, memory, and who waits for whom.
//
// One thread runs the tasks of all streams, one at a time, and picks the next stream at random: a
// stream may lag behind the others, and all behind the host, as long as nothing that the program
// enqueued forbids it. What orders two tasks is known without running them: each carries a clock,
// which counts for every stream the tasks that surely came before.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "stream.h"

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// By stream; index 0 is the host.
using Clock = std::vector<uint32_t>;

struct Task {
  std::string name;
  std::function<void()> run;
  std::vector<Range> ranges = {};
  std::function<bool()> ready = nullptr;                      // null: at once
  std::shared_ptr<const std::vector<Range>> found = nullptr;  // more ranges, once it has run
};

// A moment in a stream, after all that was enqueued before.
struct Point {
  std::atomic<bool> passed{false};
  std::chrono::steady_clock::time_point time;
  Clock clock;
  size_t stream = 0;  // its index
};
using Moment = std::shared_ptr<Point>;

c10::Stream current_stream(c10::DeviceIndex device = -1);
c10::Stream new_stream(c10::DeviceIndex device);
void enqueue(c10::Stream stream, Task task);
Moment record(c10::Stream stream);
void wait(c10::Stream stream, const Moment& moment);
// Whether it has passed; the host knows from then on.
bool has_passed(const Moment& moment);
// The host waits. Throws where host waits are refused.
void host_wait(const Moment& moment, const std::string& why);
// The same for a task whose result the host needs.
void run_and_wait(c10::Stream stream, Task task);
void poke();  // has streams look again whether their next task is ready

c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
// The pinned block at `data` is not given back before `moment`.
void use_pinned(const void* data, const Moment& moment);
// The block is not handed out again before `stream` has come to where it is when the block is
// freed.
void use_on(const c10::DataPtr& data, c10::Stream stream);

struct Switches {
  std::atomic<bool> refuses_waits{false};
  std::atomic<double> lag{1.0};        // 0: in the order of enqueueing
  std::function<std::string()> where;  // the host lines that enqueue; null: not asked
};
Switches& switches();
void seed(uint64_t seed);
void start_detecting();
// Leaves out the so-manieth wait of one stream for another, or record_stream, since the last
// report; 0: none.
void drop(size_t edge, size_t record);
void stop_detecting();  // after a wait for all streams
void name_memory(const void* begin, size_t bytes, std::string name);
void synchronize_all();

struct Report {
  std::vector<std::string> waits, races;
  size_t launches = 0, kernels = 0;  // tasks; those of the project's own kernels
  size_t allocated = 0, peak = 0;    // bytes
  size_t edges = 0, records = 0;     // waits that order streams, and record_streams, so far
  std::string dropped;               // what drop() has left out
  // Blocks at the peak: bytes, and the host lines that allocated them; none where these are not
  // asked.
  std::vector<std::pair<size_t, std::string>> live;
};
Report report(bool reset);
void check_failure();  // throws what a task has thrown

}  // namespace simulated
