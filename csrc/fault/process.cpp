#include "fault/process.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "check.h"

namespace fastsync::engine {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLongest{200};  // for a stack to be written
constexpr milliseconds kPause{5};
constexpr size_t kMostBytes = 4096;  // of a stack
constexpr uint64_t kExiting = 4;     // PF_EXITING of the kernel's sched.h

// Fields of /proc/<pid>/stat after the name, as proc(5) numbers them less 3; empty where there is
// no such process.
std::vector<std::string> stat_of(int64_t process) {
  std::ifstream file(concat("/proc/", process, "/stat"));
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return {};
  std::istringstream rest(text.substr(name_end + 1));
  std::vector<std::string> fields;
  for (std::string field; rest >> field;) fields.push_back(field);
  return fields;
}

std::string name_of_signal(int number) {
  switch (number) {
    case SIGKILL:
      return "SIGKILL";
    case SIGTERM:
      return "SIGTERM";
    case SIGINT:
      return "SIGINT";
    case SIGSEGV:
      return "SIGSEGV";
    case SIGABRT:
      return "SIGABRT";
    case SIGBUS:
      return "SIGBUS";
    case SIGHUP:
      return "SIGHUP";
    default:
      return concat("signal ", number);
  }
}

std::array<char, 128> last_line{};  // a handler cannot reach anything but globals

void on_termination(int number) {
  if (write(STDERR_FILENO, last_line.data(), std::strlen(last_line.data())) < 0) {
    // There is no other channel for the line.
  }
  signal(number, SIG_DFL);
  raise(number);
}

}  // namespace

void announce_termination(const std::string& line) {
  struct sigaction now{};
  if (sigaction(SIGTERM, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return;
  line.copy(last_line.data(), last_line.size() - 1);
  struct sigaction ours{};
  ours.sa_handler = on_termination;
  sigaction(SIGTERM, &ours, nullptr);
}

ProcessEnd end_of_process(int64_t process) {
  constexpr size_t kState = 0;
  constexpr size_t kFlags = 6;
  constexpr size_t kExitCode = 49;
  const std::vector<std::string> fields = stat_of(process);
  if (fields.size() <= kExitCode) return {};
  const std::string& state = fields[kState];
  const bool exiting = (std::stoull(fields[kFlags]) & kExiting) != 0;
  if (state != "Z" && state != "X" && !exiting) return {true, ""};
  const int status = std::stoi(fields[kExitCode]);
  if (WIFSIGNALED(status)) return {false, "was killed by " + name_of_signal(WTERMSIG(status))};
  return {false, concat("exited with code ", WEXITSTATUS(status), " without a word")};
}

bool is_stopped(int64_t process) {
  const std::vector<std::string> fields = stat_of(process);
  return !fields.empty() && (fields[0] == "T" || fields[0] == "t");
}

std::string stack_of(pthread_t thread, int signal, int file) {
  if (file < 0 || ftruncate(file, 0) != 0 || lseek(file, 0, SEEK_SET) != 0) return "";
  if (pthread_kill(thread, signal) != 0) return "";
  struct stat facts{};
  off_t size = 0;
  // The handler writes line by line: the stack is complete once the file stops growing.
  for (auto left = kLongest; left > milliseconds{0}; left -= kPause) {
    std::this_thread::sleep_for(kPause);
    if (fstat(file, &facts) != 0) return "";
    if (facts.st_size > 0 && facts.st_size == size) break;
    size = facts.st_size;
  }
  std::string text(std::min(static_cast<size_t>(size), kMostBytes), '\0');
  const ssize_t got = pread(file, text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  return text;
}

}  // namespace fastsync::engine
