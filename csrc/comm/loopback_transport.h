// P virtual ranks in one process: threads that copy out of each other's buffers. For debugging, and for testing rings
// larger than the machine.
#pragma once

#include <c10/core/Stream.h>

#include <memory>

#include "comm/transport.h"
#include "core/kernels.h"

namespace ringattn {

// How copies on a device with streams are slowed down to the speed of a link: KernelTable::pace, or null for not at
// all.
struct Pacing {
  decltype(KernelTable::pace) pace = nullptr;
  double gigabytes_per_second = 0;
};

// Streams for virtual ranks on a device, always the same, since an allocator keeps memory for each: rank r computes on
// number 2r and copies on number 2r + 1.
c10::Stream virtual_stream(at::Device device, int number);

class LoopbackHub {
 public:
  explicit LoopbackHub(int world_size, Pacing pacing = {});
  ~LoopbackHub();

  // The transport of one virtual rank; used by one thread, on one device. The hub must outlive it.
  std::unique_ptr<Transport> transport(int rank);

  // Ends every wait, now and later, with a RingError: a virtual rank has failed and the others must not wait for it.
  void abort(const std::string& reason);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace ringattn
