#include "messages.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

namespace fastsync::comm {
namespace {

class Exchange;

// Exchanges of this process that are still referenced. Never destroyed: the thread of a hanging one
// runs longer than main().
class UnderWay {
 public:
  static UnderWay& of_process() {
    static UnderWay* const under_way = new UnderWay;
    return *under_way;
  }
  void add(Exchange* exchange) {
    const std::lock_guard<std::mutex> lock(mutex_);
    exchanges_.insert(exchange);
  }
  void remove(Exchange* exchange) {
    const std::lock_guard<std::mutex> lock(mutex_);
    exchanges_.erase(exchange);
  }
  void abort();

 private:
  std::mutex mutex_;
  std::set<Exchange*> exchanges_;
};

class Exchange {
 public:
  // Messages of the ranks after this one come first, so that all ranks are busy.
  Exchange(c10::intrusive_ptr<c10d::Backend> backend, std::vector<Message> received,
           std::vector<Message> sent, int tag)
      : backend_(std::move(backend)),
        received_(std::move(received)),
        sent_(std::move(sent)),
        tag_(tag) {
    const int ranks = backend_->getSize();
    const int self = backend_->getRank();
    const auto by_distance = [](std::vector<Message>& messages, const auto& distance) {
      std::stable_sort(messages.begin(), messages.end(), [&](const Message& a, const Message& b) {
        return distance(a.rank) < distance(b.rank);
      });
    };
    by_distance(received_, [=](int rank) { return (self + ranks - rank) % ranks; });
    by_distance(sent_, [=](int rank) { return (rank + ranks - self) % ranks; });
    UnderWay::of_process().add(this);
  }
  ~Exchange() { UnderWay::of_process().remove(this); }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Blocks while sockets take bytes. The group's functions would go through torch's dispatcher, for
  // each message.
  void start() {
    for (const Message& message : received_) {
      std::vector<at::Tensor> part{message.tensor};
      keep(backend_->recv(part, message.rank, tag_));
    }
    for (const Message& message : sent_) {
      std::vector<at::Tensor> part{message.tensor};
      keep(backend_->send(part, message.rank, tag_));
    }
  }

  void wait() {
    for (const auto& work : works_) work->wait();
  }

  // Ends all waits.
  void abort() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& work : works_) work->abort();
  }

 private:
  void keep(c10::intrusive_ptr<c10d::Work> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    works_.push_back(std::move(work));
  }

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<Message> received_;
  std::vector<Message> sent_;
  int tag_;
  std::mutex mutex_;  // of what follows, until all have started
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

void UnderWay::abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Exchange* const exchange : exchanges_) exchange->abort();
}

class ExchangeInFlight final : public InFlight {
 public:
  ExchangeInFlight(std::shared_ptr<Exchange> exchange, std::shared_ptr<ExchangeThreads> threads)
      : exchange_(std::move(exchange)), threads_(std::move(threads)) {
    started_ = threads_->starter().submit([exchange = exchange_] {
      exchange->start();
      return false;
    });
  }

  // An exchange without a waiter must still receive its messages, or the next one would.
  ~ExchangeInFlight() override {
    if (!waited_) watch();
  }
  ExchangeInFlight(const ExchangeInFlight&) = delete;
  ExchangeInFlight& operator=(const ExchangeInFlight&) = delete;

  at::Tensor wait() override {
    waited_ = true;
    if (watched_) {
      watched_->wait();
    } else {
      started_->wait();
      exchange_->wait();
    }
    return {};
  }

  void on_done(std::function<void()> fn) override {
    watch();
    watched_->on_done(std::move(fn));
  }

  // Messages cannot be queried. Another thread waits for them, once the caller wants to know.
  bool is_done_within(std::chrono::milliseconds time) override {
    watch();
    return watched_->is_done_within(time);
  }

  bool can_be_asked() const override { return true; }

 private:
  void watch() {
    if (watched_) return;
    watched_ = threads_->waiter().submit([exchange = exchange_, started = started_] {
      started->wait();
      exchange->wait();
      return false;
    });
  }

  std::shared_ptr<Exchange> exchange_;
  std::shared_ptr<ExchangeThreads> threads_;
  std::shared_ptr<Ticket> started_;
  std::shared_ptr<Ticket> watched_;
  bool waited_ = false;
};

}  // namespace

void leave_pipelines(std::chrono::milliseconds timeout) {
  Worker::leave_all(timeout, [] { UnderWay::of_process().abort(); });
}

std::unique_ptr<InFlight> exchange_messages(const c10::intrusive_ptr<c10d::Backend>& backend,
                                            std::vector<Message> received,
                                            std::vector<Message> sent, int tag,
                                            std::shared_ptr<ExchangeThreads> threads) {
  return std::make_unique<ExchangeInFlight>(
      std::make_shared<Exchange>(backend, std::move(received), std::move(sent), tag),
      std::move(threads));
}

}  // namespace fastsync::comm
