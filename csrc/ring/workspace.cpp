#include "ring/workspace.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/accumulate.h>

#include <utility>

namespace ringattn {

Lease::Lease(Workspace& workspace, at::Device device, std::uint64_t capture)
    : buffers_(&(capture == 0 ? workspace.devices_ : workspace.captured_)[device]) {
  if (device.is_cpu()) return;
  if (buffers_->capture != capture) {
    *buffers_ = {};
    buffers_->capture = capture;
  }
  stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (buffers_->last_stream && *buffers_->last_stream != *stream_) {
    buffers_->last_use->block(*stream_);
    for (const at::Tensor& bytes : buffers_->bytes) {
      if (bytes.defined()) bytes.record_stream(*stream_);
    }
  }
}

Lease::Lease(Lease&& other) noexcept
    : buffers_(std::exchange(other.buffers_, nullptr)), stream_(std::exchange(other.stream_, std::nullopt)) {}

Lease& Lease::operator=(Lease&& other) noexcept {
  if (this != &other) {
    end();
    buffers_ = std::exchange(other.buffers_, nullptr);
    stream_ = std::exchange(other.stream_, std::nullopt);
  }
  return *this;
}

void Lease::end() noexcept {
  if (buffers_ == nullptr || !stream_) return;
  try {
    if (!buffers_->last_use) buffers_->last_use.emplace(stream_->device_type());
    buffers_->last_use->record(*stream_);
    buffers_->last_stream = *stream_;
  } catch (...) {  // the device has failed: what it still does with the buffers is unknown, so they are not used again
    *buffers_ = {};
  }
  buffers_ = nullptr;
}

at::Tensor Lease::empty(Slot slot, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const std::int64_t elements = c10::multiply_integers(sizes);
  if (buffers_ == nullptr || elements == 0) return at::empty(sizes, options);
  at::Tensor& bytes = buffers_->bytes[static_cast<std::size_t>(slot)];
  const std::int64_t needed = elements * static_cast<std::int64_t>(options.dtype().itemsize());
  if (!bytes.defined() || bytes.numel() < needed) {
    bytes = at::Tensor();  // before the new one, so that the allocator may use its memory
    bytes = at::empty({needed}, options.dtype(at::kByte));
  }
  return bytes.narrow(0, 0, needed).view(c10::typeMetaToScalarType(options.dtype())).view(sizes);
}

}  // namespace ringattn
