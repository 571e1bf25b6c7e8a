// The machine: devices with streams, events and memory. Work is done at once, by the thread that enqueues it, and
// written down; what would have run at the same time on a real machine is for the reader of the log to find out.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "native/log.h"

namespace streams {

inline constexpr int kDevices = 16;
inline constexpr int kPoolStreams = 32;  // per device; then the pool starts over

struct Stream {
  int number = 0;  // in the log
  int device = 0;
  std::int64_t id = 0;  // c10::StreamId; 0 is the default stream
  std::string name;
};

struct Event {
  int device = -1;
  std::int64_t record = kNever;
};

struct Usage {
  std::int64_t now = 0, peak = 0, allocations = 0;
};

class Machine {
 public:
  Machine();

  const Stream& stream(int device, std::int64_t id);
  const Stream& pool_stream(int device);
  const Stream& new_stream(int device, const std::string& name);
  std::vector<Stream> streams();

  // Of the calling thread.
  static int current_device();
  static void set_current_device(int device);
  const Stream& current_stream(int device);
  void set_current_stream(const Stream& stream);

  void operation(const Stream& stream, std::string name, std::vector<Access> accesses,
                 std::vector<Message> messages = {});
  std::int64_t record(const Stream& stream);
  void block(const Stream& stream, std::int64_t record);
  void host_wait(const std::string& what, const std::vector<int>& streams);

  // Memory of a device, as a caching allocator of streams hands it out: what is freed goes to the next tensor of the
  // stream it was made for, at once; unless other streams were recorded on it, then only after `reset`. It is NaN.
  void* allocate(std::size_t bytes, int device);
  void free(void* pointer);
  void record_on_stream(const void* pointer, const Stream& stream);
  int device_of(const void* pointer);          // -1: no memory of a device
  std::set<int> owners(const Ranges& ranges);  // the devices of some bytes
  Usage usage(int device);
  void reset_usage();

  // All devices have come to rest and the host knows: empties the log and gives back what is free.
  void reset();

  std::atomic<std::uint64_t> capture = 0;  // the graph into which all streams are being captured, for the kernels

 private:
  struct Block {
    std::unique_ptr<std::byte[]> storage;
    std::uintptr_t begin = 0;
    std::size_t bytes = 0;  // rounded up; the next tensor in this block may need more than this one
    std::size_t wanted = 0;
    std::int64_t number = 0;
    int stream = 0;
    int device = 0;
    std::set<int> recorded;
    bool is_free = false, is_reusable = true;
  };
  const Stream& add_stream(int device, std::int64_t id, std::string name);
  Block* find(std::uintptr_t address);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::map<std::pair<int, std::int64_t>, Stream*> by_id_;
  int next_in_pool_[kDevices] = {};
  std::int64_t next_id_ = 1000, next_record_ = 0, next_block_ = 0;
  std::map<std::uintptr_t, Block> blocks_;  // by begin
  Usage usage_[kDevices];
};

Machine& machine();

}  // namespace streams
