// Exchanges in the host's memory, by work that can only be waited for.
//
// gloo's work cannot be asked whether it is over, and a wait that ends early closes every connection of the group. So
// background threads wait, one for each peer, and the caller's watches the time, the user and the group.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/reports.h"
#include "comm/transport.h"
#include "core/error.h"

namespace ringattn {

// The group for which messages travel, which may be another than the one that carries them: its name, by which the
// process knows it while it is not destroyed, and what its ranks report.
struct Owner {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  std::string name;
  Reports reports;
};

struct Pending {
  c10::intrusive_ptr<c10d::Work> work;
  std::string what;  // "send to rank 2"
  int peer = -1;     // none: all of a coalesced exchange
};

// How long a peer may take over a message; how long the backend is told to wait for it, which is longer where the
// caller can end that; what throws if the connection to a peer is closed, which may be null; and whether it can be
// asked about ranks to which there may be no message yet. gloo forgets to say that a connection is closed to who waits
// for a message of which a part has moved.
struct Patience {
  std::chrono::milliseconds timeout, of_backend;
  std::function<void(int peer)> probe;
  bool probes_all = false;
};

// Who waits, and in what.
struct Waiter {
  int rank = -1;
  Stage stage;

  RingError failure(int peer, const std::string& what, const std::string& reason, bool silent = false) const;
};

std::string text_of(const std::exception& error);

// Has begun.
std::unique_ptr<Exchange> host_exchange(Waiter waiter, Owner owner, Patience patience, std::vector<Pending> pending,
                                        std::vector<at::Tensor> tensors);

}  // namespace ringattn
