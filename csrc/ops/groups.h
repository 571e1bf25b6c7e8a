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

namespace ringattn {

// What this process remembers of a group from call to call.
struct GroupState {
  explicit GroupState(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) : group(process_group) {}

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::atomic<std::int64_t> calls = 0;
  std::mutex busy;  // one caller at a time: two would receive each other's messages
};

// This process's place in a ring. A ring of one has no transport.
struct Ring {
  int rank = 0;
  int world_size = 1;
  std::unique_ptr<Transport> transport;
  std::shared_ptr<GroupState> state;  // null in a ring of one and for virtual ranks

  // The group of the name; "" is a ring of one. Raises ValueError if this process knows no such group.
  static Ring of_group(const std::string& name);
};

// The start of every call on a ring: runs `prepare`, which checks and allocates and fills the header, then shows the
// header to all ranks, before any payload moves. If `prepare` throws, the header says "refused" and the exception goes
// on; otherwise throws RingError if a rank refused or the headers differ. Holds the group for the life of the object.
class Agreement {
 public:
  Agreement(Ring& ring, Op op, const std::function<void(CallHeader&)>& prepare);

  // The number of this call on the group; 0 in a ring of one and for virtual ranks.
  std::int64_t call() const { return call_; }

 private:
  std::unique_lock<std::mutex> busy_;
  std::int64_t call_ = 0;
};

}  // namespace ringattn
