// The forward ring.
//
// Rank i owns block i: its keys and values. Before the first step it packs them into buffer 0. At step s it has block
// i-s (mod P) in buffer s%2. It posts the exchange: buffer s%2 goes to rank i+1, and block i-s-1 comes from rank i-1
// into the other buffer, which was read in the step before and is free. While the bytes move, the block kernel absorbs
// the block in hand into the carried state (o, m, l), unless the mask leaves it nothing to do. Then it waits for both
// halves of the exchange, and the buffers change roles. After R steps no rank needs the next block: step R has no
// exchange, and its kernel call also turns the state into out and lse. The block of step R is kept for backward.
//
// All ranks make the same R hops whatever they compute, so a rank with no work at a step still relays.
#include "ring/forward.h"

#include <ATen/Functions.h>

namespace ringattn {

ForwardTensors allocate_forward(const Pass& pass, int rank, at::Tensor query, at::Tensor key, at::Tensor value,
                                Lease& lease) {
  ForwardTensors tensors;
  const auto accumulators = query.options().dtype(pass.accumulation_type);
  const at::IntArrayRef rows_of_query = query.sizes().slice(0, 3);
  tensors.out = empty_rows_like(query, pass.input_type);
  tensors.lse = at::empty(rows_of_query, accumulators);
  tensors.steps = forward_schedule(pass.query_layout, pass.key_layout, pass.mask, rank);
  const bool turns = tensors.steps.size() > 1;
  if (turns) {
    tensors.o = lease.empty(Slot::query_sum, query.sizes(), accumulators);
    tensors.m = lease.empty(Slot::rows0, rows_of_query, accumulators);
    tensors.l = lease.empty(Slot::rows1, rows_of_query, accumulators);
  }
  if (pass.world_size() > 1) {
    const std::int64_t size = packed_size(pass, 2);
    const int last = turns ? tensors.steps.back().read_buffer : 0;
    const bool keeps = kept_size(pass) > 0;  // the last block leaves the pass
    if (keeps) tensors.blocks[last] = at::empty({size}, key.options());
    if (turns && !keeps) tensors.blocks[last] = lease.empty(Slot::block1, {size}, key.options());
    if (turns) tensors.blocks[1 - last] = lease.empty(Slot::block0, {size}, key.options());
  }
  tensors.query = std::move(query);
  tensors.key = std::move(key);
  tensors.value = std::move(value);
  return tensors;
}

at::Tensor ring_forward(const Pass& pass, int rank, Transport* transport, const Device& device,
                        ForwardTensors& tensors) {
  const std::vector<ForwardStep>& steps = tensors.steps;
  const auto packed = [&](int buffer, int block) { return PackedBlock(tensors.blocks[buffer], pass, block, 2); };

  if (steps.front().read_buffer != kOwnTensors) {
    const PackedBlock own = packed(steps.front().read_buffer, rank);
    own.parts[0].copy_(tensors.key);
    own.parts[1].copy_(tensors.value);
  }

  BlockArgs args = pass.block_args(rank);
  args.query = rows(tensors.query);
  args.out = rows(tensors.out);
  args.lse = tensors.lse.data_ptr();
  if (tensors.o.defined()) {
    args.o = tensors.o.data_ptr();
    args.m = tensors.m.data_ptr();
    args.l = tensors.l.data_ptr();
  }

  for (const ForwardStep& step : steps) {
    const StepScope scope(pass, "ring", &step - steps.data(), step.block, step.visibility);
    std::unique_ptr<Exchange> exchange;
    if (step.next_block != kNone) {
      exchange = transport->post({{packed(step.read_buffer, step.block).message, step.send_to}},
                                 {{packed(step.write_buffer, step.next_block).message, step.receive_from}},
                                 {"hop", static_cast<int>(&step - steps.data()), static_cast<int>(steps.size()) - 1});
    }

    const bool visible = step.visibility != Visibility::skip;
    if (visible || step.finalize) {
      args.finalize = step.finalize;
      args.store_state = !step.finalize;
      if (!visible) {
        args.key_segments = {};  // nothing to absorb, only to finalize
        args.Skv = 0;
      } else if (step.read_buffer == kOwnTensors) {
        set_block(args, pass, step.block, tensors.key, tensors.value);
      } else {
        const PackedBlock block = packed(step.read_buffer, step.block);
        set_block(args, pass, step.block, block.parts[0], block.parts[1]);
      }
      device.kernels->forward(args, device.launch);
      args.load_state = true;
    }

    if (exchange) exchange->wait();
  }

  // The kept buffer leaves the operator, so what the block in it does not fill is cleared.
  if (kept_size(pass) == 0) return at::empty({0}, tensors.key.options());
  const ForwardStep& last = steps.back();
  const bool turned = last.read_buffer != kOwnTensors;
  at::Tensor kept = tensors.blocks[turned ? last.read_buffer : 0];
  const std::int64_t used = turned ? packed(last.read_buffer, last.block).message.numel() : 0;
  kept.narrow(0, used, kept.numel() - used).zero_();
  return kept;
}

}  // namespace ringattn
