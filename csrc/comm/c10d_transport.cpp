// One exchange is one coalesced call where the backend can do that (NCCL), and otherwise one asynchronous call for each
// message (gloo, whose own thread moves the bytes while the caller computes).
//
// NCCL's messages of one coalesced call are one kernel on the communicator of the group, on the group's own stream: it
// begins when the current stream has come as far as the call, and Work::wait makes the current stream wait for its end.
#include "comm/c10d_transport.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/error.h"

namespace ringattn {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Messages of one exchange between the same two ranks are told apart by their place in it.
constexpr int kTag = 0x52;

struct Pending {
  WorkPtr work;
  std::string what;  // "send to rank 2"
  bool on_stream = false;
};

[[noreturn]] void fail(const std::string& what, const std::string& reason) {
  throw RingError(what + " failed: " + reason);
}

class C10dExchange final : public Exchange {
 public:
  C10dExchange(std::vector<Pending> pending, std::vector<at::Tensor> tensors)
      : pending_(std::move(pending)), tensors_(std::move(tensors)) {}

  ~C10dExchange() override { abort(); }

  void wait() override {
    while (!pending_.empty()) {
      const Pending current = pending_.front();
      try {
        if (!current.work->wait()) fail(current.what, "it was aborted");
      } catch (const RingError&) {
        abort();
        throw;
      } catch (const c10::Error& error) {
        abort();
        fail(current.what, error.what_without_backtrace());
      } catch (const std::exception& error) {
        abort();
        fail(current.what, error.what());
      }
      pending_.erase(pending_.begin());
    }
  }

 private:
  // Work in flight must not outlive its buffers: end it, then see it ended. Where messages travel on a stream, what is
  // freed is not used before that stream is done with it once the current one waits for it; ending the work there would
  // end the communicator of the whole group.
  void abort() noexcept {
    for (const Pending& pending : pending_) {
      try {
        if (!pending.on_stream) pending.work->abort();
      } catch (...) {  // the first failure has been reported, or nobody waits for this exchange any more
      }
      try {
        pending.work->wait();
      } catch (...) {
      }
    }
    pending_.clear();
  }

  std::vector<Pending> pending_;
  std::vector<at::Tensor> tensors_;
};

bool coalesces(const c10::intrusive_ptr<c10d::ProcessGroup>& group, at::DeviceType device) {
  return group->getBackend(device)->supportsCoalescing();
}

class C10dTransport final : public Transport {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

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

  std::unique_ptr<Exchange> post(std::vector<Message> sends, std::vector<Message> receives) override {
    const auto is_empty = [](const Message& message) { return message.tensor.numel() == 0; };
    std::vector<Pending> pending;
    std::vector<at::Tensor> tensors;
    std::string what = "the exchange";
    std::optional<at::DeviceType> coalesced;
    try {
      const auto post_all = [&](const std::vector<Message>& messages, bool send) {
        int tag = kTag;
        for (const Message& message : messages) {
          ++tag;  // also for an empty message: the other side counts it too
          if (is_empty(message)) continue;
          what = (send ? "send to rank " : "receive from rank ") + std::to_string(message.peer);
          // As bytes, since backends for GPUs do not know every dtype.
          const at::Tensor& tensor = message.tensor;
          std::vector<at::Tensor> list{tensor.is_cpu() ? tensor : tensor.view({-1}).view(at::kByte)};
          tensors.push_back(tensor);
          const at::DeviceType device = message.tensor.device().type();
          if (!coalesced && coalesces(group_, device)) {
            group_->startCoalescing(device);
            coalesced = device;
          }
          WorkPtr work = send ? group_->send(list, message.peer, tag) : group_->recv(list, message.peer, tag);
          if (!coalesced) pending.push_back({std::move(work), what});
        }
      };
      post_all(sends, true);
      post_all(receives, false);
      close_coalescing(coalesced, pending);
    } catch (const std::exception& error) {
      const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
      try {
        close_coalescing(coalesced, pending);
      } catch (const std::exception&) {  // the first error is the one to report
      }
      C10dExchange(std::move(pending), std::move(tensors));  // ends what was posted
      fail(what, torch_error != nullptr ? torch_error->what_without_backtrace() : error.what());
    }
    return std::make_unique<C10dExchange>(std::move(pending), std::move(tensors));
  }

 private:
  void close_coalescing(std::optional<at::DeviceType>& coalesced, std::vector<Pending>& pending) {
    if (!coalesced) return;
    const at::DeviceType device = *std::exchange(coalesced, std::nullopt);
    WorkPtr work = group_->endCoalescing(device);
    if (work) pending.push_back({std::move(work), "the exchange", /*on_stream=*/true});  // none if nothing was posted
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace

std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return std::make_unique<C10dTransport>(std::move(group));
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
