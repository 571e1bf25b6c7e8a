// ring_forward and ring_backward on the ranks of a group.
#include <ATen/Functions.h>
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

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward_on(Ring& ring, const at::Tensor& query, const at::Tensor& key,
                                                          const at::Tensor& value, const at::Tensor& order,
                                                          const PassOptions& options, int threads) {
  std::optional<Pass> pass;
  ForwardTensors tensors;
  Device device;
  const Agreement agreement(ring, Op::ring_forward, [&](CallHeader& header) {
    device = kernels_for(query, threads);
    pass = check_pass(query, key, value, options, {ring.world_size, ring.rank});
    pass->describe(header);
    if (order.defined()) check_number(order, "order");
    tensors =
        allocate_forward(*pass, ring.rank, with_unit_stride(query), with_unit_stride(key), with_unit_stride(value));
  });
  at::Tensor kept = ring_forward(*pass, ring.rank, ring.transport.get(), device, tensors);
  if (order.defined()) *order.mutable_data_ptr<std::int64_t>() = agreement.call();
  return {tensors.out, tensors.lse, kept};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward_on(Ring& ring, const SavedForBackward& saved,
                                                           const PassOptions& options, int threads) {
  std::optional<Pass> pass;
  BackwardTensors tensors;
  Device device;
  const Agreement agreement(ring, Op::ring_backward, [&](CallHeader& header) {
    device = kernels_for(saved.query, threads);
    pass = check_pass(saved.query, saved.key, saved.value, options, {ring.world_size, ring.rank});
    pass->describe(header);
    if (saved.forward_call.defined()) {
      check_number(saved.forward_call, "forward_call");
      header.set(Field::forward_call, saved.forward_call.item<std::int64_t>());
    }
    const at::IntArrayRef shape = saved.query.sizes(), row_shape = shape.slice(0, 3);
    check_shape(saved.grad_out, "grad_out", shape);
    check_type(saved.grad_out, "grad_out", pass->input_type);
    check_shape(saved.out, "out", shape);
    check_type(saved.out, "out", pass->input_type);
    check_shape(saved.lse, "lse", row_shape);
    check_type(saved.lse, "lse", pass->accumulation_type);
    check_shape(saved.kept, "kept", {ring.world_size == 1 ? 0 : packed_size(*pass, 2)});
    check_type(saved.kept, "kept", pass->input_type);
    if (saved.grad_lse) {
      check_shape(*saved.grad_lse, "grad_lse", row_shape);
      check_type(*saved.grad_lse, "grad_lse", pass->accumulation_type);
      tensors.grad_lse = saved.grad_lse->contiguous();
    }
    tensors.query = with_unit_stride(saved.query);
    tensors.key = with_unit_stride(saved.key);
    tensors.value = with_unit_stride(saved.value);
    tensors.out = with_unit_stride(saved.out);
    tensors.grad_out = with_unit_stride(saved.grad_out);
    tensors.lse = saved.lse.contiguous();
    tensors.kept = saved.kept.contiguous();
    allocate_backward(*pass, ring.rank, tensors);
  });
  ring_backward(*pass, ring.rank, ring.transport.get(), device, tensors);
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

void refuse_op(const at::Tensor& /*order*/, std::string group, std::string reason) {
  Ring ring = Ring::of_group(group);
  if (ring.world_size == 1) return;
  try {
    const Agreement agreement(ring, Op::refuse, [&](CallHeader&) { throw std::invalid_argument(reason); });
  } catch (const std::invalid_argument&) {  // what was asked for
  }
}

std::int64_t calls_op(std::string group) {
  const Ring ring = Ring::of_group(group);
  return ring.state == nullptr ? 0 : ring.state->calls.load();
}

}  // namespace
}  // namespace ringattn

TORCH_LIBRARY_IMPL(ringattn, CompositeExplicitAutograd, m) { m.impl("calls", ringattn::calls_op); }

TORCH_LIBRARY_IMPL(ringattn, CPU, m) {
  m.impl("ring_forward", ringattn::forward_op);
  m.impl("ring_backward", ringattn::backward_op);
  m.impl("refuse", ringattn::refuse_op);
}
