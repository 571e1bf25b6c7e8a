// Calls and returns: frames of registers and parameters, and local memory that grows with the depth.
#include <algorithm>

#include "machine.h"

namespace emulator {

std::shared_ptr<Frame> make_frame(const Function& function) {
  auto frame = std::make_shared<Frame>();
  frame->function = &function;
  frame->storage = std::make_unique<uint8_t[]>(function.register_bytes + 64);
  const auto at = reinterpret_cast<uintptr_t>(frame->storage.get());
  frame->registers = frame->storage.get() + (64 - at % 64) % 64;
  std::memset(frame->registers, 0xcd, function.register_bytes);  // nobody may rely on zeros
  frame->params.resize(32 * function.param_bytes);
  return frame;
}

void Warp::copy_results(Frame& callee, uint32_t lanes) const {
  const Instruction& call = *callee.call;
  for (size_t i = 0; i < call.result_offsets.size(); ++i)
    for (int lane = 0; lane < 32; ++lane)
      if (lanes >> lane & 1)
        std::memcpy(callee.caller->param(lane) + call.result_offsets[i].first,
                    callee.param(lane) + call.result_offsets[i].second, call.result_bytes[i]);
}

void Warp::call(const Instruction& in, const Function& callee) {
  auto made = make_frame(callee);
  Split& split = splits[current];
  made->caller = split.frame;
  made->call = &in;
  made->return_pc = next;
  made->local_base = frame->local_base + frame->function->local_bytes;
  if (made->local_base + callee.local_bytes > local_bytes) {  // grow every lane's local memory
    const int64_t bytes = made->local_base + callee.local_bytes;
    std::vector<uint8_t> data(32 * bytes, 0xff), state(32 * bytes, 0);
    for (int lane = 0; lane < 32; ++lane) {
      std::copy_n(local.begin() + lane * local_bytes, local_bytes, data.begin() + lane * bytes);
      std::copy_n(local_state.begin() + lane * local_bytes, local_bytes, state.begin() + lane * bytes);
    }
    local.swap(data);
    local_state.swap(state);
    local_bytes = bytes;
  }
  for (size_t i = 0; i < in.argument_offsets.size(); ++i)
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1)
        std::memcpy(made->param(lane) + in.argument_offsets[i].second,
                    frame->param(lane) + in.argument_offsets[i].first, in.argument_bytes[i]);
  if (mask != active) throw Fault("a call under a predicate that lanes do not share");
  split.join = made->join = new_join({kReturn, active, 0, split.join, made});
  split.frame = std::move(made);
  next = split.pc = 0;
  select(current);
}

void Warp::return_lanes() {
  if (frame->join < 0) {
    exit_lanes(mask);
    return;
  }
  if (mask != active) throw Fault("a return under a predicate that lanes do not share");
  const std::shared_ptr<Frame> left = splits[current].frame;
  leave(active, splits[current].join, left->join);
  splits[current].join = left->join;
  const Join& join = joins[left->join];
  const uint32_t all = join.expected;
  const bool complete = (join.arrived | active) == all;
  arrive(active);
  if (!complete) {  // the other lanes are still inside
    next = pc;
    return;
  }
  copy_results(*left, all);
  splits[current].frame = left->caller;
  splits[current].pc = left->return_pc;
  select(current);
  next = pc;
}

}  // namespace emulator
