#include "ops/groups.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <bit>
#include <exception>
#include <map>

#include "comm/c10d_transport.h"
#include "core/error.h"
#include "ops/device.h"

namespace ringattn {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Names are used again when groups are destroyed and made anew, so the group itself decides whose state it is.
std::shared_ptr<GroupState> state_of(const std::string& name, const Group& group) {
  static std::mutex mutex;
  static auto& states = *new std::map<std::string, std::shared_ptr<GroupState>>;  // not destroyed: devices may be gone
  const std::lock_guard lock(mutex);
  // What was kept for groups that are gone goes too.
  std::erase_if(states, [](const auto& entry) { return entry.second->group.expired(); });
  std::shared_ptr<GroupState>& state = states[name];
  if (state == nullptr || state->group.lock() != group) state = std::make_shared<GroupState>(group);
  return state;
}

Group group_of(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    C10_THROW_ERROR(ValueError, "group: expected the name of a process group that this process is in, got '" + name +
                                    "', which is unknown here, destroyed, or has other members");
  }
}

// What a refusing rank tells the others.
std::string reason_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::bad_alloc&) {
    return "out of memory";
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

// One hop in each direction.
void connect(Transport& transport, at::Device where) {
  const int P = transport.world_size(), next = (transport.rank() + 1) % P, previous = (transport.rank() - 1 + P) % P;
  const at::Tensor out = at::zeros({1}, at::TensorOptions().device(where)), in = at::empty_like(out);
  transport.post({{out, next}}, {{in, previous}})->wait();
  transport.post({{out, previous}}, {{in, next}})->wait();
}

}  // namespace

Ring Ring::of_group(const std::string& name) {
  Ring ring;
  if (name.empty()) return ring;
  const Group group = group_of(name);
  ring.rank = group->getRank();
  ring.world_size = group->getSize();
  if (ring.world_size == 1) return ring;
  ring.state = state_of(name, group);
  ring.transport = c10d_transport(group);
  ring.carries_accelerators = ringattn::carries_accelerators(group);
  if (ring.state->side != nullptr) ring.header_transport = c10d_transport(ring.state->side);
  return ring;
}

Lease Ring::lease(const Call& call) const {
  return state == nullptr ? Lease() : Lease(state->workspace, call.payload, call.capture);
}

Call call_on(const Ring& ring, Op op, at::Device payload) {
  Call call{op, payload};
  // Also where the tensors are elsewhere by mistake: the other ranks are capturing, and wait for nobody.
  if (ring.carries_accelerators) call.capture = std::max(capture_on(payload), current_capture());
  return call;
}

void check_carrier(const Ring& ring, const char* name, at::Device device) {
  if (ring.transport == nullptr) return;
  const std::string obstacle = ring.transport->obstacle(device);
  TORCH_CHECK_VALUE(obstacle.empty(), name, ": expected a device whose tensors the group can carry, got ", device, "; ",
                    obstacle);
}

bool lacks_side_group(const std::string& name) {
  if (name.empty()) return false;
  const Group group = group_of(name);
  if (group->getSize() == 1 || carries_cpu(group)) return false;
  return state_of(name, group)->side == nullptr;
}

void use_side_group(const std::string& name, const std::string& side_name) {
  const Group group = group_of(name), side = group_of(side_name);
  TORCH_CHECK_VALUE(side->getRank() == group->getRank() && side->getSize() == group->getSize(),
                    "side: expected a group in which this process is rank ", group->getRank(), " of ", group->getSize(),
                    ", got one in which it is rank ", side->getRank(), " of ", side->getSize());
  TORCH_CHECK_VALUE(carries_cpu(side), "side: expected a group with a backend for the CPU, got ",
                    side->getBackendName());
  const auto state = state_of(name, group);
  const std::lock_guard lock(state->busy);
  state->side = side;
}

Agreement::Agreement(Ring& ring, const Call& call, const Prepare& prepare) {
  CallHeader header;
  if (ring.transport == nullptr) {
    prepare(header, lease_);
    return;
  }

  const bool on_gpus = ring.carries_accelerators && !call.payload.is_cpu();
  header.set(Field::op, static_cast<std::int64_t>(call.op));
  header.set(Field::device, std::int64_t{static_cast<int>(call.payload.type())});
  if (ring.state != nullptr) {
    busy_ = std::unique_lock(ring.state->busy, std::try_to_lock);
    if (!busy_.owns_lock()) {
      throw RingError("another thread of this process is in a call on this group; one call at a time");
    }
    TORCH_CHECK(call.capture == 0 || !on_gpus || ring.state->connected,
                "a graph is being captured, and the connections of the group have not been opened: call "
                "ringattn_ext.init(group) before");
    call_ = ++ring.state->calls;
    header.set(Field::call, call_);
  }

  std::exception_ptr refusal;
  try {
    prepare(header, lease_);
  } catch (...) {
    refusal = std::current_exception();
    header.refuse(reason_of(refusal));
  }
  const bool numbered = std::has_single_bit(static_cast<std::uint64_t>(call_));
  if (call.capture == 0 && (!on_gpus || numbered)) show(ring, header, refusal);
  if (refusal) std::rethrow_exception(refusal);

  if (on_gpus && !ring.state->connected) {
    connect(*ring.transport, call.payload);
    ring.state->connected = true;
  }
}

void Agreement::show(Ring& ring, CallHeader& header, const std::exception_ptr& refusal) {
  std::string text;
  try {
    Transport& carrier = ring.header_transport == nullptr ? *ring.transport : *ring.header_transport;
    const std::string obstacle = carrier.obstacle(at::kCPU);
    TORCH_CHECK_VALUE(obstacle.empty(), "group: the ranks compare their calls over the CPU, and ", obstacle,
                      ". ringattn_ext.init(group) makes a side group for that");
    const std::vector<CallHeader> headers = exchange_headers(carrier, header);
    text = verdict(headers);
    if (ring.state != nullptr) {
      // Ranks that have lost count say so once and go on together.
      for (const CallHeader& other : headers) {
        ring.state->calls = std::max(ring.state->calls.load(), other.get(Field::call));
      }
    }
  } catch (...) {
    if (!refusal) throw;
  }
  if (!refusal && !text.empty()) throw RingError(text);
}

}  // namespace ringattn
