#include "peers.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <map>
#include <optional>
#include <random>

#include "../check.h"
#include "thread_name.h"
#include "words.h"

namespace fastsync::comm {
namespace {

constexpr std::chrono::milliseconds kHeartbeatInterval{100};
constexpr std::chrono::milliseconds kSilence{1500};        // of a neighbour, from which on
constexpr std::chrono::milliseconds kRareHeartbeat{5000};  // it hears so rarely
constexpr std::chrono::milliseconds kFlush{300};           // for the exit reason
constexpr std::chrono::milliseconds kConnect{2000};        // for a neighbour to be reached
constexpr size_t kLongest = 1 << 20;  // of a message: longer ones are no peer's
constexpr size_t kRecent = 64;
constexpr int kBacklog = 256;
constexpr char kHello = 'H';
constexpr char kHeartbeatMessage = 'B';
constexpr char kEventMessage = 'N';

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(concat(what, ": ", std::strerror(errno)));
}

// A socket address of either family, for connect() and bind().
struct SocketAddress {
  sockaddr_storage bytes{};
  socklen_t size = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&bytes); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&bytes); }
  int family() const { return bytes.ss_family; }
  int64_t port() const {
    return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bytes).sin6_port
                                      : reinterpret_cast<const sockaddr_in&>(bytes).sin_port);
  }
};

SocketAddress socket_address(const PeerAddress& address) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = std::to_string(address.port);
  FS_CHECK(getaddrinfo(address.host.c_str(), port.c_str(), &hints, &found) == 0, "'", address.host,
           "' is no address in digits");
  SocketAddress result;
  result.size = found->ai_addrlen;
  std::memcpy(&result.bytes, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  return result;
}

int open_socket(int family) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) fail("socket");
  return fd;
}

void set_tcp(int fd, int option, int value) {
  setsockopt(fd, IPPROTO_TCP, option, &value, sizeof value);
}

// A process that is stopped does not read, but its machine acknowledges what comes, and what only
// asks for that.
void prepare(int fd, std::chrono::milliseconds lost_after) {
  set_tcp(fd, TCP_NODELAY, 1);
  if (lost_after.count() <= 0) return;
  const auto milliseconds = static_cast<int>(std::min<int64_t>(lost_after.count(), INT_MAX));
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  set_tcp(fd, TCP_KEEPIDLE, std::max(1, milliseconds / 4000));
  set_tcp(fd, TCP_KEEPINTVL, std::max(1, milliseconds / 4000));
  set_tcp(fd, TCP_USER_TIMEOUT, milliseconds);
}

bool tells_of_loss(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH || error == EHOSTDOWN;
}

// -1: it cannot be reached.
int call(const PeerAddress& address, std::chrono::milliseconds lost_after) {
  const SocketAddress to = socket_address(address);
  const int fd = open_socket(to.family());
  int error = 0;
  if (::connect(fd, to.get(), to.size) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      pollfd ready{fd, POLLOUT, 0};
      error = poll(&ready, 1, static_cast<int>(kConnect.count())) == 1 ? 0 : ETIMEDOUT;
      socklen_t size = sizeof error;
      if (error == 0) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error == 0) {
    prepare(fd, lost_after);
    return fd;
  }
  close(fd);
  return -1;
}

// A length, a kind, a body.
std::string framed(char kind, const std::string& body) {
  return bytes_of(static_cast<uint32_t>(body.size())) + kind + body;
}

}  // namespace

Peers::Peers(const std::string& host, std::chrono::milliseconds lost_after)
    : process_(getpid()), lost_after_(lost_after) {
  std::random_device random;
  address_ = {host, 0, (uint64_t{random()} << 32) | random()};
  SocketAddress mine = socket_address(address_);
  listening_ = open_socket(mine.family());
  if (bind(listening_, mine.get(), mine.size) != 0 || listen(listening_, kBacklog) != 0 ||
      getsockname(listening_, mine.get(), &mine.size) != 0) {
    const int error = errno;
    ::close(listening_);
    errno = error;
    fail(concat("listening on ", host));
  }
  address_.port = mine.port();
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

std::vector<int64_t> Peers::called_by(int64_t rank, int64_t ranks) {
  std::vector<int64_t> result;
  for (int64_t distance = 1; 2 * distance <= ranks; distance *= 2) {
    if (2 * distance == ranks && rank >= distance) continue;  // called from there
    result.push_back((rank + distance) % ranks);
  }
  return result;
}

std::set<int64_t> Peers::neighbours_of(int64_t rank, int64_t ranks) {
  std::set<int64_t> result;
  for (int64_t distance = 1; 2 * distance <= ranks; distance *= 2) {
    result.insert((rank + distance) % ranks);
    result.insert((rank + ranks - distance) % ranks);
  }
  return result;
}

std::vector<int64_t> Peers::connect(const std::vector<PeerAddress>& all, int64_t rank,
                                    Listener listener) {
  rank_ = rank;
  listener_ = std::move(listener);
  const auto ranks = static_cast<int64_t>(all.size());
  std::vector<int64_t> missing;
  callers_ = neighbours_of(rank, ranks);
  for (const int64_t other : called_by(rank, ranks)) {
    callers_.erase(other);
    const PeerAddress& address = all[static_cast<size_t>(other)];
    const int fd = call(address, lost_after_);
    if (fd < 0) {
      missing.push_back(other);
      continue;
    }
    const std::string hello = framed(kHello, bytes_of(address.key) + bytes_of(rank));
    links_.push_back({fd, other, "", hello, Clock::now(), {}});
  }
  thread_ = std::thread([this] { run(); });
  return missing;
}

void Peers::flood(const std::string& event) {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  queued_.push_back(bytes_of(rank_) + bytes_of(++told_) + event);
  wake();
}

void Peers::flush(std::chrono::milliseconds timeout) {
  const auto end = Clock::now() + timeout;
  while (has_unsent() && Clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool Peers::has_unsent() {
  const std::lock_guard<std::mutex> links(links_mutex_);
  const std::lock_guard<std::mutex> queue(queue_mutex_);
  return !queued_.empty() || std::any_of(links_.begin(), links_.end(),
                                         [](const Link& link) { return !link.out.empty(); });
}

void Peers::wake() const {
  const uint64_t one = 1;
  if (::write(wake_, &one, sizeof one) < 0) return;  // it is awake
}

void Peers::close() {
  if (process_ != getpid()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  stop_ = true;
  wake();
  if (thread_.joinable()) thread_.join();
  for (const Link& link : links_) ::close(link.fd);
  links_.clear();
  for (int* fd : {&listening_, &wake_}) {
    if (*fd >= 0) ::close(std::exchange(*fd, -1));
  }
}

void Peers::abandon() {
  if (process_ == getpid()) return;
  // The thread may have held it when the process was forked. It never will let go of it here.
  if (!links_mutex_.try_lock()) return;
  for (const Link& link : links_) ::close(link.fd);
  ::close(listening_);
  links_mutex_.unlock();
}

void Peers::run() {
  name_this_thread("fastsync-watch");
  auto next = Clock::now();
  std::optional<Clock::time_point> end;
  while (true) {
    if (stop_ && !end) end = Clock::now() + kFlush;
    take_queued();
    if (end && (is_all_sent() || Clock::now() > *end)) return;
    std::vector<pollfd> waits{{wake_, POLLIN, 0}, {listening_, POLLIN, 0}};
    for (const Link& link : links_) {
      const auto events = static_cast<short>(link.out.empty() ? POLLIN : POLLIN | POLLOUT);
      waits.push_back({link.fd, events, 0});
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next - Clock::now());
    const int64_t pause = std::max<int64_t>(0, left.count() + 1);
    poll(waits.data(), waits.size(), static_cast<int>(end ? std::min<int64_t>(pause, 10) : pause));
    uint64_t wakes = 0;
    while (::read(wake_, &wakes, sizeof wakes) > 0) {
    }
    const std::lock_guard<std::mutex> lock(links_mutex_);
    for (size_t i = 2; i < waits.size(); ++i) {
      if ((waits[i].revents & POLLOUT) != 0) write(links_[i - 2]);
      if ((waits[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) read(links_[i - 2]);
    }
    drop_closed();
    if ((waits[1].revents & POLLIN) != 0) accept_all();
    if (Clock::now() >= next) {
      next = Clock::now() + kHeartbeatInterval;
      heartbeat();
    }
  }
}

// A rank that has not said hello yet has not heard of the event.
bool Peers::is_all_sent() const {
  return (callers_.empty() || recent_.empty()) &&
         std::all_of(links_.begin(), links_.end(),
                     [](const Link& link) { return link.out.empty(); });
}

// Messages that a stopped process does not read fill its machine's buffer. When that is full, TCP
// gives up as on a machine that is lost, so a silent process is sent fewer messages: an hour's
// heartbeats fit.
void Peers::heartbeat() {
  const std::string message = framed(kHeartbeatMessage, listener_.heartbeat());
  const auto now = Clock::now();
  for (Link& link : links_) {
    const bool due = now - link.heard < kSilence || now - link.told >= kRareHeartbeat;
    // One that does not read hears of this later.
    if (link.rank >= 0 && link.out.empty() && due) {
      link.out = message;
      link.told = now;
      write(link);
    }
  }
}

void Peers::take_queued() {
  std::deque<std::string> queued;
  const std::lock_guard<std::mutex> lock(links_mutex_);
  {
    const std::lock_guard<std::mutex> queue(queue_mutex_);
    queued.swap(queued_);
  }
  for (const std::string& body : queued) {
    heard_.emplace(value_at<int64_t>(body, 0), value_at<int64_t>(body, 8));
    pass_on(body);
  }
}

void Peers::pass_on(const std::string& body) {
  recent_.push_back(body);
  if (recent_.size() > kRecent) recent_.pop_front();
  for (Link& link : links_) {
    if (link.rank < 0 || link.out.size() > kLongest) continue;  // it has not read for long
    link.out += framed(kEventMessage, body);
    write(link);
  }
}

void Peers::accept_all() {
  while (true) {
    const int fd = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    prepare(fd, lost_after_);
    links_.push_back({fd, -1, "", "", Clock::now(), {}});
  }
}

void Peers::read(Link& link) {
  char buffer[4096];
  while (link.fd >= 0) {
    const ssize_t got = recv(link.fd, buffer, sizeof buffer, 0);
    if (got > 0) {
      link.heard = Clock::now();
      link.in.append(buffer, static_cast<size_t>(got));
      continue;
    }
    const bool later = got < 0 && (errno == EAGAIN || errno == EINTR);
    link.lost |= got < 0 && tells_of_loss(errno);
    parse(link);
    if (!later && link.fd >= 0) ::close(std::exchange(link.fd, -1));
    return;
  }
}

void Peers::parse(Link& link) {
  constexpr size_t kHead = sizeof(uint32_t) + 1;
  size_t at = 0;
  while (link.fd >= 0 && link.in.size() - at >= kHead) {
    const size_t size = value_at<uint32_t>(link.in, at);
    if (size > kLongest) {
      ::close(std::exchange(link.fd, -1));
      return;
    }
    if (link.in.size() - at < kHead + size) break;
    hear(link, link.in[at + kHead - 1], link.in.substr(at + kHead, size));
    at += kHead + size;
  }
  link.in.erase(0, at);
}

void Peers::hear(Link& link, char kind, const std::string& body) {
  if (link.rank < 0) {
    const bool knows = kind == kHello && value_at<uint64_t>(body, 0) == address_.key;
    if (knows) {
      link.rank = value_at<int64_t>(body, sizeof(uint64_t));
      callers_.erase(link.rank);
      for (const std::string& event : recent_) link.out += framed(kEventMessage, event);
    } else {
      ::close(std::exchange(link.fd, -1));
    }
  } else if (kind == kHeartbeatMessage) {
    listener_.on_heartbeat(link.rank, body);
  } else if (kind == kEventMessage) {
    hear_event(body);
  }
}

void Peers::hear_event(const std::string& body) {
  constexpr size_t kHead = 2 * sizeof(int64_t);
  if (!heard_.emplace(value_at<int64_t>(body, 0), value_at<int64_t>(body, 8)).second) return;
  pass_on(body);
  listener_.on_event(body.substr(std::min(kHead, body.size())));
}

void Peers::write(Link& link) {
  while (link.fd >= 0 && !link.out.empty()) {
    const ssize_t sent = send(link.fd, link.out.data(), link.out.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      link.out.erase(0, static_cast<size_t>(sent));
      continue;
    }
    if (sent < 0 && errno == EINTR) continue;
    link.lost |= sent < 0 && tells_of_loss(errno);
    if (sent < 0 && errno != EAGAIN) link.out.clear();  // what it still has said is read first
    return;
  }
}

void Peers::drop_closed() {
  std::map<int64_t, bool> closed;  // and whether they are lost, by rank
  for (const Link& link : links_) {
    if (link.fd < 0 && link.rank >= 0) closed[link.rank] = link.lost;
  }
  links_.erase(
      std::remove_if(links_.begin(), links_.end(), [](const Link& link) { return link.fd < 0; }),
      links_.end());
  for (const auto& [rank, lost] : closed) listener_.on_closed(rank, lost);
}

}  // namespace fastsync::comm
