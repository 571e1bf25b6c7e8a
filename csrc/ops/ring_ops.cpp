// ring_forward and ring_backward on the ranks of a group.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <tuple>

#include "ops/checks.h"
#include "ops/device.h"
#include "ops/groups.h"
#include "ops/ring_ops.h"
#include "ring/backward.h"
#include "ring/forward.h"

namespace ringattn {

namespace {

void check_number(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK_VALUE(tensor.numel() == 1 && tensor.scalar_type() == at::kLong && tensor.is_cpu(), name,
                    ": expected one int64 number on the CPU, got ", tensor.numel(), " of ",
                    type_name(tensor.scalar_type()), " on ", tensor.device());
}

// The kernels of a pass. Makes their device current and places there what they read beside tensors.
Device place(const Ring& ring, Pass& pass, at::Device where, int threads, c10::OptionalDeviceGuard& guard) {
  const Device device = kernels_for(where, "query", pass.dtype, pass.D, threads);
  check_carrier(ring, "query", where);
  guard.reset_device(where);
  pass.device_documents = place_documents(where, pass.document_bounds);
  return device;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_on(Ring& ring, const at::Tensor& query, const at::Tensor& key,
                                                          const at::Tensor& value, const at::Tensor& order,
                                                          const PassOptions& options, int threads) {
  c10::OptionalDeviceGuard guard;
  std::optional<Pass> pass;
  ForwardTensors tensors;
  Device device;
  const Call call = call_on(ring, Op::ring_forward, query.device());
  Agreement agreement(ring, call, [&](CallHeader& header, Lease& lease) {
    pass = check_pass(query, key, value, options, {ring.world_size, ring.rank});
    pass->describe(header);
    if (order.defined()) check_number(order, "order");
    device = place(ring, *pass, query.device(), threads, guard);
    lease = ring.lease(call);
    tensors = allocate_forward(*pass, ring.rank, with_unit_stride(query), with_unit_stride(key),
                               with_unit_stride(value), lease);
  });
  const at::Tensor kept =
      agreement.carry_out([&] { return ring_forward(*pass, ring.rank, ring.transport.get(), device, tensors); });
  if (order.defined()) *order.mutable_data_ptr<std::int64_t>() = agreement.mark();
  return {tensors.out, tensors.lse, kept};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_on(Ring& ring, const SavedForBackward& saved,
                                                           const PassOptions& options, int threads) {
  c10::OptionalDeviceGuard guard;
  std::optional<Pass> pass;
  BackwardTensors tensors;
  Device device;
  const Call call = call_on(ring, Op::ring_backward, saved.query.device());
  Agreement agreement(ring, call, [&](CallHeader& header, Lease& lease) {
    pass = check_pass(saved.query, saved.key, saved.value, options, {ring.world_size, ring.rank});
    pass->describe(header);
    if (saved.forward_call.defined()) {
      check_number(saved.forward_call, "forward_call");
      header.set(Field::forward_call, check_mark(ring, saved.forward_call.item<std::int64_t>()));
    }
    const at::IntArrayRef shape = saved.query.sizes(), row_shape = shape.slice(0, 3);
    const auto check = [&](const at::Tensor& tensor, const char* name, at::IntArrayRef expected, at::ScalarType type) {
      check_device(tensor, name, "query", saved.query);
      check_shape(tensor, name, expected);
      check_type(tensor, name, type);
    };
    check(saved.grad_out, "grad_out", shape, pass->input_type);
    check(saved.out, "out", shape, pass->input_type);
    check(saved.lse, "lse", row_shape, pass->accumulation_type);
    check(saved.kept, "kept", {kept_size(*pass)}, pass->input_type);
    if (saved.grad_lse) check(*saved.grad_lse, "grad_lse", row_shape, pass->accumulation_type);
    device = place(ring, *pass, saved.query.device(), threads, guard);
    lease = ring.lease(call);
    if (saved.grad_lse) tensors.grad_lse = saved.grad_lse->contiguous();
    tensors.query = with_unit_stride(saved.query);
    tensors.key = with_unit_stride(saved.key);
    tensors.value = with_unit_stride(saved.value);
    tensors.out = with_unit_stride(saved.out);
    tensors.grad_out = with_unit_stride(saved.grad_out);
    tensors.lse = saved.lse.contiguous();
    tensors.kept = saved.kept.contiguous();
    allocate_backward(*pass, ring.rank, device, tensors, lease);
  });
  agreement.carry_out([&] { ring_backward(*pass, ring.rank, ring.transport.get(), device, tensors); });
  const auto or_empty = [&](const at::Tensor& t) { return t.defined() ? t : at::empty({0}, saved.query.options()); };
  return {or_empty(tensors.grad_query), or_empty(tensors.grad_key), or_empty(tensors.grad_value)};
}

namespace {

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_op(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& order, std::string group,
    std::string layout, std::optional<std::int64_t> seq_len, std::optional<std::int64_t> key_seq_len, bool is_causal,
    at::OptionalIntArrayRef window, const std::optional<at::Tensor>& cu_seqlens, std::optional<double> scale,
    bool enable_gqa, bool deterministic, c10::List<bool> needs_grad) {
  Ring ring = Ring::of_group(group);
  return forward_on(ring, query, key, value, order,
                    pass_options(layout, seq_len, key_seq_len, is_causal, window, cu_seqlens, scale, enable_gqa,
                                 deterministic, needs_grad),
                    at::get_num_threads());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_op(
    const at::Tensor& grad_out, const std::optional<at::Tensor>& grad_lse, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& out, const at::Tensor& lse,
    const at::Tensor& kept, const at::Tensor& forward_call, const at::Tensor& /*order*/, std::string group,
    std::string layout, std::optional<std::int64_t> seq_len, std::optional<std::int64_t> key_seq_len, bool is_causal,
    at::OptionalIntArrayRef window, const std::optional<at::Tensor>& cu_seqlens, std::optional<double> scale,
    bool enable_gqa, bool deterministic, c10::List<bool> needs_grad) {
  Ring ring = Ring::of_group(group);
  return backward_on(ring, {query, key, value, out, lse, kept, grad_out, grad_lse, forward_call},
                     pass_options(layout, seq_len, key_seq_len, is_causal, window, cu_seqlens, scale, enable_gqa,
                                  deterministic, needs_grad),
                     at::get_num_threads());
}

void refuse_op(const at::Tensor& /*order*/, std::string group, std::string reason, at::Device payload) {
  Ring ring = Ring::of_group(group);
  if (ring.world_size == 1) return;
  try {
    const Call call = call_on(ring, Op::refuse, payload);
    Agreement agreement(ring, call, [&](CallHeader&, Lease&) { throw std::invalid_argument(reason); });
  } catch (const std::invalid_argument&) {  // what was asked for
  }
}

std::int64_t generation_op(std::string group) { return generation_of(Ring::of_group(group)); }

std::int64_t calls_op(std::string group) {
  const Ring ring = Ring::of_group(group);
  return ring.state == nullptr ? 0 : ring.state->calls.load();
}

void init_op(const at::Tensor& /*order*/, std::string group, at::Device where) {
  Ring ring = Ring::of_group(group);
  c10::OptionalDeviceGuard guard;
  const Agreement agreement(ring, call_on(ring, Op::init, where), [&](CallHeader&, Lease&) {
    check_carrier(ring, "device", where);
    guard.reset_device(where);
  });
}

void release_workspace_op(std::string group) {
  const Ring ring = Ring::of_group(group);
  if (ring.state == nullptr) return;
  const std::unique_lock busy(ring.state->busy, std::try_to_lock);
  TORCH_CHECK(busy.owns_lock(), "group: another thread of this process is in a call on it");
  ring.state->workspace.release();
}

}  // namespace
}  // namespace ringattn

TORCH_LIBRARY_IMPL(ringattn, CompositeExplicitAutograd, m) {
  m.impl("calls", ringattn::calls_op);
  m.impl("generation", ringattn::generation_op);
  m.impl("lacks_side_group", ringattn::lacks_side_group);
  m.impl("use_side_group", ringattn::use_side_group);
  m.impl("release_workspace", ringattn::release_workspace_op);
}

TORCH_LIBRARY_FRAGMENT(ringattn, m) {
  using ringattn::implement;
  implement<ringattn::forward_op>(m, "ring_forward");
  implement<ringattn::backward_op>(m, "ring_backward");
  implement<ringattn::refuse_op>(m, "refuse");
  implement<ringattn::init_op>(m, "init");
}
