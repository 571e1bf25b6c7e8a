#include "core/kernels.h"

#include <array>
#include <atomic>
#include <stdexcept>

namespace ringattn {
namespace {

constexpr int kDeviceTypes = 64;  // c10 has fewer

std::atomic<const KernelTable*>& entry(int device_type) {
  static std::array<std::atomic<const KernelTable*>, kDeviceTypes> tables{};
  if (device_type < 0 || device_type >= kDeviceTypes) {
    throw std::invalid_argument("no device has the type " + std::to_string(device_type));
  }
  return tables[device_type];
}

}  // namespace

void register_kernels(int device_type, const KernelTable* table) { entry(device_type) = table; }
const KernelTable* find_kernels(int device_type) { return entry(device_type); }

}  // namespace ringattn
