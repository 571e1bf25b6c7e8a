// P virtual ranks in one process: threads that copy out of each other's buffers. For debugging, and for testing rings
// larger than the machine.
#pragma once

#include <memory>

#include "comm/transport.h"

namespace ringattn {

class LoopbackHub {
 public:
  explicit LoopbackHub(int world_size);
  ~LoopbackHub();

  // The transport of one virtual rank; used by one thread. The hub must outlive it.
  std::unique_ptr<Transport> transport(int rank);

  // Ends every wait, now and later, with a RingError: a virtual rank has failed and the others must not wait for it.
  void abort(const std::string& reason);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace ringattn
