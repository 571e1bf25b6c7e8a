// Shared memory of one block with a shadow: which bytes were written, by whom and when (data races), which wait for an
// asynchronous copy, and which the async proxy does not see yet.
//
// Races are found with vector clocks (clocks.h): between warps, and where a lane reads what another one of its warp
// wrote.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "clocks.h"

namespace emulator {

enum class Pending : uint8_t { none, cp_async, bulk };

class SharedMemory {
 public:
  void reset(uint32_t base, int64_t bytes, Clocks& clocks, bool check_races);

  uint32_t base() const { return base_; }
  int64_t bytes() const { return static_cast<int64_t>(data_.size()); }
  uint8_t* raw(uint32_t address) { return data_.data() + (address - base_); }

  // Checked accesses of an actor's lane.
  uint8_t* read(int actor, uint32_t address, int bytes, int lane) {
    const uint32_t at = bounds(address, bytes, "read", lane);
    check_read(actor, at, bytes, lane);
    check_lanes(actor, at, bytes, lane);
    return data_.data() + at;
  }
  uint8_t* write(int actor, uint32_t address, int bytes, int lane) {
    const uint32_t at = bounds(address, bytes, "write", lane);
    check_write(actor, at, bytes, lane, Write::weak);
    return data_.data() + at;
  }
  // Strong ones (volatile, relaxed, ...) do not race with each other; a read hears what the writes of its address know.
  uint8_t* strong_read(int actor, uint32_t address, int bytes, int lane);
  uint8_t* strong_write(int actor, uint32_t address, int bytes, int lane);
  // Atomics order what they touch among themselves.
  uint8_t* atomic(int actor, uint32_t address, int bytes, int lane);
  uint32_t bounds(uint32_t address, int64_t bytes, const char* what, int lane) const;

  // Copies in flight: the destination is nobody's until it has landed.
  void begin_copy(int actor, uint32_t address, int bytes, Pending kind, int lane);
  void land(int actor, uint32_t address, int bytes, const uint8_t* from);  // null: only the books, the bytes are there
  void poison(uint32_t address, int bytes);

  // Reads by the async proxy; a Fault if a generic write was not fenced.
  uint8_t* async_read(int actor, uint32_t address, int bytes);
  void hold(uint32_t address, int bytes, int change);  // +1: an asynchronous read is in flight, nobody may write; -1
  void fence_proxy(int actor);  // generic writes that the actor has heard of become visible to the async proxy

  bool checks_races() const { return check_races_; }

 private:
  void check_lanes(int actor, uint32_t at, int bytes, int lane) const;
  void check_read(int actor, uint32_t at, int bytes, int lane);
  enum class Write : uint8_t { weak, strong, atomic };
  void check_write(int actor, uint32_t at, int bytes, int lane, Write kind);
  uint32_t new_row();
  [[noreturn]] void race(const char* what, int actor, uint32_t at, uint32_t epoch, int lane) const;
  std::string actor_name(int actor) const;
  uint32_t epoch(int actor) const { return static_cast<uint32_t>(actor) << 24 | clocks_->now(actor); }
  bool heard(int actor, uint32_t epoch) const {
    return clocks_->heard(actor, static_cast<int>(epoch >> 24), epoch & 0xffffff);
  }

  uint32_t base_ = 1024;
  bool check_races_ = true;
  int actors_ = 0;
  std::vector<uint8_t> data_;
  std::vector<uint8_t> state_;    // bit 0 written, bit 1 generic write not fenced, bits 2-3 Pending, 4 strong write
  std::vector<uint16_t> owner_;   // thread of the last write
  std::vector<uint32_t> writes_;  // epoch of the last write, 0 none
  std::vector<uint32_t> reads_;   // epoch of the last read, 0 none; kMany + n: the n-th row of many_
  std::vector<uint32_t> many_;    // rows of one epoch per actor
  std::vector<uint32_t> free_rows_;
  std::map<uint32_t, Clock> atomics_;
  Clocks* clocks_ = nullptr;
  std::vector<uint16_t> held_;                           // asynchronous reads in flight
  std::vector<std::pair<uint32_t, uint32_t>> unfenced_;  // bytes that some generic write touched since the last fence
};

}  // namespace emulator
