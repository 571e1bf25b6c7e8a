// One exchange is one coalesced call where the backend can do that (NCCL), and otherwise one asynchronous call for each
// message (gloo, whose own thread moves the bytes while the caller computes).
//
// NCCL's messages of one coalesced call are one kernel on the communicator of the group, on the group's own stream: it
// begins when the current stream has come as far as the call, and Work::wait makes the current stream wait for its end.
//
// gloo's work can only be waited for, without looking up, and a wait that ends early closes every connection of the
// group. So background threads wait, one for each peer, and this one watches the time, the user and the group.
#include "comm/c10d_transport.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <atomic>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "comm/background.h"
#include "comm/settings.h"
#include "core/error.h"
#include "core/host.h"

namespace ringattn {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Messages of one exchange between the same two ranks are told apart by their place in it.
constexpr int kTag = 0x52;
constexpr int kClosingTag = 0x51;  // of a message that nobody sends

constexpr auto kGlance = 100ms;              // between two looks at the time, the user and the group
constexpr auto kLook = 500ms;                // between two looks for reports of other ranks
constexpr auto kForever = std::chrono::hours(24 * 365);

struct Pending {
  WorkPtr work;
  std::string what;  // "send to rank 2"
  int peer = -1;     // none: all of a coalesced exchange
};

std::string seconds(std::chrono::milliseconds time) {
  const auto tenths = time.count() / 100;
  const std::string text = std::to_string(tenths / 10);
  return (tenths >= 100 || tenths % 10 == 0 ? text : text + '.' + std::to_string(tenths % 10)) + " s";
}

// Without gloo's place in its sources, and its advice, which is for other callers.
std::string text_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  if (const std::size_t end = text.find("] "); text.starts_with('[') && end != std::string::npos) {
    text.erase(0, end + 2);
  }
  if (const std::size_t advice = text.find(". This is typically"); advice != std::string::npos) text.resize(advice);
  return text;
}

// Who waits, and in what.
struct Waiter {
  int rank = -1;
  Stage stage;

  RingError failure(int peer, const std::string& what, const std::string& reason, bool silent = false) const {
    Whereabouts where;
    where.rank = rank;
    where.peer = peer;
    where.hop = stage.hop;
    where.silent = silent;
    return RingError(stage.text() + ": " + what + ' ' + reason, std::move(where));
  }
};

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

// How long one is given to take or to bring a message, by the clock of the caller; and by that of gloo, which can be
// told to end a wait, while others end it themselves.
struct Patience {
  std::chrono::milliseconds timeout, of_backend;
};

Patience patience_of(const Group& group) {
  const std::chrono::milliseconds timeout = timeout_of(group);
  const bool is_gloo = group->getBackend(c10::DeviceType::CPU)->getBackendName().find("gloo") != std::string::npos;
  return {timeout, is_gloo ? kForever : timeout};
}
class HostExchange final : public Exchange {
 public:
  HostExchange(Waiter waiter, Owner owner, Patience patience, std::vector<Pending> pending,
               std::vector<at::Tensor> tensors)
      : waiter_(std::move(waiter)),
        owner_(std::move(owner)),
        patience_(patience),
        state_(std::make_shared<State>(std::move(pending), std::move(tensors))) {
    std::map<int, std::vector<std::size_t>> of_peers;
    for (std::size_t i = 0; i < state_->pending.size(); ++i) of_peers[state_->pending[i].peer].push_back(i);
    for (const auto& [peer, indices] : of_peers) {
      calls_.start([state = state_, waiter = waiter_, indices = indices, time = patience.of_backend] {
        for (const std::size_t i : indices) wait_for(*state, waiter, i, time);
      });
    }
  }

  ~HostExchange() override { abort(); }

  void wait() override {
    const auto begin = Clock::now();
    bool warned = false;
    while (!calls_.wait_for(kGlance)) {
      const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
      try {
        if (host().check_interrupt != nullptr) host().check_interrupt();
        check_group();
        check_reports(waited);
        if (waited >= patience_.timeout) throw silence();
      } catch (...) {
        abort();
        throw;
      }
      if (!warned && waited >= warn_after()) warn(waited), warned = true;
    }
    if (const auto failure = calls_.failure()) {
      abort();
      std::rethrow_exception(failure);
    }
    state_->pending.clear();
  }

 private:
  // What the background threads share.
  struct State {
    State(std::vector<Pending> messages, std::vector<at::Tensor> memory)
        : pending(std::move(messages)), tensors(std::move(memory)), over(pending.size()) {}

    // A message that has not come tells more about its sender than one that has not been taken.
    std::size_t first_missing() const {
      for (std::size_t i = pending.size(); i-- > 0;) {
        if (!over[i]) return i;
      }
      return 0;
    }

    std::vector<Pending> pending;  // sends before receives
    std::vector<at::Tensor> tensors;
    std::vector<std::atomic<bool>> over;
  };

  static void wait_for(State& state, const Waiter& waiter, std::size_t i, std::chrono::milliseconds time) {
    const Pending& pending = state.pending[i];
    try {
      if (!pending.work->wait(time)) throw waiter.failure(pending.peer, pending.what, "was aborted");
    } catch (const RingError&) {
      throw;
    } catch (const std::exception& error) {
      throw waiter.failure(pending.peer, pending.what, "failed: " + text_of(error));
    }
    state.over[i] = true;
  }

  // Work in flight must not outlive its buffers: end it, then see it ended.
  void abort() noexcept {
    for (std::size_t i = 0; i < state_->pending.size(); ++i) {
      try {
        if (!state_->over[i]) state_->pending[i].work->abort();
      } catch (...) {  // the first failure is the one to report
      }
    }
    calls_.join();
    state_->pending.clear();
  }

  void check_group() const {
    try {
      c10d::resolve_process_group(owner_.name);
    } catch (const std::exception&) {
      throw waiter_.failure(waiter_.rank, "the group", "was destroyed by this process");
    }
  }

  // A rank that failed elsewhere in the ring may be noticed late by the one that this rank waits for.
  void check_reports(std::chrono::milliseconds waited) {
    const auto looks = waited / kLook;
    if (looks == looks_ || !questions_.wait_for(0ms)) return;
    looks_ = looks;
    const int rank = *failed_;
    if (rank >= 0 && rank != waiter_.rank) {
      const Pending& missing = state_->pending[state_->first_missing()];
      throw waiter_.failure(rank, missing.what, "was ended, since rank " + std::to_string(rank) + " reported a failure");
    }
    questions_.start([reports = owner_.reports, failed = failed_] { *failed = reports.any(); });
  }

  RingError silence() const {
    const Pending& missing = state_->pending[state_->first_missing()];
    return waiter_.failure(missing.peer, missing.what, "took longer than the group's timeout, " + seconds(patience_.timeout),
                           /*silent=*/true);
  }

  void warn(std::chrono::milliseconds waited) const {
    const Pending& missing = state_->pending[state_->first_missing()];
    const std::string text = "rank " + std::to_string(waiter_.rank) + " of group '" + owner_.name +
                             "' is still waiting after " + seconds(waited) + ", " + waiter_.stage.text() + ": " +
                             missing.what;
    if (host().warn != nullptr) return host().warn(text);
    std::cerr << "ringattn_ext: " << text << std::endl;
  }

  Waiter waiter_;
  Owner owner_;
  Patience patience_;
  std::shared_ptr<State> state_;
  BackgroundCalls calls_;
  std::chrono::milliseconds::rep looks_ = 0;
  BackgroundCalls questions_;  // to the store, which may not answer
  std::shared_ptr<std::atomic<int>> failed_ = std::make_shared<std::atomic<int>>(-1);
};

bool coalesces(const Group& group, at::DeviceType device) {
  return group->getBackend(device)->supportsCoalescing();
}

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
      return std::make_unique<HostExchange>(waiter, owner_, patience_of(group_), std::move(pending), std::move(tensors));
    };
    try {
      const auto post_all = [&](const std::vector<Message>& messages, bool send) {
        int tag = kTag;
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
          WorkPtr work = send ? group_->send(list, message.peer, tag) : group_->recv(list, message.peer, tag);
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

  // gloo closes every connection of a group when one wait on it ends early.
  void close() noexcept override {
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank()) continue;
      try {
        std::vector<at::Tensor> nothing{at::zeros({1}, at::kByte)};
        group_->recv(nothing, peer, kClosingTag)->wait(1ms);
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
    WorkPtr work = group_->endCoalescing(device);
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
