#include "ops/groups.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <bit>
#include <exception>
#include <map>

#include "comm/c10d_transport.h"
#include "core/error.h"

namespace ringattn {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Names are used again when groups are destroyed and made anew, so the group itself decides whose state it is.
std::shared_ptr<GroupState> state_of(const std::string& name, const Group& group) {
  static std::mutex mutex;
  static auto& states = *new std::map<std::string, std::shared_ptr<GroupState>>;  // not destroyed: devices may be gone
  const std::lock_guard lock(mutex);
  std::shared_ptr<GroupState>& state = states[name];
  if (state == nullptr || state->group.lock() != group) {
    std::erase_if(states, [](const auto& entry) { return entry.second != nullptr && entry.second->group.expired(); });
    return states[name] = std::make_shared<GroupState>(group);
  }
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
  ring.checks_every_call = !carries_accelerators(group);
  const Group side = ring.state->side.lock();
  if (side != nullptr && side != group) ring.header_transport = c10d_transport(side);
  return ring;
}

Lease Ring::lease(at::Device device, bool capturing) const {
  return state == nullptr || capturing ? Lease() : Lease(state->workspace, device);
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
  const Group side = state_of(name, group)->side.lock();
  return side == nullptr || side == group;
}

void use_side_group(const std::string& name, const std::string& side_name) {
  const Group group = group_of(name), side = group_of(side_name);
  TORCH_CHECK_VALUE(side->getRank() == group->getRank() && side->getSize() == group->getSize(),
                    "side: expected a group in which this process is rank ", group->getRank(), " of ", group->getSize(),
                    ", got one in which it is rank ", side->getRank(), " of ", side->getSize());
  TORCH_CHECK_VALUE(carries_cpu(side), "side: expected a group with a backend for the CPU, got ",
                    side->getBackendName());
  state_of(name, group)->side = c10::weak_intrusive_ptr<c10d::ProcessGroup>(side);
}

Agreement::Agreement(Ring& ring, Op op, bool capturing, const std::function<void(CallHeader&)>& prepare) {
  CallHeader header;
  if (ring.transport == nullptr) {
    prepare(header);
    return;
  }

  header.set(Field::op, static_cast<std::int64_t>(op));
  if (ring.state != nullptr) {
    busy_ = std::unique_lock(ring.state->busy, std::try_to_lock);
    if (!busy_.owns_lock()) {
      throw RingError("another thread of this process is in a call on this group; one call at a time");
    }
    call_ = ++ring.state->calls;
    header.set(Field::call, call_);
  }

  std::exception_ptr refusal;
  try {
    prepare(header);
  } catch (...) {
    refusal = std::current_exception();
    header.refuse(reason_of(refusal));
  }

  const bool checks = ring.checks_every_call || std::has_single_bit(static_cast<std::uint64_t>(call_));
  if (capturing || !checks) {
    if (refusal) std::rethrow_exception(refusal);
    return;
  }

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
  if (refusal) std::rethrow_exception(refusal);
  if (!text.empty()) throw RingError(text);
}

}  // namespace ringattn
