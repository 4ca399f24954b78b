// Transitions of a flat buffer between ranks, over any c10d process group.
//
// No code outside of this folder and the bindings touches c10d. Its headers stay in .cpp files:
// they cost every file that includes them ten seconds of compilation.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../ops/pool.h"
#include "communicator.h"
#include "in_flight.h"

namespace fastsync::comm {

// A contiguous tensor that goes to a rank, or is to come from it.
struct Message {
  int rank = 0;
  at::Tensor tensor;
};

// So many elements, from a rank.
struct Expected {
  int rank = 0;
  int64_t numel = 0;
};

// Sends a rank's tensor as a dense one.
using SendDense = std::function<std::unique_ptr<InFlight>()>;

class Collective {
 public:
  virtual ~Collective() = default;
  // The process group registered with c10d under `group_name`. Throws when there is none.
  static std::unique_ptr<Collective> resolve(const std::string& group_name);

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // How many of so many bytes for others leave this rank.
  virtual int64_t leaving(int64_t bytes) const { return bytes; }
  // How many collectives of tensors on `device` it pays to have under way: Gloo has two threads. On
  // a stream the next one is enqueued while the first runs, and each more would keep its buffers.
  virtual size_t at_a_time(at::Device device) const { return device.is_cpu() ? 2 : 1; }
  // The host can wait for collectives of devices, too, where it would only have streams wait: each
  // for so long at most. See [Note: waiting for a device].
  virtual void let_host_wait(std::chrono::milliseconds /*timeout*/) {}
  // Returns what carries tensors on `device` here. It does not keep the group alive.
  virtual Communicator communicator(at::Device /*device*/) const { return {}; }
  // Collectives that start from now on belong to this step, which errors name where another rank
  // starts something else.
  virtual void begin_step(int64_t /*number*/) {}
  // A buffer of zeros in the memory that collectives start from.
  virtual at::Tensor make_flat(int64_t numel, at::ScalarType dtype, at::Device device);

  // Sum over ranks, in place. Averages are sums of gradients that were scaled before: a result
  // never overflows where the average is finite, and every rank issues the same operation whether
  // it had something to pack or not.
  virtual std::unique_ptr<InFlight> all_reduce(const at::Tensor& flat) = 0;
  // The same for coalesced sparse tensors, where the backend can (Gloo): their sum is what wait()
  // returns. `rows`: undefined if this rank's tensor is dense. Then `dense` sends it, and Gloo has
  // all ranks call theirs; other backends need tensors of one layout on all ranks.
  virtual std::unique_ptr<InFlight> all_reduce_rows(const at::Tensor& rows, SendDense dense,
                                                    at::Device /*device*/) {
    return rows.defined() ? all_reduce(rows) : dense();
  }
  // The same, and the sum of the squares of the first `squared` elements of the result, in parts:
  // fp64, in `squares`, of make_squares(flat). No rank reads for that what it would not read
  // anyway.
  virtual std::unique_ptr<InFlight> all_reduce_and_square(const at::Tensor& flat,
                                                          const at::Tensor& squares,
                                                          int64_t squared);
  // Undefined where there is no such thing.
  virtual at::Tensor make_squares(const at::Tensor& /*flat*/) { return {}; }

  // Chunk r of `sent`, one of size() equal parts, goes to rank r; chunk r of `received` came from
  // it.
  virtual std::unique_ptr<InFlight> all_to_all(const at::Tensor& received,
                                               const at::Tensor& sent) = 0;
  // The same without a rank's own part: the i-th of size() - 1 equal ones is for the i-th of the
  // other ranks. `sent` is a buffer of `pool`, and goes back there. What arrives lies in the
  // others' memory where this rank can read that, else in another.
  virtual std::shared_ptr<Incoming> all_to_others(const at::Tensor& sent,
                                                  const std::shared_ptr<ops::BufferPool>& pool) = 0;
  // Part r of `gathered` becomes rank r's `mine`, which may be that part's memory.
  virtual std::unique_ptr<InFlight> all_gather(const at::Tensor& gathered,
                                               const at::Tensor& mine) = 0;
  // `mine` becomes the sum over ranks of part rank() of `all`.
  virtual std::unique_ptr<InFlight> reduce_scatter(const at::Tensor& mine,
                                                   const at::Tensor& all) = 0;

  // Whether tensors on `device` can travel as messages of any sizes, which need not lie in one
  // buffer (Gloo).
  virtual bool has_messages(at::Device device) const = 0;
  // The messages between two ranks arrive in the order in which both name them, and none by itself.
  // Each message that is sent is received, under the same tag: exchanges of different tags that
  // ranks start in different orders wait for each other instead of taking each other's bytes.
  virtual std::unique_ptr<InFlight> exchange(std::vector<Message> received,
                                             std::vector<Message> sent, int tag) = 0;
  // The same, where this rank reads what comes in memory of the others: parts as `expected` says,
  // each a rank's messages side by side. This rank may be one of them. What is sent has been copied
  // by the time that this returns. Null, and nothing is sent, where messages travel otherwise,
  // which is the same on all ranks.
  virtual std::shared_ptr<Incoming> borrow(const std::vector<Expected>& /*expected*/,
                                           at::ScalarType /*dtype*/,
                                           const std::vector<Message>& /*sent*/, int /*tag*/) {
    return nullptr;
  }
  // Frees memory that exchanges have used and that is not read any more.
  virtual void trim() {}
};

// The same of the process group registered with c10d under `group_name`.
Communicator communicator_of(const std::string& group_name, at::Device device);

// The collectives of coded buckets' stages.
struct LinkKinds {
  bool all_to_all = true;
  bool reduce_scatter = false;  // of floats; the others are of bytes
};
// Runs each, and an all-gather, with a few bytes. Throws what the backend throws, after the
// collective's name.
void probe_links(Collective& group, at::Device device, LinkKinds kinds);

// See [Note: the end of a process] in worker.h: aborts the exchanges that are under way, and has
// all workers left.
void leave_pipelines(std::chrono::milliseconds timeout);

}  // namespace fastsync::comm
