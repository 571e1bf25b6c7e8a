// The machine as torch sees it: PrivateUse1 devices with a device guard, an allocator and pinned memory.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <set>

#include "native/machine.h"

namespace streams {
namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
static_assert(static_cast<int>(kType) == 20, "machine.py says so");

c10::Stream to_c10(const Stream& stream) {
  const c10::Device device(kType, static_cast<c10::DeviceIndex>(stream.device));
  return c10::Stream(c10::Stream::UNSAFE, device, stream.id);
}

const Stream& of_c10(const c10::Stream& stream) { return machine().stream(stream.device_index(), stream.id()); }

int index_of(c10::Device device) { return device.has_index() ? device.index() : Machine::current_device(); }

std::vector<int> streams_of(int device) {
  std::vector<int> numbers;
  for (const Stream& stream : machine().streams()) {
    if (stream.device == device) numbers.push_back(stream.number);
  }
  return numbers;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(Machine::current_device())}; }
  void setDevice(c10::Device device) const override {
    if (!fault("device_switch")) Machine::set_current_device(index_of(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) Machine::set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return to_c10(machine().current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_c10(machine().stream(index_of(device), 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return to_c10(machine().pool_stream(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return to_c10(machine().pool_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    machine().set_current_stream(of_c10(stream));
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return const_cast<void*>(static_cast<const void*>(&of_c10(stream)));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of device ", int{device}, " is recorded on ",
                stream);
    if (*event == nullptr) *event = new Event;
    auto& ours = *static_cast<Event*>(*event);
    TORCH_CHECK(ours.device == -1 || ours.device == stream.device_index(), "an event of device ", ours.device,
                " is recorded on ", stream);
    ours.device = stream.device_index();
    if (!fault("record")) ours.record = machine().record(of_c10(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const std::int64_t record = event == nullptr ? kNever : static_cast<Event*>(event)->record;
    if (fault("block")) {
      log().add({.kind = "mark", .name = "left out", .stream = of_c10(stream).number, .number = record});
      return;
    }
    machine().block(of_c10(stream), record);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override {
    log().add({.kind = "query", .name = "event"});
    return event != nullptr;
  }
  bool queryStream(const c10::Stream& stream) const override {
    log().add({.kind = "query", .name = "stream", .stream = of_c10(stream).number});
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    machine().host_wait("stream", {of_c10(stream).number});
  }
  void synchronizeEvent(void*) const override { machine().host_wait("event", {}); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    machine().host_wait("device", streams_of(device));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    if (!fault("record_stream")) machine().record_on_stream(pointer.get(), of_c10(stream));
  }
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const int device = Machine::current_device();
    void* pointer = machine().allocate(bytes, device);
    return {pointer, pointer, &release, c10::Device(kType, static_cast<c10::DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
  static void release(void* pointer) { machine().free(pointer); }
};

std::mutex pinned_mutex;
std::set<const void*>& pinned() {
  static auto* const all = new std::set<const void*>;
  return *all;
}

// Pinned memory is not used again: whether the host writes it too early is not watched.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* pointer = bytes == 0 ? nullptr : ::operator new(bytes);
    const std::lock_guard lock(pinned_mutex);
    if (pointer != nullptr) pinned().insert(pointer);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
  static void release(void* pointer) {
    const std::lock_guard lock(pinned_mutex);
    pinned().erase(pointer);
    ::operator delete(pointer);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Machine::set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(Machine::current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    Machine::set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override {
    const std::lock_guard lock(pinned_mutex);
    return pinned().contains(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
};

DeviceAllocator allocator;
Hooks hooks;

[[maybe_unused]] const bool registered = [] {
  c10::register_privateuse1_backend("gpudouble");
  c10::SetAllocator(kType, &allocator);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace streams
