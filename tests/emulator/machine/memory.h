// Global memory: every array and variable has a window of its own, 2^40 bytes apart, so that no overrun hits another.
//
// A generic address says its space in the top byte: 0 global, 1 shared, 2 local, 3 kernel parameters, 4 functions.
#pragma once

#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "../ptx/syntax.h"

namespace emulator {

constexpr int kWindowShift = 40;
constexpr int kSpaceShift = 56;
constexpr uint64_t kSharedWindow = uint64_t{1} << kSpaceShift;
constexpr uint64_t kLocalWindow = uint64_t{2} << kSpaceShift;
constexpr uint64_t kParamWindow = uint64_t{3} << kSpaceShift;

struct Allocation {
  uint64_t address = 0;
  uint8_t* data = nullptr;
  int64_t bytes = 0;
  std::string name;
  bool read_only = false;
};

class Memory {
 public:
  static uint64_t window_address(int window) { return (static_cast<uint64_t>(window) << kWindowShift) + (1 << 20); }

  void add(uint64_t address, void* data, int64_t bytes, const std::string& name, bool read_only) {
    const size_t window = address >> kWindowShift;
    if (window >= windows_.size()) windows_.resize(window + 1);
    windows_[window] = {address, static_cast<uint8_t*>(data), bytes, name, read_only};
  }

  // The host's bytes, or a Fault.
  uint8_t* at(uint64_t address, int64_t bytes, bool writes, int lane) const {
    const uint64_t window = address >> kWindowShift;
    if (window < windows_.size()) {
      const Allocation& found = windows_[window];
      const uint64_t offset = address - found.address;
      if (offset < static_cast<uint64_t>(found.bytes) && offset + bytes <= static_cast<uint64_t>(found.bytes) &&
          !(writes && found.read_only))
        return found.data + offset;
    }
    refuse(address, bytes, writes, lane);
  }
  static void check_alignment(const char* space, uint64_t address, int64_t bytes, int lane) {
    if (address & (bytes - 1)) misaligned(space, address, bytes, lane);
  }
  [[noreturn]] static void misaligned(const char* space, uint64_t address, int64_t bytes, int lane);
  std::string place(uint64_t address) const;  // in words, of an address that at() has accepted
  const std::vector<Allocation>& windows() const { return windows_; }
  [[noreturn]] void refuse(uint64_t address, int64_t bytes, bool writes, int lane) const;

 private:
  std::vector<Allocation> windows_;
};

std::string hex(uint64_t value);

}  // namespace emulator
