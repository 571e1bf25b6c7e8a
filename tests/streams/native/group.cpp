// A backend that behaves as c10d's NCCL does with streams. Each rank has a stream for communication. A send or receive
// makes it wait for the stream that is current at the call; the messages between startCoalescing and endCoalescing run
// together as one operation there; Work::wait makes the stream that is current then wait for that operation, and nobody
// makes the host wait. A send may end before its receiver starts; a receive starts after its sender has.
//
// In truth bytes are taken when they are posted and land when the receiving host waits.
#include "native/group.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>

#include "native/machine.h"
#include "native/tensors.h"

namespace streams {
namespace {

constexpr std::chrono::seconds kPatience{30};

std::vector<std::uint8_t> bytes_of(const at::Tensor& tensor) {
  const auto* data = static_cast<const std::uint8_t*>(tensor.data_ptr());
  return {data, data + tensor.nbytes()};
}

// The mailboxes of a world: letters from one rank to another, in order.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<std::vector<std::uint8_t>>> mailboxes;
  std::map<std::pair<int, int>, std::int64_t> sent, received;  // how many have been posted
  std::atomic<bool> aborted = false;

  // false: it was ended. As with gloo, a wait for less than the usual time that comes to nothing ends all connections.
  bool deliver(int from, int to, const at::Tensor& tensor, std::chrono::milliseconds time,
               const std::atomic<bool>& ended) {
    std::unique_lock lock(mutex);
    auto& mailbox = mailboxes[{from, to}];
    const bool came = changed.wait_for(lock, time, [&] { return aborted || ended || !mailbox.empty(); });
    TORCH_CHECK(!aborted, "another rank failed");
    if (ended) return false;
    if (!came && time < kPatience) {
      aborted = true;
      changed.notify_all();
      TORCH_CHECK(false, "Timed out");
    }
    TORCH_CHECK(came, "rank ", to, " waits for a message from rank ", from, " in vain");
    TORCH_CHECK(mailbox.front().size() == tensor.nbytes(), "rank ", to, " expects ", tensor.nbytes(),
                " bytes from rank ", from, ", which sends ", mailbox.front().size());
    std::memcpy(tensor.data_ptr(), mailbox.front().data(), tensor.nbytes());
    mailbox.pop_front();
    return true;
  }
};

struct Parcel {
  at::Tensor tensor;
  int peer = 0;
  bool sends = false;
  std::vector<std::uint8_t> bytes;
};

class Backend;

class Exchange final : public c10d::Work {
 public:
  Exchange(Backend& backend, std::vector<Parcel> parcels) : backend_(backend), parcels_(std::move(parcels)) {}
  void post();
  bool wait(std::chrono::milliseconds) override;
  void abort() override;
  bool isCompleted() override { return waited_; }
  bool isSuccess() const override { return true; }

 private:
  Backend& backend_;
  std::vector<Parcel> parcels_;
  const Stream* stream_ = nullptr;
  std::int64_t end_ = kNever;
  bool posted_ = false;
  std::atomic<bool> waited_ = false, ended_ = false;
};

class Backend final : public c10d::Backend {
 public:
  Backend(std::shared_ptr<World> world, std::string name, int rank, int size, bool has_streams)
      : c10d::Backend(rank, size), world(std::move(world)), name(std::move(name)), has_streams_(has_streams) {}

  const std::string getBackendName() const override { return has_streams_ ? "nccl" : "gloo"; }
  bool supportsCoalescing() const override { return has_streams_; }

  void startCoalescing() override {
    TORCH_CHECK(!open_, "startCoalescing twice");
    open_ = true;
    parcels_.clear();
  }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    TORCH_CHECK(open_, "endCoalescing without startCoalescing");
    open_ = false;
    auto exchange = c10::make_intrusive<Exchange>(*this, std::exchange(parcels_, {}));
    if (!fault("late_post")) exchange->post();
    return exchange;
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int) override {
    return add({tensors.at(0), to, true, {}});
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int) override {
    return add({tensors.at(0), from, false, {}});
  }

  const Stream& stream_of(int device) {
    const Stream*& stream = streams_[device];
    if (stream == nullptr)
      stream = &machine().new_stream(device, "communication of rank " + std::to_string(getRank()) + " of " + name);
    return *stream;
  }

  const std::shared_ptr<World> world;
  const std::string name;

 private:
  c10::intrusive_ptr<c10d::Work> add(Parcel parcel) {
    TORCH_CHECK(parcel.tensor.is_contiguous(), "a message must be contiguous");
    TORCH_CHECK(parcel.tensor.is_privateuseone() == has_streams_, "a tensor on ", parcel.tensor.device(), " for ",
                getBackendName());
    if (!has_streams_) {
      auto exchange = c10::make_intrusive<Exchange>(*this, std::vector<Parcel>{std::move(parcel)});
      exchange->post();
      return exchange;
    }
    if (!open_) log().complain("a message outside of startCoalescing and endCoalescing");
    const int device = parcel.tensor.get_device();
    if (!fault("communication_wait")) {
      machine().block(stream_of(device), machine().record(machine().current_stream(device)));
    }
    parcels_.push_back(std::move(parcel));
    return c10::make_intrusive<Exchange>(*this, std::vector<Parcel>{});
  }

  const bool has_streams_;  // as NCCL; otherwise as gloo, for tensors on the CPU
  bool open_ = false;
  std::vector<Parcel> parcels_;
  std::map<int, const Stream*> streams_;
};

void Exchange::post() {
  posted_ = true;
  World& world = *backend_.world;
  const int rank = backend_.getRank();
  TORCH_CHECK(!world.aborted, "another rank failed");
  std::vector<Access> accesses;
  std::vector<Message> messages;
  {
    const std::lock_guard lock(world.mutex);
    for (const Parcel& parcel : parcels_) {
      const int from = parcel.sends ? rank : parcel.peer, to = parcel.sends ? parcel.peer : rank;
      auto& counts = parcel.sends ? world.sent : world.received;
      messages.push_back({parcel.sends, backend_.name, from, to, counts[{from, to}]++, accesses.size()});
      accesses.push_back({parcel.sends ? "sent" : "received", !parcel.sends, ranges_of(parcel.tensor)});
    }
  }
  if (!parcels_.empty() && parcels_[0].tensor.is_privateuseone()) {
    stream_ = &backend_.stream_of(parcels_[0].tensor.get_device());
    machine().operation(*stream_, "exchange", std::move(accesses), std::move(messages));
    end_ = machine().record(*stream_);
  }
  // After it is in the log: nobody has received what is not yet there.
  const std::lock_guard lock(world.mutex);
  for (Parcel& parcel : parcels_) {
    if (!parcel.sends) continue;
    parcel.bytes = bytes_of(parcel.tensor);
    world.mailboxes[{rank, parcel.peer}].push_back(parcel.bytes);
  }
  world.changed.notify_all();
}

void Exchange::abort() {
  const std::lock_guard lock(backend_.world->mutex);
  ended_ = true;
  backend_.world->changed.notify_all();
}

bool Exchange::wait(std::chrono::milliseconds time) {
  if (waited_.exchange(true)) return !ended_;
  if (!posted_) {  // a planted fault
    const Stream& current = machine().current_stream(parcels_[0].tensor.get_device());
    machine().block(backend_.stream_of(current.device), machine().record(current));
    post();
  }
  // First, because NCCL's does it whatever becomes of the messages.
  if (stream_ != nullptr && !fault("work_wait")) machine().block(machine().current_stream(stream_->device), end_);
  for (const Parcel& parcel : parcels_) {
    if (parcel.sends) continue;
    const auto patience = time > time.zero() && time < kPatience ? time : kPatience;
    if (!backend_.world->deliver(parcel.peer, backend_.getRank(), parcel.tensor, patience, ended_)) return false;
  }
  for (const Parcel& parcel : parcels_) {
    if (parcel.sends && parcel.bytes != bytes_of(parcel.tensor)) {
      log().complain("rank " + std::to_string(backend_.getRank()) + " changed what it was sending to rank " +
                     std::to_string(parcel.peer));
    }
  }
  return true;
}

std::mutex registry_mutex;
std::map<std::string, c10::intrusive_ptr<c10d::ProcessGroup>> groups;
std::map<std::string, std::shared_ptr<World>> worlds;

}  // namespace

void make_group(const std::string& name, const std::string& world, int rank, int size, const std::string& backends) {
  using Type = c10d::ProcessGroup::BackendType;
  const std::lock_guard lock(registry_mutex);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, size);
  const auto add_backend = [&](at::DeviceType device, Type type, const std::string& world_name, bool has_streams) {
    std::shared_ptr<World>& shared = worlds[world_name];
    if (shared == nullptr) shared = std::make_shared<World>();
    c10::intrusive_ptr<c10d::Backend> backend =
        c10::make_intrusive<Backend>(shared, world_name, rank, size, has_streams);
    group->setBackend(device, type, backend);
  };
  if (backends != "cpu") add_backend(at::kPrivateUse1, Type::NCCL, world, true);
  if (backends != "devices") add_backend(at::kCPU, Type::GLOO, world + " on the CPU", false);
  group->setGroupName(name);
  c10d::register_process_group(name, group);
  groups[name] = group;
}

void abort_groups() {
  log().add({.kind = "mark", .name = "aborted"});
  const std::lock_guard lock(registry_mutex);
  for (const auto& [name, world] : worlds) {
    const std::lock_guard world_lock(world->mutex);
    world->aborted = true;
    world->changed.notify_all();
  }
}

void destroy_groups() {
  const std::lock_guard lock(registry_mutex);
  for (const auto& [name, group] : groups) c10d::unregister_process_group(name);
  groups.clear();
  worlds.clear();
}

}  // namespace streams
