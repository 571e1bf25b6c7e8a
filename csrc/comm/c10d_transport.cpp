// One exchange is one coalesced call where the backend can do that (NCCL), and otherwise one asynchronous call for each
// message (gloo, whose own thread moves the bytes while the caller computes).
#include "comm/c10d_transport.h"

#include <c10/util/Exception.h>

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
  // Work in flight must not outlive its buffers: end it, then see it ended.
  void abort() noexcept {
    for (const Pending& pending : pending_) {
      try {
        pending.work->abort();
        pending.work->wait();
      } catch (...) {  // the first failure has been reported, or nobody waits for this exchange any more
      }
    }
    pending_.clear();
  }

  std::vector<Pending> pending_;
  std::vector<at::Tensor> tensors_;
};

class C10dTransport final : public Transport {
 public:
  explicit C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

  int rank() const override { return group_->getRank(); }
  int world_size() const override { return group_->getSize(); }

  at::Device header_device() const override {
    const auto devices = group_->getDeviceTypes();
    for (const at::Device& device : devices) {
      if (device.is_cpu()) return device;
    }
    TORCH_CHECK(!devices.empty(), "the process group has no backend");
    return devices.front();
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
          std::vector<at::Tensor> list{message.tensor};
          tensors.push_back(message.tensor);
          const at::DeviceType device = message.tensor.device().type();
          if (!coalesced && group_->getBackend(device)->supportsCoalescing()) {
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
    pending.push_back({group_->endCoalescing(device), "the exchange"});
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace

std::unique_ptr<Transport> c10d_transport(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  return std::make_unique<C10dTransport>(std::move(group));
}

}  // namespace ringattn
