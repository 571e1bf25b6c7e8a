// The checks of shared memory; shared.h says what they find.
#include "shared.h"

#include <algorithm>
#include <cstring>

#include "memory.h"

namespace emulator {

namespace {
constexpr uint32_t kMany = 0x80000000;  // above every epoch
constexpr uint8_t kWritten = 1, kUnfenced = 2, kPendingShift = 2, kPendingMask = 3 << kPendingShift, kStrong = 16;
constexpr uint8_t kPoison = 0xff;  // a NaN in every float format
}  // namespace

void SharedMemory::reset(uint32_t base, int64_t bytes, Clocks& clocks, bool check_races) {
  base_ = base;
  check_races_ = check_races;
  clocks_ = &clocks;
  actors_ = clocks.actors();
  data_.assign(bytes, kPoison);
  state_.assign(bytes, 0);
  owner_.assign(bytes, 0);
  held_.assign(bytes, 0);
  unfenced_.clear();
  writes_.assign(check_races ? bytes : 0, 0);
  reads_.assign(check_races ? bytes : 0, 0);
  many_.clear();
  free_rows_.clear();
  atomics_.clear();
}

std::string SharedMemory::actor_name(int actor) const {
  return actor >= actors_ - 1 ? "an asynchronous copy" : "warp " + std::to_string(actor);
}

uint32_t SharedMemory::bounds(uint32_t address, int64_t bytes, const char* what, int lane) const {
  const uint32_t at = address - base_;
  if (static_cast<uint64_t>(at) + bytes > data_.size() || address < base_)
    throw Fault("out of bounds: shared " + std::string(what) + " of " + std::to_string(bytes) + " bytes at " +
                    hex(address) + ", byte " + std::to_string(static_cast<int64_t>(address) - base_) + " of " +
                    std::to_string(data_.size()),
                1u << lane);
  return at;
}

void SharedMemory::race(const char* what, int actor, uint32_t at, uint32_t epoch, int lane) const {
  throw Fault("data race: " + actor_name(actor) + " " + what + " of " + actor_name(static_cast<int>(epoch >> 24)) +
                  " without a barrier between them, at shared byte " + std::to_string(at),
              1u << lane);
}

void SharedMemory::check_lanes(int actor, uint32_t at, int bytes, int lane) const {
  if (!check_races_) return;
  const auto thread = static_cast<uint16_t>(actor * 32 + lane);
  for (int i = 0; i < bytes; ++i) {
    const uint32_t written = writes_[at + i];
    if (owner_[at + i] == thread || (written >> 24) != static_cast<uint32_t>(actor) || !written) continue;
    if (state_[at + i] & kStrong || clocks_->met_since(actor, lane, written & 0xffffff)) continue;
    throw Fault("data race: lane " + std::to_string(lane) + " reads what lane " + std::to_string(owner_[at + i] % 32) +
                    " of its warp wrote without a __syncwarp between them, at shared byte " + std::to_string(at + i),
                1u << lane);
  }
}

void SharedMemory::check_read(int actor, uint32_t at, int bytes, int lane) {
  for (int i = 0; i < bytes; ++i) {
    const uint8_t state = state_[at + i];
    if (state & kPendingMask) {
      const bool bulk = (state & kPendingMask) >> kPendingShift == static_cast<int>(Pending::bulk);
      throw Fault(std::string(bulk ? "cp.async.bulk: read of shared memory before the mbarrier wait of its copy"
                                   : "cp.async: read of shared memory before the wait for its copy") +
                      ", at shared byte " + std::to_string(at + i),
                  1u << lane);
    }
    if (!(state & kWritten))
      throw Fault("unwritten: read of shared memory that nobody wrote, at shared byte " + std::to_string(at + i),
                  1u << lane);
  }
  if (!check_races_) return;
  const uint32_t now = epoch(actor);
  uint32_t known = 0;
  for (int i = 0; i < bytes; ++i) {
    const uint32_t written = writes_[at + i];
    if (written != known && !heard(actor, written)) race("reads what is a write", actor, at + i, written, lane);
    known = written;
    uint32_t& last = reads_[at + i];
    if (last & kMany) {
      many_[(last & ~kMany) * actors_ + actor] = now;
    } else if (last == 0 || (last >> 24) == static_cast<uint32_t>(actor) || heard(actor, last)) {
      last = now;
    } else {
      const uint32_t row = new_row();
      many_[row * actors_ + (last >> 24)] = last;
      many_[row * actors_ + actor] = now;
      last = kMany | row;
    }
  }
}

uint32_t SharedMemory::new_row() {
  if (free_rows_.empty()) {
    many_.resize(many_.size() + actors_);
    return static_cast<uint32_t>(many_.size()) / actors_ - 1;
  }
  const uint32_t row = free_rows_.back();
  free_rows_.pop_back();
  std::fill_n(many_.begin() + row * actors_, actors_, 0);
  return row;
}

void SharedMemory::check_write(int actor, uint32_t at, int bytes, int lane, Write kind) {
  const uint32_t now = check_races_ ? epoch(actor) : 0;
  const auto thread = static_cast<uint16_t>(actor * 32 + lane);
  bool was_fenced = false;
  for (int i = 0; i < bytes; ++i) {
    uint8_t& state = state_[at + i];
    if (state & kPendingMask)
      throw Fault(
          "cp.async: write to shared memory while a copy to it is in flight, at shared byte " + std::to_string(at + i),
          1u << lane);
    if (held_[at + i])
      throw Fault(
          "async proxy: write to shared memory that wgmma or a bulk store still reads, before its wait_group, "
          "at shared byte " +
              std::to_string(at + i),
          1u << lane);
    was_fenced |= !(state & kUnfenced) || owner_[at + i] != thread;
    const bool both_strong = kind != Write::weak && state & kStrong;
    state = static_cast<uint8_t>((state & ~kStrong) | kWritten | kUnfenced | (kind != Write::weak ? kStrong : 0));
    owner_[at + i] = thread;
    if (!check_races_) continue;
    if (!both_strong && !heard(actor, writes_[at + i]))
      race("overwrites a write", actor, at + i, writes_[at + i], lane);
    writes_[at + i] = now;
    if (kind == Write::strong) continue;  // who reads may be strong too
    uint32_t& last = reads_[at + i];
    if (last & kMany) {
      const uint32_t row = last & ~kMany;
      for (int k = 0; k < actors_; ++k)
        if (const uint32_t read = many_[row * actors_ + k]; read && !heard(actor, read))
          race("overwrites what is a read", actor, at + i, read, lane);
      free_rows_.push_back(row);
      last = 0;
    } else if (last && !heard(actor, last)) {
      race("overwrites what is a read", actor, at + i, last, lane);
    } else {
      last = 0;
    }
  }
  clocks_->wrote(actor);
  if (!was_fenced) return;
  if (unfenced_.size() > data_.size() / 8)
    unfenced_ = {{0, static_cast<uint32_t>(data_.size())}};
  else
    unfenced_.emplace_back(at, static_cast<uint32_t>(bytes));
}

uint8_t* SharedMemory::strong_read(int actor, uint32_t address, int bytes, int lane) {
  const uint32_t at = bounds(address, bytes, "read", lane);
  if (auto order = atomics_.find(at); order != atomics_.end()) join((*clocks_)[actor], order->second);
  clocks_->meet(actor, 1u << lane);
  check_read(actor, at, bytes, lane);
  return data_.data() + at;
}

uint8_t* SharedMemory::strong_write(int actor, uint32_t address, int bytes, int lane) {
  const uint32_t at = bounds(address, bytes, "write", lane);
  check_write(actor, at, bytes, lane, Write::strong);
  if (check_races_) join(atomics_[at], (*clocks_)[actor]);
  clocks_->tick(actor);
  return data_.data() + at;
}

uint8_t* SharedMemory::atomic(int actor, uint32_t address, int bytes, int lane) {
  const uint32_t at = bounds(address, bytes, "atomic", lane);
  if (check_races_) {
    Clock& order = atomics_[at];
    join((*clocks_)[actor], order);
    clocks_->meet(actor, 1u << lane);  // a lock may hand what it guards from lane to lane
    check_read(actor, at, bytes, lane);
    check_write(actor, at, bytes, lane, Write::atomic);
    order = (*clocks_)[actor];
    clocks_->tick(actor);
  } else {
    check_read(actor, at, bytes, lane);
    check_write(actor, at, bytes, lane, Write::atomic);
  }
  return data_.data() + at;
}

void SharedMemory::begin_copy(int actor, uint32_t address, int bytes, Pending kind, int lane) {
  const uint32_t at = bounds(address, bytes, "copy", lane);
  check_write(actor, at, bytes, lane, Write::weak);
  for (int i = 0; i < bytes; ++i)
    state_[at + i] =
        static_cast<uint8_t>((state_[at + i] & ~(kUnfenced | kWritten)) | static_cast<int>(kind) << kPendingShift);
}

void SharedMemory::land(int actor, uint32_t address, int bytes, const uint8_t* from) {
  const uint32_t at = address - base_;
  if (from) std::memcpy(data_.data() + at, from, bytes);
  for (int i = 0; i < bytes; ++i) {
    state_[at + i] = static_cast<uint8_t>((state_[at + i] & ~kPendingMask) | kWritten);
    if (check_races_) writes_[at + i] = epoch(actor);
  }
}

void SharedMemory::poison(uint32_t address, int bytes) {
  std::memset(data_.data() + (address - base_), kPoison, bytes);
}

uint8_t* SharedMemory::async_read(int actor, uint32_t address, int bytes) {
  const uint32_t at = bounds(address, bytes, "asynchronous read", 0);
  check_read(actor, at, bytes, 0);
  for (int i = 0; i < bytes; ++i)
    if (state_[at + i] & kUnfenced)
      throw Fault("async proxy: reads a generic write of thread " + std::to_string(owner_[at + i]) +
                  " that no fence.proxy.async follows, at shared byte " + std::to_string(at + i));
  return data_.data() + at;
}

void SharedMemory::hold(uint32_t address, int bytes, int change) {
  for (uint32_t at = address - base_; bytes; --bytes, ++at) held_[at] = static_cast<uint16_t>(held_[at] + change);
}

// The fence may stand anywhere on the path from the write to the asynchronous read: with the writer, or behind a
// barrier with whoever issues the read. So it serves every write that its warp has heard of.
void SharedMemory::fence_proxy(int actor) {
  size_t kept = 0;
  for (const auto& [at, bytes] : unfenced_) {
    bool stays = false;
    for (uint32_t i = at; i < at + bytes; ++i) {
      if (!(state_[i] & kUnfenced)) continue;
      if (!check_races_ || heard(actor, writes_[i]))
        state_[i] &= static_cast<uint8_t>(~kUnfenced);
      else
        stays = true;
    }
    if (stays) unfenced_[kept++] = {at, bytes};
  }
  unfenced_.resize(kept);
}

}  // namespace emulator
