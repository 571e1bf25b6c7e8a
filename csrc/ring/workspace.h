// The memory that passes on one group use beside their inputs and results, kept from call to call.
//
// A pass takes its buffers before its loop and none inside it. Every purpose has one buffer per device, as large as the
// largest call so far needed: forward and backward, and calls of other shapes, use the same, since a group has one call
// at a time. So what is kept does not grow with the number of shapes or ranks.
//
// On devices with streams a call only enqueues its work, and the next call may come on another stream while that work
// still runs: it then waits, on the device, for the end of the last one. Transports finish with a buffer before the
// stream of the call goes on (Exchange::wait), so no third stream ever holds one. The allocator is told of every stream
// that uses a buffer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>

namespace ringattn {

// What a buffer is for. Forward's state and backward's sum for the queries have one size, and share it.
enum class Slot { block0, block1, gradient0, gradient1, gradient2, query_sum, rows0, rows1, rows2, count };

class Workspace {
 public:
  // Gives all memory back. No call may be using it.
  void release() {
    devices_.clear();
    captured_.clear();
  }

 private:
  friend class Lease;

  struct Buffers {
    std::uint64_t capture = 0;  // the graph whose memory they are
    std::array<at::Tensor, static_cast<std::size_t>(Slot::count)> bytes;
    std::optional<c10::Stream> last_stream;  // of the last call, if the device has streams
    std::optional<c10::Event> last_use;
  };

  std::unordered_map<at::Device, Buffers> devices_, captured_;
};

// The use of a workspace by one call, on the current stream of a device. Without a workspace (a ring of one, virtual
// ranks) every buffer is a new tensor. A graph's memory must be its own: while one is captured, the calls captured into
// it share buffers that no other call uses.
class Lease {
 public:
  Lease() = default;
  Lease(Workspace& workspace, at::Device device, std::uint64_t capture);
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease() { end(); }

  // Contiguous, with any content.
  at::Tensor empty(Slot slot, at::IntArrayRef sizes, const at::TensorOptions& options);

 private:
  void end() noexcept;

  Workspace::Buffers* buffers_ = nullptr;
  std::optional<c10::Stream> stream_;  // of the call, if the device has streams
};

}  // namespace ringattn
