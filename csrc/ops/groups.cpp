#include "ops/groups.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <exception>
#include <map>

#include "comm/c10d_transport.h"
#include "core/error.h"

namespace ringattn {
namespace {

// Names are used again when groups are destroyed and made anew, so the group itself decides whose state it is.
std::shared_ptr<GroupState> state_of(const std::string& name, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  static std::mutex mutex;
  static std::map<std::string, std::shared_ptr<GroupState>> states;
  const std::lock_guard lock(mutex);
  std::shared_ptr<GroupState>& state = states[name];
  if (state == nullptr || state->group.lock() != group) state = std::make_shared<GroupState>(group);
  return state;
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
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  try {
    group = c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    C10_THROW_ERROR(ValueError, "group: expected the name of a process group that this process is in, got '" + name +
                                    "', which is unknown here, destroyed, or has other members");
  }
  ring.rank = group->getRank();
  ring.world_size = group->getSize();
  if (ring.world_size > 1) {
    ring.transport = c10d_transport(group);
    ring.state = state_of(name, group);
  }
  return ring;
}

Agreement::Agreement(Ring& ring, Op op, const std::function<void(CallHeader&)>& prepare) {
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

  std::string text;
  try {
    const std::vector<CallHeader> headers = exchange_headers(*ring.transport, header);
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
