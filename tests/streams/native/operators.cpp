// ATen's operators on the machine: each runs at once on a CPU tensor over the same memory, and is written down as one
// operation of the current stream of its tensors' device, with the bytes it reads and writes.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "native/machine.h"
#include "native/ranges.h"
#include "native/tensors.h"

namespace streams {

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  void* data = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  return at::from_blob(data, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Ranges ranges_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  std::vector<Dimension> dimensions;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) dimensions.push_back({tensor.size(i), tensor.stride(i)});
  return ranges_of(tensor.data_ptr(), static_cast<std::int64_t>(tensor.element_size()), std::move(dimensions));
}

namespace {

const Stream& current_stream_of(const at::Tensor& tensor) { return machine().current_stream(tensor.get_device()); }

c10::DispatchKeySet keys() { return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }

// As the wrappers of CUDA: the device of the options, or the current one.
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, c10::GetAllocator(at::kPrivateUse1), keys(), c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, c10::GetAllocator(at::kPrivateUse1), keys(),
                                           c10::dtype_or_default(dtype));
}

// Between devices: the source's stream copies, after and before what the target's stream does.
void copy_between(const at::Tensor& to, const at::Tensor& from) {
  const Stream &source = current_stream_of(from), &target = current_stream_of(to);
  machine().block(source, machine().record(target));
  log().add({.kind = "operation",
             .name = "copy_",
             .stream = source.number,
             .accesses = {{"src", false, ranges_of(from)}, {"self", true, ranges_of(to)}}});
  machine().block(target, machine().record(source));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  const bool to_device = self.is_privateuseone(), from_device = src.is_privateuseone();
  if (self.numel() > 0) {
    if (to_device && from_device && self.get_device() != src.get_device()) {
      copy_between(self, src);
    } else {
      std::vector<Access> accesses;
      if (from_device) accesses.push_back({"src", false, ranges_of(src)});
      if (to_device) accesses.push_back({"self", true, ranges_of(self)});
      const Stream& stream = current_stream_of(to_device ? self : src);
      machine().operation(stream, "copy_", std::move(accesses));
      // The host waits unless it need not; what comes to memory that is not pinned is copied by the host in the end.
      const bool waits = !(to_device && from_device) && (!non_blocking || (from_device && !self.is_pinned()));
      if (waits) machine().host_wait(to_device ? "copy to the device" : "copy to the host", {stream.number});
    }
  }
  on_cpu(self).copy_(on_cpu(src));
  return self;
}

at::Scalar item(const at::Tensor& self) {
  machine().operation(current_stream_of(self), "_local_scalar_dense", {{"self", false, ranges_of(self)}});
  machine().host_wait("item", {current_stream_of(self).number});
  return at::_local_scalar_dense(on_cpu(self));
}

void record_stream(at::Tensor& self, at::Stream stream) {
  if (fault("record_stream") || self.storage().nbytes() == 0) return;
  machine().record_on_stream(self.storage().data(), machine().stream(stream.device_index(), stream.id()));
}

// All other operators. What is not changed in place comes out as a new tensor.
class Fallback {
 public:
  Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(*stack) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    const std::size_t first = stack_.size() - arguments.size();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      stack_[first + i] =
          lower(std::move(stack_[first + i]), arguments[i].name(), alias != nullptr && alias->isWrite());
    }
    TORCH_CHECK(device_.has_value(), op_.schema().name(), " on a device, without a tensor that says which");
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    const c10::DeviceGuard guard(*device_);
    for (std::size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) {
      stack_[i] = lift(std::move(stack_[i]));
    }
    machine().operation(machine().current_stream(device_->index()), op_.schema().name(), std::move(accesses_));
  }

 private:
  at::Tensor lower(const at::Tensor& tensor, const std::string& name, bool writes) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    TORCH_CHECK(!device_ || *device_ == tensor.device(), op_.schema().name(), ": tensors on two devices");
    device_ = tensor.device();
    accesses_.push_back({name, writes, ranges_of(tensor)});
    if (writes) accesses_.push_back({name, false, ranges_of(tensor)});
    lowered_.emplace_back(tensor, on_cpu(tensor));
    return lowered_.back().second;
  }

  c10::IValue lower(c10::IValue value, const std::string& name, bool writes) {
    if (value.isTensor()) return lower(value.toTensor(), name, writes);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(lower(one, name, writes));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector()) {
        list.push_back(one ? std::optional(lower(*one, name, writes)) : one);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_privateuseone()) return c10::Device(at::kCPU);
    return value;
  }

  at::Tensor lift(const at::Tensor& result) {
    for (const auto& [ours, cpu] : lowered_) {
      if (cpu.is_same(result)) return ours;
      TORCH_CHECK(!result.defined() || !result.has_storage() || !result.storage().is_alias_of(cpu.storage()),
                  op_.schema().name(), " makes a view, which the double does not know");
    }
    if (!result.defined()) return result;
    at::Tensor ours = at::empty_strided(result.sizes(), result.strides(), result.options().device(*device_));
    accesses_.push_back({"result", true, ranges_of(ours)});
    on_cpu(ours).copy_(result);
    return ours;
  }

  c10::IValue lift(c10::IValue value) {
    if (value.isTensor()) return lift(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorVector()) list.push_back(lift(one));
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::vector<std::pair<at::Tensor, at::Tensor>> lowered_;  // ours, the CPU's
  std::vector<Access> accesses_;
  std::optional<at::Device> device_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Fallback(op, stack).run(); }

}  // namespace
}  // namespace streams

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&streams::fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", streams::empty);
  m.impl("empty_strided", streams::empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("copy_", streams::copy_);
  m.impl("_local_scalar_dense", streams::item);
  m.impl("record_stream", streams::record_stream);
}
