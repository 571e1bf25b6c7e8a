// The ring loops with steps that a test may spoil: fields of some steps get other values, and the rest is as it is in
// ring_forward and ring_backward. For a full or causal mask and tokens that are spread evenly.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <map>

#include "comm/c10d_transport.h"
#include "native/kernels.h"
#include "native/machine.h"
#include "ring/backward.h"
#include "ring/forward.h"

namespace streams {
namespace {

using namespace ringattn;

struct Ring {
  Ring(const at::Tensor& query, const at::Tensor& key, const std::string& name, const std::string& layout, bool causal)
      : guard(query.device()),
        group(c10d::resolve_process_group(name)),
        transport(c10d_transport(group, {c10::weak_intrusive_ptr(group), name, {}})) {
    const auto tokens = [&](const at::Tensor& t) { return static_cast<std::int32_t>(t.size(2) * group->getSize()); };
    const LayoutKind kind = parse_layout(layout);
    pass.dtype = query.scalar_type() == at::kHalf ? DType::float16 : DType::bfloat16;
    pass.input_type = query.scalar_type();
    pass.B = query.size(0);
    pass.Hq = query.size(1);
    pass.Hkv = key.size(1);
    pass.D = query.size(3);
    pass.query_layout = Layout(kind, group->getSize(), tokens(query));
    pass.key_layout = Layout(kind, group->getSize(), tokens(key));
    pass.mask.key_count = tokens(key);
    if (causal) pass.mask.right = 0;
    pass.is_causal = causal;
    pass.scale = 1 / std::sqrt(static_cast<double>(pass.D));
    pass.needs_grad_query = pass.needs_grad_key = pass.needs_grad_value = true;
    device.kernels = &streams::kernels();
    device.launch.stream = const_cast<streams::Stream*>(&machine().current_stream(query.get_device()));
  }

  c10::DeviceGuard guard;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::unique_ptr<Transport> transport;
  Pass pass;
  Device device;
  Lease lease;
};

struct Edits {
  const c10::List<std::string>& fields;
  at::IntArrayRef steps, values;

  template <typename Step>
  void apply(std::vector<Step>& schedule, const std::map<std::string, int Step::*>& members) const {
    for (std::size_t i = 0; i < steps.size(); ++i) {
      schedule.at(steps[i]).*members.at(fields.get(i)) = static_cast<int>(values[i]);
    }
  }
};

std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& key,
                                                       const at::Tensor& value, std::string group, std::string layout,
                                                       bool causal, c10::List<std::string> fields,
                                                       at::IntArrayRef steps, at::IntArrayRef values) {
  Ring ring(query, key, group, layout, causal);
  const int rank = ring.group->getRank();
  ForwardTensors tensors = allocate_forward(ring.pass, rank, query, key, value, ring.lease);
  Edits{fields, steps, values}.apply<ForwardStep>(
      tensors.steps, {{"read_buffer", &ForwardStep::read_buffer}, {"write_buffer", &ForwardStep::write_buffer}});
  at::Tensor kept = ring_forward(ring.pass, rank, ring.transport.get(), ring.device, tensors);
  return {tensors.out, tensors.lse, kept};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad_out, const at::Tensor& query,
                                                        const at::Tensor& key, const at::Tensor& value,
                                                        const at::Tensor& out, const at::Tensor& lse,
                                                        const at::Tensor& kept, std::string group, std::string layout,
                                                        bool causal, c10::List<std::string> fields,
                                                        at::IntArrayRef steps, at::IntArrayRef values) {
  Ring ring(query, key, group, layout, causal);
  const int rank = ring.group->getRank();
  BackwardTensors tensors;
  tensors.query = query;
  tensors.key = key;
  tensors.value = value;
  tensors.out = out;
  tensors.lse = lse;
  tensors.kept = kept;
  tensors.grad_out = grad_out;
  allocate_backward(ring.pass, rank, ring.device, tensors, ring.lease);
  Edits{fields, steps, values}.apply<BackwardStep>(tensors.steps,
                                                   {{"read_buffer", &BackwardStep::read_buffer},
                                                    {"write_buffer", &BackwardStep::write_buffer},
                                                    {"local_gradient", &BackwardStep::local_gradient},
                                                    {"outgoing_gradient", &BackwardStep::outgoing_gradient},
                                                    {"incoming_gradient", &BackwardStep::incoming_gradient}});
  ring_backward(ring.pass, rank, ring.transport.get(), ring.device, tensors);
  return {tensors.grad_query, tensors.grad_key, tensors.grad_value};
}

}  // namespace
}  // namespace streams

TORCH_LIBRARY(ringattn_streams, m) {
  const std::string edited = "str group, str layout, bool is_causal, str[] fields, int[] steps, int[] values";
  const std::string forward =
      "forward(Tensor query, Tensor key, Tensor value, " + edited + ") -> (Tensor out, Tensor lse, Tensor kept)";
  const std::string backward =
      "backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor kept, " +
      edited + ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)";
  m.def(forward.c_str());
  m.def(backward.c_str());
}

TORCH_LIBRARY_IMPL(ringattn_streams, PrivateUse1, m) {
  m.impl("forward", streams::forward);
  m.impl("backward", streams::backward);
}
