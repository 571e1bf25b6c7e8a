// One exchange is one coalesced call where the backend can do that (NCCL), and otherwise one asynchronous call for each
// message (gloo, whose own thread moves the bytes while the caller computes).
//
// NCCL's messages of one coalesced call are one kernel on the communicator of the group, on the group's own stream: it
// begins when the current stream has come as far as the call, and Work::wait makes the current stream wait for its end.
#include "comm/c10d_transport.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "comm/host_exchange.h"
#include "core/error.h"

namespace ringattn {
namespace {

using namespace std::chrono_literals;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// Messages of one exchange between the same two ranks are told apart by their place in it; and a rank that compares
// calls does not take what another passes on. Users have tags of their own on a group: small ones.
constexpr int kTag = 0xa000000, kTagOfHeaders = 0xa001000;
constexpr int kNothingTag = 0xa002000;  // of a message that nobody sends

constexpr auto kForever = std::chrono::hours(24 * 365);

// Messages that travel on a stream, as one.
class StreamExchange final : public Exchange {
 public:
  StreamExchange(Waiter waiter, std::vector<Pending> pending, std::vector<at::Tensor> tensors)
      : waiter_(std::move(waiter)), pending_(std::move(pending)), tensors_(std::move(tensors)) {}

  // What is freed is not used before the stream is done with it once the current one waits for it; ending the work
  // would end the communicator of the whole group.
  ~StreamExchange() override {
    for (const Pending& pending : pending_) {
      try {
        pending.work->wait();
      } catch (...) {  // nobody waits for this exchange any more
      }
    }
  }

  void wait() override {
    for (const Pending& pending : std::exchange(pending_, {})) {
      try {
        if (!pending.work->wait()) throw waiter_.failure(pending.peer, pending.what, "was aborted");
      } catch (const RingError&) {
        throw;
      } catch (const std::exception& error) {
        throw waiter_.failure(pending.peer, pending.what, "failed: " + text_of(error));
      }
    }
  }

 private:
  Waiter waiter_;
  std::vector<Pending> pending_;
  std::vector<at::Tensor> tensors_;
};

std::chrono::milliseconds timeout_of(const Group& group) {
  try {
    return group->getBackend(c10::DeviceType::CPU)->getBackendOptions()->timeout;
  } catch (const std::exception&) {  // a backend that does not say
    return ::kBackendDefaultTimeout;
  }
}

// A receive of what nobody sends; throws if the connection is closed.
c10::intrusive_ptr<c10d::Work> begin_nothing(const Group& group, int peer) {
  std::vector<at::Tensor> nothing{at::zeros({1}, at::kByte)};
  return group->recv(nothing, peer, kNothingTag);
}

// Also of groups without a backend for the CPU.
bool has_gloo(const Group& group) {
  try {
    return group->getBackend(c10::DeviceType::CPU)->getBackendName().find("gloo") != std::string::npos;
  } catch (const std::exception&) {
    return false;
  }
}

// Whether gloo connects ranks when they have something for each other, and waits for that in the middle of a call.
bool connects_late() {
  const char* text = std::getenv("TORCH_GLOO_LAZY_INIT");
  return text != nullptr && *text != '\0' && *text != '0';
}

Patience patience_of(const Group& group) {
  const std::chrono::milliseconds timeout = timeout_of(group);
  if (!has_gloo(group)) return {timeout, timeout, nullptr};
  return {timeout, kForever, [group](int peer) { begin_nothing(group, peer); }, !connects_late()};
}

bool coalesces(const Group& group, at::DeviceType device) { return group->getBackend(device)->supportsCoalescing(); }

class C10dTransport final : public Transport {
 public:
  C10dTransport(Group group, Owner owner) : group_(std::move(group)), owner_(std::move(owner)) {}

  int rank() const override { return group_->getRank(); }
  int world_size() const override { return group_->getSize(); }

  std::string obstacle(at::Device device) const override {
    for (const at::Device& served : group_->getDeviceTypes()) {
      if (served.type() != device.type()) continue;
      if (device.is_cpu() || coalesces(group_, device.type())) return "";
      const std::string name = group_->getBackend(device.type())->getBackendName();
      return "its backend for " + device.str() + " is " + name + ", which cannot send and receive there side by side" +
             (device.is_cuda() ? "; nccl can: init_process_group('cpu:gloo,cuda:nccl')" : "");
    }
    return "it has no backend for " + device.str() + "; 'cpu:gloo,cuda:nccl' has one for both kinds of device";
  }

  std::unique_ptr<Exchange> post(std::vector<Message> sends, std::vector<Message> receives,
                                 const Stage& stage) override {
    const auto is_empty = [](const Message& message) { return message.tensor.numel() == 0; };
    const Waiter waiter{rank(), stage};
    std::vector<Pending> pending;
    std::vector<at::Tensor> tensors;
    std::string what = "the exchange";
    int peer = -1;
    std::optional<at::DeviceType> coalesced;
    bool on_stream = false;
    const auto make = [&]() -> std::unique_ptr<Exchange> {
      if (on_stream) return std::make_unique<StreamExchange>(waiter, std::move(pending), std::move(tensors));
      return host_exchange(waiter, owner_, patience_of(group_), std::move(pending), std::move(tensors));
    };
    try {
      const auto post_all = [&](const std::vector<Message>& messages, bool send) {
        int tag = stage.hop < 0 ? kTagOfHeaders : kTag;
        for (const Message& message : messages) {
          ++tag;  // also for an empty message: the other side counts it too
          if (is_empty(message)) continue;
          what = (send ? "send to rank " : "receive from rank ") + std::to_string(message.peer);
          peer = message.peer;
          // As bytes, since backends for GPUs do not know every dtype.
          const at::Tensor& tensor = message.tensor;
          std::vector<at::Tensor> list{tensor.is_cpu() ? tensor : tensor.view({-1}).view(at::kByte)};
          tensors.push_back(tensor);
          const at::DeviceType device = message.tensor.device().type();
          if (!coalesced && coalesces(group_, device)) {
            group_->startCoalescing(device);
            coalesced = device;
            on_stream = true;
          }
          auto work = send ? group_->send(list, message.peer, tag) : group_->recv(list, message.peer, tag);
          if (!coalesced) pending.push_back({std::move(work), what, message.peer});
        }
      };
      post_all(sends, true);
      post_all(receives, false);
      close_coalescing(coalesced, pending);
    } catch (const std::exception& error) {
      const std::string reason = text_of(error);
      try {
        close_coalescing(coalesced, pending);
      } catch (const std::exception&) {  // the first error is the one to report
      }
      make();  // ends what was posted
      throw waiter.failure(peer, what, "failed: " + reason);
    }
    return make();
  }

  // gloo closes every connection of a group when one wait on it ends early. Of other backends nothing is known that
  // would do so.
  void close() noexcept override {
    if (!has_gloo(group_)) return;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank()) continue;
      try {
        begin_nothing(group_, peer)->wait(1ms);
      } catch (const std::exception& error) {
        if (text_of(error).find("imed out") != std::string::npos) return;
      } catch (...) {
        return;
      }
    }
  }

 private:
  void close_coalescing(std::optional<at::DeviceType>& coalesced, std::vector<Pending>& pending) {
    if (!coalesced) return;
    const at::DeviceType device = *std::exchange(coalesced, std::nullopt);
    auto work = group_->endCoalescing(device);
    if (work) pending.push_back({std::move(work), "the exchange"});  // none if nothing was posted
  }

  Group group_;
  Owner owner_;
};

}  // namespace

std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group, Owner owner) {
  return std::make_unique<C10dTransport>(std::move(group), std::move(owner));
}

bool carries_cpu(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto devices = group->getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(), [](const at::Device& device) { return device.is_cpu(); });
}

bool carries_accelerators(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto devices = group->getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(),
                     [&](const at::Device& device) { return !device.is_cpu() && coalesces(group, device.type()); });
}

}  // namespace ringattn
