// Groups: from the name that an operator is given to this process's place in a ring, and the call by which all ranks
// agree on what they are about to do.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "comm/transport.h"
#include "ring/workspace.h"

namespace ringattn {

// What this process remembers of a group from call to call.
struct GroupState {
  explicit GroupState(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) : group(process_group) {}

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  c10::intrusive_ptr<c10d::ProcessGroup> side;  // on which headers travel; null: on the group itself
  std::atomic<std::int64_t> calls = 0;
  bool connected = false;  // its connections for GPUs have been opened
  std::mutex busy;         // one caller at a time: two would receive each other's messages
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
// into a graph. A rank that refuses any other call leaves the others to their timeout.
//
// The first call with tensors on GPUs also opens the connections, by a hop in each direction, whether or not it has
// anything to exchange: all ranks must take part in that. It cannot be captured.
class Agreement {
 public:
  using Prepare = std::function<void(CallHeader& header, Lease& lease)>;

  Agreement(Ring& ring, const Call& call, const Prepare& prepare);

  // The number of this call on the group; 0 in a ring of one and for virtual ranks.
  std::int64_t call() const { return call_; }

 private:
  void show(Ring& ring, CallHeader& header, const std::exception_ptr& refusal);

  std::unique_lock<std::mutex> busy_;
  Lease lease_;
  std::int64_t call_ = 0;
};

}  // namespace ringattn
