// The table through which the ring reaches the block kernels of a device.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "core/block_args.h"

namespace ringattn {

// Runs task(0) … task(count - 1), in any order and on any threads, and returns when all are done.
using ParallelFor = std::function<void(std::int64_t count, const std::function<void(std::int64_t)>& task)>;

// Where a kernel runs: the threads a CPU may use, or the stream of a GPU, which is current on the calling thread.
struct Launch {
  ParallelFor parallel;
  void* stream = nullptr;
};

// What keeps a device from running kernels on given tensors.
struct Obstacle {
  enum class Kind { none, device, dtype, head_dim } kind = Kind::none;
  std::string text;  // names the device and says what it takes, as in "NVIDIA A100 (cuda:0) takes …"
};

struct KernelTable {
  // The tokens of a key tile in forward. A pass cut into calls on tile boundaries gives the bits of one call.
  std::int32_t (*key_tile)(DType dtype, std::int64_t head_dim);

  void (*forward)(const BlockArgs&, const Launch&);   // absorbs one block of keys and values into the state
  void (*finalize)(const BlockArgs&, const Launch&);  // (o, m, l) -> out, lse
  void (*merge)(const BlockArgs&, const Launch&);     // (o, m, l) absorbs (other_o, other_m, other_l)
  void (*delta)(const BlockArgs&, const Launch&);     // out, grad_out, grad_lse -> delta
  void (*backward)(const BlockArgs&, const Launch&);  // adds to grad_query, grad_key, grad_value

  // Whether the device of that index has kernels for these. Null: it has them for every DType and head_dim.
  Obstacle (*obstacle)(DType dtype, std::int64_t head_dim, int device_index) = nullptr;

  // The number, not 0, of the graph into which what is launched on this stream is being captured; 0 if it runs. Null:
  // the device has no streams; then the mask's document bounds are read where the host has them, and backward reads no
  // minus_lse_log2 and minus_delta.
  std::uint64_t (*capture)(void* stream) = nullptr;
  bool has_streams() const { return capture != nullptr; }

  // Holds a stream back until `nanoseconds` have passed since pace(start, 0, stream) was reached; start is of the
  // device. Null: the device cannot.
  void (*pace)(std::int64_t* start, std::int64_t nanoseconds, void* stream) = nullptr;
};

// The tables of devices other than the CPU, by the number of their c10::DeviceType. A table is registered once, when
// the library with its kernels is loaded, and stays. Null: this process has none.
void register_kernels(int device_type, const KernelTable* table);
const KernelTable* find_kernels(int device_type);

}  // namespace ringattn
