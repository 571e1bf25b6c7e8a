// The backward ring.
//
// It turns the other way round: blocks go from rank i to rank i-1. At step t rank i works on block i-R+t (mod P). The
// first of these is the block on which its forward pass ended; it was kept, and is copied into buffer 0, because the
// kept one must survive for another backward pass over the same graph. The last is its own; keys and values of it are
// here, so they are packed into the buffer and not sent, and blocks make R-1 hops. So every block the kernel reads lies
// packed in one of two buffers, and a ring of two takes the memory of a ring of many. The price is two copies of a
// block per pass, which is nothing beside the work on it.
//
// dK and dV of a block travel with it, one step behind. At step t rank i
//   - sends the accumulator of the block of step t-1, complete as far as ranks i, i+1, … go, to rank i-1,
//   - receives the accumulator of the block in hand, with the parts of all ranks farther from its owner, from rank i+1,
//   - meanwhile computes its own part into a third buffer, and adds the two when both are there.
// Step 0 has no accumulator to receive: rank i is the farthest from that block that may see it. The accumulator of
// block i arrives at rank i under the compute of step R, so after R hops all are home and no hop was left exposed.
//
// dQ stays: the kernels add to one accumulator through all steps. delta is computed once, before the first step.
#include "ring/backward.h"

#include <ATen/Functions.h>

namespace ringattn {
namespace {

int gradient_parts(const Pass& pass) { return int{pass.needs_grad_key} + int{pass.needs_grad_value}; }

}  // namespace

void allocate_backward(const Pass& pass, int rank, const Device& device, BackwardTensors& tensors, Lease& lease) {
  const auto accumulators = tensors.query.options().dtype(pass.accumulation_type);
  const bool same_type = pass.input_type == pass.accumulation_type;
  tensors.steps = backward_schedule(pass.query_layout, pass.key_layout, pass.mask, rank);
  const bool turns = tensors.steps.size() > 1;

  const at::IntArrayRef rows_of_query = tensors.query.sizes().slice(0, 3);
  tensors.delta = lease.empty(Slot::rows0, rows_of_query, accumulators);
  if (device.kernels->has_streams()) {
    tensors.minus_delta = lease.empty(Slot::rows1, rows_of_query, accumulators);
    tensors.minus_lse_log2 = lease.empty(Slot::rows2, rows_of_query, accumulators);
  }
  if (pass.needs_grad_query) {
    tensors.grad_query = empty_rows_like(tensors.query, pass.input_type);
    tensors.query_accumulator =
        same_type ? tensors.grad_query : lease.empty(Slot::query_sum, tensors.query.sizes(), accumulators);
  }
  if (pass.needs_grad_key) tensors.grad_key = empty_rows_like(tensors.key, pass.input_type);
  if (pass.needs_grad_value) tensors.grad_value = empty_rows_like(tensors.value, pass.input_type);

  const int parts = gradient_parts(pass);
  if (turns) {
    constexpr Slot slots[kBlockBuffers] = {Slot::block0, Slot::block1};
    for (int i = 0; i < kBlockBuffers; ++i) {
      tensors.blocks[i] = lease.empty(slots[i], {packed_size(pass, 2)}, tensors.key.options());
    }
  }
  if (parts > 0 && (turns || !same_type)) {
    constexpr Slot slots[kGradientBuffers] = {Slot::gradient0, Slot::gradient1, Slot::gradient2};
    const int buffers = turns ? kGradientBuffers : 1;
    for (int i = 0; i < buffers; ++i) {
      tensors.gradients[i] = lease.empty(slots[i], {packed_size(pass, parts)}, accumulators);
    }
  }
}

void ring_backward(const Pass& pass, int rank, Transport* transport, const Device& device, BackwardTensors& tensors) {
  if (!pass.needs_grad()) return;  // on every rank
  const int parts = gradient_parts(pass);
  const auto packed = [&](int buffer, int block) { return PackedBlock(tensors.blocks[buffer], pass, block, 2); };
  const auto gradient = [&](int buffer, int block) {
    return PackedBlock(tensors.gradients[buffer], pass, block, parts);
  };

  BlockArgs args = pass.block_args(rank);
  args.query = rows(tensors.query);
  args.out = rows(tensors.out);
  args.lse = tensors.lse.data_ptr();
  args.grad_out = rows(tensors.grad_out);
  args.grad_lse = tensors.grad_lse.defined() ? tensors.grad_lse.data_ptr() : nullptr;
  args.delta = tensors.delta.data_ptr();
  if (tensors.minus_delta.defined()) {
    args.minus_delta = tensors.minus_delta.data_ptr();
    args.minus_lse_log2 = tensors.minus_lse_log2.data_ptr();
  }
  device.kernels->delta(args, device.launch);
  if (pass.needs_grad_query) {
    tensors.query_accumulator.zero_();
    args.grad_query = rows(tensors.query_accumulator);
  }

  // Where the results have the accumulation type and nothing travels, the kernels add to the results themselves.
  const auto contribution = [&](const BackwardStep& step) -> std::vector<at::Tensor> {
    if (parts == 0) return {};
    if (tensors.gradients[0].defined()) return gradient(step.local_gradient, step.block).parts;
    std::vector<at::Tensor> results;
    if (pass.needs_grad_key) results.push_back(tensors.grad_key);
    if (pass.needs_grad_value) results.push_back(tensors.grad_value);
    return results;
  };

  std::vector<at::Tensor> local;
  for (const BackwardStep& step : tensors.steps) {
    const StepScope scope(pass, "ring backward", &step - tensors.steps.data(), step.block, step.visibility);
    if (step.read_buffer != kOwnTensors) {
      const PackedBlock block = packed(step.read_buffer, step.block);
      if (step.source == Source::kept) {
        block.message.copy_(tensors.kept.narrow(0, 0, block.message.numel()));
      } else if (step.source == Source::own) {
        block.parts[0].copy_(tensors.key);
        block.parts[1].copy_(tensors.value);
      }
    }

    std::vector<Message> sends, receives;
    if (step.next_block != kNone) {
      sends.push_back({packed(step.read_buffer, step.block).message, step.send_to});
      receives.push_back({packed(step.write_buffer, step.next_block).message, step.receive_from});
    }
    if (step.outgoing_gradient != kNone && parts > 0) {
      sends.push_back({gradient(step.outgoing_gradient, step.outgoing_block).message, step.send_to});
      receives.push_back({gradient(step.incoming_gradient, step.block).message, step.receive_from});
    }
    std::unique_ptr<Exchange> exchange;
    if (!sends.empty()) {
      const Stage stage{"backward hop", static_cast<int>(&step - tensors.steps.data()),
                        static_cast<int>(tensors.steps.size())};
      exchange = transport->post(std::move(sends), std::move(receives), stage);
    }

    local = contribution(step);
    for (at::Tensor& part : local) part.zero_();
    if (step.visibility != Visibility::skip) {
      if (step.read_buffer == kOwnTensors) {
        set_block(args, pass, step.block, tensors.key, tensors.value);
      } else {
        const PackedBlock block = packed(step.read_buffer, step.block);
        set_block(args, pass, step.block, block.parts[0], block.parts[1]);
      }
      if (pass.needs_grad_key) args.grad_key = rows(local.front());
      if (pass.needs_grad_value) args.grad_value = rows(local.back());
      device.kernels->backward(args, device.launch);
    }

    if (exchange) exchange->wait();
    if (step.incoming_gradient != kNone && parts > 0) {
      gradient(step.local_gradient, step.block).message.add_(gradient(step.incoming_gradient, step.block).message);
    }
  }

  if (pass.needs_grad_key) tensors.grad_key.copy_(local.front());
  if (pass.needs_grad_value) tensors.grad_value.copy_(local.back());
  if (pass.needs_grad_query) tensors.grad_query.copy_(tensors.query_accumulator);
}

}  // namespace ringattn
