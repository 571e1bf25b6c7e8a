// A send leaves a view of its tensor in the mailbox of the (sender, receiver) pair. The receiver copies out of it when
// it waits, and marks it as taken, which is what the sender waits for. No message is ever buffered, as on a network
// with rendezvous: a buffer that is written too early shows as a wrong number.
#include "comm/loopback_transport.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

#include "core/error.h"

namespace ringattn {

struct LoopbackHub::State {
  struct Letter {
    at::Tensor tensor;
    bool taken = false;
  };

  int world_size = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<std::shared_ptr<Letter>>> mailboxes;  // [sender * world_size + receiver]
  std::string failure;

  std::deque<std::shared_ptr<Letter>>& mailbox(int sender, int receiver) {
    return mailboxes[static_cast<std::size_t>(sender) * world_size + receiver];
  }

  template <typename Condition>
  void wait_until(std::unique_lock<std::mutex>& lock, Condition condition) {
    changed.wait(lock, [&] { return !failure.empty() || condition(); });
    if (!failure.empty()) throw RingError(failure);
  }
};

namespace {

using State = LoopbackHub::State;

class LoopbackExchange final : public Exchange {
 public:
  LoopbackExchange(State& state, int rank, std::vector<std::shared_ptr<State::Letter>> sent,
                   std::vector<Message> receives)
      : state_(state), rank_(rank), sent_(std::move(sent)), receives_(std::move(receives)) {}

  void wait() override {
    for (Message& message : receives_) {
      std::shared_ptr<State::Letter> letter;
      {
        std::unique_lock lock(state_.mutex);
        auto& mailbox = state_.mailbox(message.peer, rank_);
        state_.wait_until(lock, [&] { return !mailbox.empty(); });
        letter = mailbox.front();
        mailbox.pop_front();
      }
      if (letter->tensor.nbytes() != message.tensor.nbytes()) {
        throw RingError("receive from rank " + std::to_string(message.peer) + " failed: expected " +
                        std::to_string(message.tensor.nbytes()) + " bytes, got " +
                        std::to_string(letter->tensor.nbytes()));
      }
      message.tensor.copy_(letter->tensor);
      const std::lock_guard lock(state_.mutex);
      letter->taken = true;
      state_.changed.notify_all();
    }
    std::unique_lock lock(state_.mutex);
    for (const auto& letter : sent_) state_.wait_until(lock, [&] { return letter->taken; });
  }

 private:
  State& state_;
  int rank_;
  std::vector<std::shared_ptr<State::Letter>> sent_;
  std::vector<Message> receives_;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(State& state, int rank) : state_(state), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return state_.world_size; }
  at::Device header_device() const override { return at::kCPU; }

  std::unique_ptr<Exchange> post(std::vector<Message> sends, std::vector<Message> receives) override {
    std::erase_if(sends, [](const Message& message) { return message.tensor.numel() == 0; });
    std::erase_if(receives, [](const Message& message) { return message.tensor.numel() == 0; });
    std::vector<std::shared_ptr<State::Letter>> sent;
    {
      const std::lock_guard lock(state_.mutex);
      for (const Message& message : sends) {
        sent.push_back(std::make_shared<State::Letter>(State::Letter{message.tensor}));
        state_.mailbox(rank_, message.peer).push_back(sent.back());
      }
    }
    state_.changed.notify_all();
    return std::make_unique<LoopbackExchange>(state_, rank_, std::move(sent), std::move(receives));
  }

 private:
  State& state_;
  int rank_;
};

}  // namespace

LoopbackHub::LoopbackHub(int world_size) : state_(std::make_unique<State>()) {
  state_->world_size = world_size;
  state_->mailboxes.resize(static_cast<std::size_t>(world_size) * world_size);
}

LoopbackHub::~LoopbackHub() = default;

std::unique_ptr<Transport> LoopbackHub::transport(int rank) {
  return std::make_unique<LoopbackTransport>(*state_, rank);
}

void LoopbackHub::abort(const std::string& reason) {
  const std::lock_guard lock(state_->mutex);
  if (state_->failure.empty()) state_->failure = reason;
  state_->changed.notify_all();
}

}  // namespace ringattn
