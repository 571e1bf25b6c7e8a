#include "ops/groups.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <map>
#include <random>
#include <set>

#include "comm/c10d_transport.h"
#include "comm/settings.h"
#include "core/host.h"
#include "ops/checks.h"
#include "ops/device.h"

namespace ringattn {
namespace {

using namespace std::chrono_literals;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// For the report of a rank that failed because of another: it comes before its connections close. One that was waited
// for in vain may still be waiting itself, and just as long.
constexpr auto kPatienceWithTheClosed = 200ms;
constexpr auto kPatienceWithTheSilent = 1500ms;

// Names are used again when groups are destroyed and made anew, so the group itself decides whose state it is.
std::shared_ptr<GroupState> state_of(const std::string& name, const Group& group) {
  static std::mutex mutex;
  static auto& states = *new std::map<std::string, std::shared_ptr<GroupState>>;  // not destroyed: devices may be gone
  static std::set<std::string> names;                                             // that groups have had
  const auto find = [&] {
    // What was kept for groups that are gone goes too.
    std::erase_if(states, [](const auto& entry) { return entry.second->group.expired(); });
    const auto found = states.find(name);
    return found == states.end() || found->second->group.lock() != group ? nullptr : found->second;
  };
  {
    const std::lock_guard lock(mutex);
    if (auto state = find()) return state;
  }
  const bool inherited = host().is_inherited != nullptr && host().is_inherited(name);  // without the lock
  const std::lock_guard lock(mutex);
  auto state = find();
  if (state == nullptr) {
    const bool is_first = names.insert(name).second;
    state = states[name] = std::make_shared<GroupState>(group, inherited ? 0 : ::getpid(), is_first);
  }
  return state;
}

Group side_of(GroupState& state) {
  const std::lock_guard lock(state.for_side);
  return state.side;
}

Group group_of(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    C10_THROW_ERROR(ValueError, "group: expected the name of a process group that this process is in, got '" + name +
                                    "', which is unknown here, destroyed, or has other members");
  }
}

constexpr int kCallBits = 40;  // of a mark: the number of the call; above are those of the generation

std::int64_t next_generation() {
  static std::atomic<std::int64_t> last = 0;
  return ++last;
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

// The global ranks of the members, as far as the backend knows them.
std::int64_t members_hash(const Group& group) {
  std::vector<std::int64_t> members{group->getSize()};
  try {
    const auto options = group->getDefaultBackend()->getBackendOptions();
    for (const std::uint64_t rank : options->global_ranks_in_group) members.push_back(static_cast<std::int64_t>(rank));
  } catch (const std::exception&) {  // a backend that does not say
  }
  return sizes_hash(members);
}

// One hop in each direction.
void connect(Transport& transport, at::Device where) {
  const int P = transport.world_size(), next = (transport.rank() + 1) % P, previous = (transport.rank() - 1 + P) % P;
  const at::Tensor out = at::zeros({1}, at::TensorOptions().device(where)), in = at::empty_like(out);
  const Stage stage{"opening connections"};
  transport.post({{out, next}}, {{in, previous}}, stage)->wait();
  transport.post({{out, previous}}, {{in, next}}, stage)->wait();
}

}  // namespace

GroupState::GroupState(const Group& process_group, int made_by, bool is_first)
    : group(process_group), generation(next_generation()), process(made_by), life(std::make_shared<Life>(is_first)) {}

Ring Ring::of_group(const std::string& name) {
  Ring ring;
  if (name.empty()) return ring;
  const Group group = group_of(name);
  ring.name = name;
  ring.rank = group->getRank();
  ring.world_size = group->getSize();
  if (ring.world_size == 1) return ring;
  ring.state = state_of(name, group);
  const Owner owner{c10::weak_intrusive_ptr(group), name, {group->getStore(), ring.state->life}};
  ring.transport = c10d_transport(group, owner);
  ring.carries_accelerators = ringattn::carries_accelerators(group);
  if (const Group side = side_of(*ring.state)) ring.header_transport = c10d_transport(side, owner);
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

std::int64_t generation_of(const Ring& ring) { return ring.state == nullptr ? 0 : ring.state->generation; }

void check_generation(const Ring& ring, std::int64_t generation) {
  if (generation == generation_of(ring)) return;
  throw RingError("group '" + ring.name + "' is another one than that of the forward pass, which was destroyed",
                  {ring.rank, -1, ring.name});
}

std::int64_t check_mark(const Ring& ring, std::int64_t mark) {
  check_generation(ring, mark >> kCallBits);
  return mark & ((std::int64_t{1} << kCallBits) - 1);
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
  return side_of(*state_of(name, group)) == nullptr;
}

void use_side_group(const std::string& name, const std::string& side_name) {
  const Group group = group_of(name), side = group_of(side_name);
  TORCH_CHECK_VALUE(side->getRank() == group->getRank() && side->getSize() == group->getSize(),
                    "side: expected a group in which this process is rank ", group->getRank(), " of ", group->getSize(),
                    ", got one in which it is rank ", side->getRank(), " of ", side->getSize());
  TORCH_CHECK_VALUE(carries_cpu(side), "side: expected a group with a backend for the CPU, got ",
                    side->getBackendName());
  const auto state = state_of(name, group);
  const std::lock_guard lock(state->for_side);
  state->side = side;
}

Agreement::Agreement(Ring& ring, const Call& call, const Prepare& prepare)
    : ring_(ring), op_(call.op), capture_(call.capture) {
  CallHeader header;
  if (ring.transport == nullptr) {
    prepare(header, lease_);
    return;
  }

  const bool on_gpus = ring.carries_accelerators && !call.payload.is_cpu();
  header.set(Field::op, static_cast<std::int64_t>(call.op));
  header.set(Field::device, std::int64_t{static_cast<int>(call.payload.type())});
  if (ring.state != nullptr) {
    Whereabouts here{ring.rank, -1, ring.name};
    if (ring.state->process != ::getpid()) {
      throw RingError("group '" + ring.name +
                          "' belongs to the process that this one was forked from; make a group in this process",
                      here);
    }
    busy_ = std::unique_lock(ring.state->busy, std::try_to_lock);
    if (!busy_.owns_lock()) {
      throw RingError(
          "another thread of this process, or what this one has interrupted, is in a call on this group; "
          "one call at a time",
          here);
    }
    if (const auto& failure = ring.state->failure) {
      throw RingError(
          "group '" + ring.name + "' is broken; destroy it and make a new one. What broke it: " + failure->text(),
          failure->where());
    }
    TORCH_CHECK(call.capture == 0 || !on_gpus || ring.state->connected,
                "a graph is being captured, and the connections of the group have not been opened: call "
                "ringattn_ext.init(group) before");
    TORCH_CHECK(call.capture == 0 || !ring.state->unsettled,
                "a graph is being captured, and this rank has refused a call of which the others have not heard: make "
                "one before that is not captured");
    call_ = ++ring.state->calls;
    header.set(Field::call, call_);
    header.life = static_cast<std::int64_t>(std::random_device()());
    if (const Group group = ring.state->group.lock()) header.set(Field::members, members_hash(group));
  }

  std::exception_ptr refusal;
  try {
    header.set(Field::check, as_value_error([] { return static_cast<std::int64_t>(settings().check); }));
    prepare(header, lease_);
  } catch (...) {
    refusal = std::current_exception();
    header.refuse(reason_of(refusal));
  }
  if (is_compared(call, on_gpus)) {
    show(header, on_gpus, refusal);
  } else if (refusal) {
    ring.state->unsettled = true;
  }
  if (refusal) std::rethrow_exception(refusal);

  if (on_gpus && !ring.state->connected) {
    carry_out([&] { connect(*ring.transport, call.payload); });
    ring.state->connected = true;
  }
}

std::int64_t Agreement::mark() const { return generation_of(ring_) << kCallBits | call_; }

Reports Agreement::reports() const {
  const Group group = ring_.state->group.lock();
  return group ? Reports(group->getStore(), ring_.state->life) : Reports();
}

// The same on all ranks, whatever they were told or found wrong, unless they are not in step already.
bool Agreement::is_compared(const Call& call, bool on_gpus) const {
  if (call.capture != 0) return false;
  if (ring_.state == nullptr || !ring_.state->agreed || ring_.state->unsettled) return true;
  switch (settings().check) {
    case Check::always:
      return true;
    case Check::off:
      return false;
    case Check::automatic:
      return !on_gpus || std::has_single_bit(static_cast<std::uint64_t>(call_));
  }
  return true;
}

void Agreement::show(CallHeader& header, bool on_gpus, const std::exception_ptr& refusal) {
  Transport& carrier = ring_.header_transport == nullptr ? *ring_.transport : *ring_.header_transport;
  if (const std::string obstacle = carrier.obstacle(at::kCPU); !obstacle.empty()) {
    if (refusal) return;
    TORCH_CHECK_VALUE(false, "group: the ranks compare their calls over the CPU, and ", obstacle,
                      ". ringattn_ext.init(group) makes a side group for that");
  }
  std::vector<CallHeader> headers;
  try {
    headers = exchange_headers(carrier, header);
  } catch (...) {
    if (!refusal) fail(std::current_exception());
    try {
      fail(std::current_exception());
    } catch (const RingError&) {  // this rank's own refusal is what its caller should see
    }
    return;
  }
  const Verdict found = verdict(headers);
  if (ring_.state != nullptr) {
    // Ranks that have lost count say so once and go on together.
    bool in_step = true;
    for (const CallHeader& other : headers) {
      if (other.get(Field::protocol) != CallHeader::kProtocol) continue;
      in_step &= other.get(Field::call) == call_;
      ring_.state->calls = std::max(ring_.state->calls.load(), other.get(Field::call));
    }
    const auto compares_all = [&] {
      return settings().check == Check::always || (settings().check == Check::automatic && !on_gpus);
    };
    if (!in_step && ring_.state->agreed && !compares_all()) {
      ring_.state->failure = RingError(found.text, {ring_.rank, found.rank, ring_.name, call_});
    }
    ring_.state->agreed |= found.text.empty();
    ring_.state->unsettled = false;
    if (ring_.state->life->number == 0) ring_.state->life->number = headers.front().life;
  }
  if (!refusal && !found.text.empty()) throw RingError(found.text, {ring_.rank, found.rank, ring_.name, call_});
}

void Agreement::fail(const std::exception_ptr& error) {
  if (ring_.state == nullptr || capture_ != 0) std::rethrow_exception(error);
  try {
    std::rethrow_exception(error);
  } catch (const RingError& own) {
    ring_.state->failure = explain(own);
    throw *ring_.state->failure;
  } catch (...) {
    const std::string reason = reason_of(error);
    reports().publish(ring_.rank, {-1, false, reason});
    ring_.transport->close();
    if (ring_.header_transport != nullptr) ring_.header_transport->close();
    ring_.state->failure = RingError("rank " + std::to_string(ring_.rank) + " failed in call " + std::to_string(call_) +
                                         " (" + op_name(op_) + "): " + reason,
                                     {ring_.rank, ring_.rank, ring_.name, call_});
    throw;
  }
}

// What broke the group, as this rank saw it and as others have told; they are told in turn, and the connections end.
RingError Agreement::explain(const RingError& own) const {
  Whereabouts where = own.where();
  const Reports reports = this->reports();
  reports.publish(ring_.rank, {where.peer, where.silent, own.text()});
  ring_.transport->close();
  if (ring_.header_transport != nullptr) ring_.header_transport->close();

  // From rank to rank, each blaming the next, to one that has blamed nobody.
  std::optional<Report> last;
  int reporter = -1;
  std::set<int> seen{ring_.rank};
  while (where.peer >= 0 && seen.insert(where.peer).second) {
    const auto report = reports.of(where.peer, where.silent ? kPatienceWithTheSilent : kPatienceWithTheClosed);
    if (!report) break;
    last = report;
    reporter = where.peer;
    if (report->peer < 0 || seen.contains(report->peer)) break;
    where.peer = report->peer;
    where.silent = report->silent;
  }
  const char* fate = reporter == where.peer ? "failed" : where.silent ? "gave no sign of life" : "is lost";
  std::string text = where.peer < 0 ? "the ring was ended" : "rank " + std::to_string(where.peer) + ' ' + fate;
  text += ", in call " + std::to_string(call_) + " (" + op_name(op_) + ") on group '" + ring_.name + "'; " + own.text();
  if (last) text += "; rank " + std::to_string(reporter) + " reported: " + last->text;
  where.rank = ring_.rank;
  where.group = ring_.name;
  where.call = call_;
  return RingError(text, std::move(where));
}

}  // namespace ringattn
