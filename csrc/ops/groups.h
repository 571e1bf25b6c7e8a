// Groups: from the name that an operator is given to this process's place in a ring, and the call by which all ranks
// agree on what they are about to do.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "comm/reports.h"
#include "comm/transport.h"
#include "core/error.h"
#include "ring/workspace.h"

namespace ringattn {

// As a mutex that is only tried, which a thread may also do that has it: a handler of signals, in the middle of a call.
class Busy {
 public:
  bool try_lock() { return !taken_.exchange(true, std::memory_order_acquire); }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_ = false;
};

// What this process remembers of a group from call to call.
struct GroupState {
  GroupState(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group, int made_by, bool is_first);

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  const std::int64_t generation;                // of the groups of this process no other has it
  const int process;                            // a child that is forked from it cannot use the group
  std::mutex for_side;                          // guards:
  c10::intrusive_ptr<c10d::ProcessGroup> side;  // on which headers travel; null: on the group itself
  std::atomic<std::int64_t> calls = 0;
  const std::shared_ptr<Life> life;
  bool agreed = false;               // the ranks have compared a call and found nothing wrong
  bool unsettled = false;            // this rank has refused a call, and the others have not heard of it
  bool connected = false;            // its connections for GPUs have been opened
  std::optional<RingError> failure;  // the first, since which the group is broken
  Busy busy;                         // one caller at a time: two would receive each other's messages
  Workspace workspace;
};

// What an operator is about to do on a ring.
struct Call {
  Op op;
  at::Device payload;         // where its tensors are
  std::uint64_t capture = 0;  // the graph that is being captured there or on the current device; 0: none
};

// This process's place in a ring. A ring of one has no transport.
struct Ring {
  std::string name;  // of the group
  int rank = 0;
  int world_size = 1;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Transport> header_transport;  // null: headers take `transport`
  bool carries_accelerators = false;            // tensors on GPUs can travel
  std::shared_ptr<GroupState> state;            // null in a ring of one and for virtual ranks

  // The group of the name; "" is a ring of one. Raises ValueError if this process knows no such group.
  static Ring of_group(const std::string& name);

  // The buffers for a call that Agreement has begun.
  Lease lease(const Call& call) const;
};

Call call_on(const Ring& ring, Op op, at::Device payload);

// What tells a group from others of this process that have or had its name; 0 in a ring of one and for virtual ranks.
std::int64_t generation_of(const Ring& ring);

// Throws RingError if a pass began on another group than that which now has its name.
void check_generation(const Ring& ring, std::int64_t generation);

// The same for the group of a call with such a mark; the number of the call.
std::int64_t check_mark(const Ring& ring, std::int64_t mark);

// Raises ValueError if the group cannot carry tensors of a device; `name` is the argument that is to blame.
void check_carrier(const Ring& ring, const char* name, at::Device device);

// Whether headers of a group have no way to travel, and use_side_group must be told one.
bool lacks_side_group(const std::string& name);

// A group of the same ranks in the same order with a backend for the CPU, which from now on lives as long as the group.
// Raises ValueError if it is not such a one.
void use_side_group(const std::string& name, const std::string& side);

// The start of every call on a ring: runs `prepare`, which checks, takes buffers and fills the header, then shows the
// header to all ranks, before any payload moves. If `prepare` throws, the header says "refused" and the exception goes
// on; otherwise throws RingError if a rank refused or the headers differ. Holds the group, and what `prepare` took of
// its workspace, for the life of the object.
//
// Calls with tensors on the CPU all do so. Where they are on GPUs, whose hosts should not wait for each other, calls
// number 1, 2, 4, 8, … of the group do: by number, so that all ranks do it at the same calls; and none that is captured
// into a graph. RINGATTN_CHECK has all calls compared, or none once the ranks have agreed on one. A rank that refuses a
// call that is not compared compares its next one: if all have refused they go on, else the others are left to their
// timeout.
//
// A failure in the comparison or in the payload breaks the group for good: part of a call's messages may be under way.
// The rank then leaves a report for the others, closes its connections, so that whoever waits for it fails too, and
// raises; so does every later call on the group, at once and with the first cause. A disagreement or a refusal leaves
// the group as it was; only ranks that have lost count of calls that are not all compared cannot go on, since what they
// have enqueued does not pair up.
//
// The first call with tensors on GPUs also opens the connections, by a hop in each direction, whether or not it has
// anything to exchange: all ranks must take part in that. It cannot be captured.
class Agreement {
 public:
  using Prepare = std::function<void(CallHeader& header, Lease& lease)>;

  Agreement(Ring& ring, const Call& call, const Prepare& prepare);

  // What tells this call from all others of this process, for check_mark; 0 in a ring of one and for virtual ranks.
  std::int64_t mark() const;

  // Runs what moves the payload.
  template <typename Function>
  auto carry_out(const Function& function) {
    try {
      return function();
    } catch (...) {
      fail(std::current_exception());
    }
  }

 private:
  Reports reports() const;
  bool is_compared(const Call& call, bool on_gpus) const;
  void show(CallHeader& header, bool on_gpus, const std::exception_ptr& refusal);
  [[noreturn]] void fail(const std::exception_ptr& error);
  RingError explain(const RingError& own) const;

  Ring& ring_;
  Op op_;
  std::uint64_t capture_;

  std::unique_lock<Busy> busy_;
  Lease lease_;
  std::int64_t call_ = 0;
};

}  // namespace ringattn
