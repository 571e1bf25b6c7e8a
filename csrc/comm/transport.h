// Transport: how the ranks of one ring exchange tensors. The ring loops know nothing else about communication.
//
// An exchange is a set of sends and receives posted together and waited for together, so that no order of ranks can
// deadlock. Both sides must agree on the bytes of every message beforehand: the headers see to that.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/header.h"

namespace ringattn {

// A contiguous tensor and the rank it goes to or comes from. Messages between the same two ranks pair up in order.
struct Message {
  at::Tensor tensor;
  int peer = 0;
};

// Where in a call an exchange is, for the words of errors and warnings.
struct Stage {
  const char* name = "";  // as in "hop" or "comparing calls"
  int hop = -1;           // from 0, if it is one of a pass
  int hops = 0;
  std::vector<int> awaited = {};  // ranks of which something must still come, if only by way of others

  std::string text() const;  // "hop 1 of 3"
};

// An exchange under way. The tensors are kept alive and must not be written (sends) or touched (receives) before
// wait() returns. One that is destroyed without having been waited for has failed: what is in flight is ended first.
//
// On devices with streams all of this is about the stream that is current in post() and wait(), which must be the same:
// an exchange begins when that stream has come as far as post(), and what is enqueued after wait() begins when the
// exchange is over. The host waits for nothing that the device has still to do.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual void wait() = 0;  // throws RingError, or what Host::check_interrupt throws
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Why tensors of this device cannot travel; empty if they can.
  virtual std::string obstacle(at::Device device) const = 0;

  // Empty messages are not sent. Throws RingError.
  virtual std::unique_ptr<Exchange> post(std::vector<Message> sends, std::vector<Message> receives,
                                         const Stage& stage) = 0;

  // After a failure: ends all connections of this rank, so that those who wait for it fail as well.
  virtual void close() noexcept {}
};

// Shows this rank's header to all ranks and returns the headers of all, by rank. They travel in the host's memory.
std::vector<CallHeader> exchange_headers(Transport& transport, const CallHeader& own);

}  // namespace ringattn
