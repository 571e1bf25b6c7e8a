#include "native/machine.h"

#include <cstring>
#include <stdexcept>

namespace streams {
namespace {

constexpr std::size_t kRound = 512;
constexpr int kNaNByte = 0xff;  // NaN in every floating-point type

thread_local int current = 0;
thread_local const Stream* current_streams[kDevices] = {};

}  // namespace

Machine& machine() {
  static Machine* const one = new Machine;  // never destroyed, as the log
  return *one;
}

Machine::Machine() {
  for (int device = 0; device < kDevices; ++device) {
    add_stream(device, 0, "default");
    for (int i = 1; i <= kPoolStreams; ++i) add_stream(device, i, "pool " + std::to_string(i));
  }
}

const Stream& Machine::add_stream(int device, std::int64_t id, std::string name) {
  const int number = static_cast<int>(streams_.size());
  name = std::to_string(device) + ":" + name;
  streams_.push_back(std::make_unique<Stream>(Stream{number, device, id, std::move(name)}));
  by_id_[{device, id}] = streams_.back().get();
  return *streams_.back();
}

const Stream& Machine::stream(int device, std::int64_t id) {
  const std::lock_guard lock(mutex_);
  return *by_id_.at({device, id});
}

const Stream& Machine::pool_stream(int device) {
  const std::lock_guard lock(mutex_);
  return *by_id_.at({device, 1 + next_in_pool_[device]++ % kPoolStreams});
}

const Stream& Machine::new_stream(int device, const std::string& name) {
  const std::lock_guard lock(mutex_);
  return add_stream(device, next_id_++, name);
}

std::vector<Stream> Machine::streams() {
  const std::lock_guard lock(mutex_);
  std::vector<Stream> all;
  for (const auto& stream : streams_) all.push_back(*stream);
  return all;
}

int Machine::current_device() { return current; }

void Machine::set_current_device(int device) {
  if (device < 0 || device >= kDevices) throw std::out_of_range("no device " + std::to_string(device));
  current = device;
}

const Stream& Machine::current_stream(int device) {
  const Stream* stream = current_streams[device];
  return stream != nullptr ? *stream : this->stream(device, 0);
}

void Machine::set_current_stream(const Stream& stream) { current_streams[stream.device] = &stream; }

void Machine::operation(const Stream& stream, std::string name, std::vector<Access> accesses,
                        std::vector<Message> messages) {
  for (const Access& access : accesses) {
    for (const int owner : owners(access.ranges)) {
      if (owner != stream.device) {
        log().complain(name + " on stream " + stream.name + ": " + access.name + " lies on device " +
                       std::to_string(owner));
      }
    }
  }
  log().add({.kind = "operation",
             .name = std::move(name),
             .stream = stream.number,
             .accesses = std::move(accesses),
             .messages = std::move(messages)});
}

std::int64_t Machine::record(const Stream& stream) {
  std::int64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = next_record_++;
  }
  log().add({.kind = "record", .stream = stream.number, .number = number});
  return number;
}

void Machine::block(const Stream& stream, std::int64_t record) {
  log().add({.kind = "block", .stream = stream.number, .number = record});
}

void Machine::host_wait(const std::string& what, const std::vector<int>& streams) {
  log().add({.kind = "host_wait", .name = what, .streams = streams});
}

void* Machine::allocate(std::size_t bytes, int device) {
  if (bytes == 0) return nullptr;
  const Stream& stream = current_stream(device);
  const std::lock_guard lock(mutex_);
  const std::size_t rounded = (bytes + kRound - 1) / kRound * kRound;
  Block* chosen = nullptr;
  for (auto& [begin, block] : blocks_) {
    const bool fits = block.is_free && block.is_reusable && block.stream == stream.number && block.bytes >= rounded &&
                      block.bytes <= 2 * rounded;
    if (fits && (chosen == nullptr || block.bytes < chosen->bytes)) chosen = &block;
  }
  if (chosen == nullptr) {
    Block block;
    block.storage = std::make_unique<std::byte[]>(rounded + kRound);
    block.begin = (reinterpret_cast<std::uintptr_t>(block.storage.get()) + kRound - 1) / kRound * kRound;
    block.bytes = rounded;
    block.stream = stream.number;
    block.device = device;
    const std::uintptr_t begin = block.begin;
    chosen = &blocks_.emplace(begin, std::move(block)).first->second;
  }
  chosen->is_free = false;
  chosen->wanted = bytes;
  chosen->number = next_block_++;
  std::memset(reinterpret_cast<void*>(chosen->begin), kNaNByte, chosen->bytes);
  Usage& usage = usage_[device];
  usage.now += static_cast<std::int64_t>(bytes);
  usage.peak = std::max(usage.peak, usage.now);
  ++usage.allocations;
  log().add({.kind = "allocate",
             .stream = stream.number,
             .number = chosen->number,
             .accesses = {{"block", true, {{chosen->begin, chosen->begin + bytes}}}}});
  return reinterpret_cast<void*>(chosen->begin);
}

void Machine::free(void* pointer) {
  if (pointer == nullptr) return;
  const std::lock_guard lock(mutex_);
  Block& block = blocks_.at(reinterpret_cast<std::uintptr_t>(pointer));
  log().add({.kind = "free",
             .stream = block.stream,
             .number = block.number,
             .streams = {block.recorded.begin(), block.recorded.end()},
             .accesses = {{"block", true, {{block.begin, block.begin + block.wanted}}}}});
  usage_[block.device].now -= static_cast<std::int64_t>(block.wanted);
  block.is_free = true;
  block.is_reusable = block.recorded.empty();
}

Machine::Block* Machine::find(std::uintptr_t address) {
  auto next = blocks_.upper_bound(address);
  if (next == blocks_.begin()) return nullptr;
  Block& block = std::prev(next)->second;
  return address < block.begin + block.bytes ? &block : nullptr;
}

void Machine::record_on_stream(const void* pointer, const Stream& stream) {
  const std::lock_guard lock(mutex_);
  Block* block = find(reinterpret_cast<std::uintptr_t>(pointer));
  if (block != nullptr && block->stream != stream.number) block->recorded.insert(stream.number);
}

int Machine::device_of(const void* pointer) {
  const std::lock_guard lock(mutex_);
  const Block* block = find(reinterpret_cast<std::uintptr_t>(pointer));
  return block != nullptr ? block->device : -1;
}

std::set<int> Machine::owners(const Ranges& ranges) {
  const std::lock_guard lock(mutex_);
  std::set<int> found;
  for (const auto& [begin, end] : ranges) {
    const Block* block = find(begin);
    // -1: memory of the host, freed memory, or an overrun.
    found.insert(block != nullptr && !block->is_free && end <= block->begin + block->wanted ? block->device : -1);
  }
  return found;
}

Usage Machine::usage(int device) {
  const std::lock_guard lock(mutex_);
  return usage_[device];
}

void Machine::reset_usage() {
  const std::lock_guard lock(mutex_);
  for (Usage& usage : usage_) usage = {.now = usage.now, .peak = usage.now};
}

void Machine::reset() {
  const std::lock_guard lock(mutex_);
  std::erase_if(blocks_, [](const auto& item) { return item.second.is_free; });
  for (auto& [begin, block] : blocks_) block.recorded.clear();
  log().clear();
}

}  // namespace streams
