// The texts of memory errors.
#include "memory.h"

namespace emulator {

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

std::string Memory::place(uint64_t address) const {
  const Allocation& found = windows_[address >> kWindowShift];
  return "byte " + std::to_string(address - found.address) + " of " + found.name;
}

void Memory::misaligned(const char* space, uint64_t address, int64_t bytes, int lane) {
  throw Fault("misaligned: " + std::string(space) + " access of " + std::to_string(bytes) + " bytes at " + hex(address),
              1u << lane);
}

void Memory::refuse(uint64_t address, int64_t bytes, bool writes, int lane) const {
  std::string text = "out of bounds: global " + std::string(writes ? "write" : "read") + " of " +
                     std::to_string(bytes) + " bytes at " + hex(address);
  const Allocation* nearest = nullptr;
  for (const Allocation& one : windows_) {
    if (!one.data) continue;
    const int64_t distance = static_cast<int64_t>(address - one.address);
    if (distance > -(int64_t{1} << 38) && distance < (int64_t{1} << 38)) nearest = &one;
  }
  if (nearest && nearest->read_only && writes && address - nearest->address < static_cast<uint64_t>(nearest->bytes)) {
    text = "out of bounds: write to read-only " + nearest->name;
  } else if (nearest) {
    text += ", byte " + std::to_string(static_cast<int64_t>(address - nearest->address)) + " of " + nearest->name +
            " (" + std::to_string(nearest->bytes) + " bytes)";
  } else {
    text += ", where nothing is";
  }
  throw Fault(text, 1u << lane);
}

}  // namespace emulator
