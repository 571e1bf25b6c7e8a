// A send leaves a view of its tensor in the mailbox of the (sender, receiver) pair. The receiver copies out of it and
// marks it as taken, which is what the sender waits for. No message is ever buffered, as on a network with rendezvous:
// a buffer that is written too early shows as a wrong number.
//
// In the host's memory the receiver copies when it waits. On devices with streams every virtual rank has a second
// stream for its copies, as NCCL has: a copy is enqueued by post(), behind what sender and receiver had enqueued on
// their own streams by then, and runs beside what they enqueue next; wait() makes both streams wait for its end. The
// threads wait for each other's letters, never for the device.
#include "comm/loopback_transport.h"

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "core/error.h"

namespace ringattn {

struct LoopbackHub::State {
  struct Letter {
    at::Tensor tensor;
    std::optional<c10::Event> ready;  // the sender's stream has come as far as post(); on devices with streams
    std::optional<c10::Event> done;   // the receiver's copy is over; likewise
    bool fetched = false;             // the receiver has it, and will copy
    bool taken = false;               // it has copied; or it could not, and `done` is not set
  };

  int world_size = 0;
  Pacing pacing;
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

  void leave(const std::shared_ptr<Letter>& letter, int sender, int receiver) {
    const std::lock_guard lock(mutex);
    mailbox(sender, receiver).push_back(letter);
    changed.notify_all();
  }

  std::shared_ptr<Letter> fetch(const Message& message, int receiver) {
    std::unique_lock lock(mutex);
    auto& waiting = mailbox(message.peer, receiver);
    wait_until(lock, [&] { return !waiting.empty(); });
    const std::shared_ptr<Letter> letter = waiting.front();
    waiting.pop_front();
    if (letter->tensor.nbytes() != message.tensor.nbytes()) {
      throw RingError("receive from rank " + std::to_string(message.peer) + " failed: expected " +
                      std::to_string(message.tensor.nbytes()) + " bytes, got " +
                      std::to_string(letter->tensor.nbytes()));
    }
    letter->fetched = true;
    return letter;
  }

  void mark_taken(Letter& letter) {
    const std::lock_guard lock(mutex);
    letter.taken = true;
    changed.notify_all();
  }

  void wait_until_taken(const Letter& letter) {
    std::unique_lock lock(mutex);
    wait_until(lock, [&] { return letter.taken; });
  }

  void abort(const std::string& reason) {
    const std::lock_guard lock(mutex);
    if (failure.empty()) failure = reason;
    changed.notify_all();
  }

  // After a failure, when nobody fetches any more: waits for a receiver that is just copying.
  void settle(const Letter& letter) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return letter.taken || !letter.fetched; });
  }
};

namespace {

using State = LoopbackHub::State;
using Letters = std::vector<std::shared_ptr<State::Letter>>;

class HostExchange final : public Exchange {
 public:
  HostExchange(State& state, int rank, Letters sent, std::vector<Message> receives)
      : state_(state), rank_(rank), sent_(std::move(sent)), receives_(std::move(receives)) {}

  void wait() override {
    for (Message& message : receives_) {
      const auto letter = state_.fetch(message, rank_);
      message.tensor.copy_(letter->tensor);
      state_.mark_taken(*letter);
    }
    for (const auto& letter : sent_) state_.wait_until_taken(*letter);
  }

 private:
  State& state_;
  int rank_;
  Letters sent_;
  std::vector<Message> receives_;
};

// Letters whose copies have been enqueued, by this rank or by the ones they were sent to.
class StreamExchange final : public Exchange {
 public:
  StreamExchange(State& state, int rank) : state_(state), rank_(rank) {}

  // After a failure. What the copies read and write may be given back only behind them, also by other virtual ranks,
  // who may hold the last reference to what was sent.
  ~StreamExchange() override {
    try {
      for (const auto& letter : received_) block(*letter);
      if (!sent_.empty()) state_.abort("virtual rank " + std::to_string(rank_) + " failed");
      for (const auto& letter : sent_) {
        state_.settle(*letter);
        block(*letter);
      }
    } catch (...) {  // the device has failed, and copies nothing any more
    }
  }

  void add_sent(std::shared_ptr<State::Letter> letter) { sent_.push_back(std::move(letter)); }
  void add_received(std::shared_ptr<State::Letter> letter) { received_.push_back(std::move(letter)); }

  void wait() override {
    for (; !received_.empty(); received_.pop_back()) block(*received_.back());
    for (; !sent_.empty(); sent_.pop_back()) {
      state_.wait_until_taken(*sent_.back());
      block(*sent_.back());
    }
  }

 private:
  // The stream that is current now, which is the one of post().
  static void block(const State::Letter& letter) {
    const at::Device device = letter.tensor.device();
    if (letter.done) letter.done->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }

  State& state_;
  int rank_;
  Letters sent_, received_;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(State& state, int rank) : state_(state), rank_(rank) {}

  int rank() const override { return rank_; }
  int world_size() const override { return state_.world_size; }
  std::string obstacle(at::Device) const override { return ""; }

  std::unique_ptr<Exchange> post(std::vector<Message> sends, std::vector<Message> receives, const Stage&) override {
    std::erase_if(sends, [](const Message& message) { return message.tensor.numel() == 0; });
    std::erase_if(receives, [](const Message& message) { return message.tensor.numel() == 0; });
    const Message* any = !sends.empty() ? &sends.front() : !receives.empty() ? &receives.front() : nullptr;
    if (any == nullptr || any->tensor.is_cpu()) {
      Letters sent;
      for (const Message& message : sends) {
        sent.push_back(std::make_shared<State::Letter>(message.tensor));
        state_.leave(sent.back(), rank_, message.peer);
      }
      return std::make_unique<HostExchange>(state_, rank_, std::move(sent), std::move(receives));
    }
    return post_on_streams(any->tensor.device(), sends, receives);
  }

 private:
  std::unique_ptr<Exchange> post_on_streams(at::Device device, const std::vector<Message>& sends,
                                            const std::vector<Message>& receives) {
    const c10::impl::VirtualGuardImpl streams(device.type());
    const c10::Stream own = streams.getStream(device);
    if (!copies_) copies_ = virtual_stream(device, 2 * rank_ + 1);
    auto exchange = std::make_unique<StreamExchange>(state_, rank_);
    for (const Message& message : sends) {
      const auto letter = std::make_shared<State::Letter>(message.tensor);
      letter->ready.emplace(device.type()).record(own);
      exchange->add_sent(letter);
      state_.leave(letter, rank_, message.peer);
    }
    c10::Event posted(device.type());
    posted.record(own);
    posted.block(*copies_);
    const c10::StreamGuard guard(*copies_);
    for (const Message& message : receives) {
      const auto letter = state_.fetch(message, rank_);
      try {
        letter->ready->block(*copies_);
        copy(message.tensor, letter->tensor);
        letter->done.emplace(device.type()).record(*copies_);
      } catch (...) {
        letter->done.reset();
        state_.mark_taken(*letter);
        throw;
      }
      exchange->add_received(letter);
      state_.mark_taken(*letter);
    }
    return exchange;
  }

  void copy(const at::Tensor& target, const at::Tensor& source) {
    const Pacing& pacing = state_.pacing;
    if (pacing.pace == nullptr) {
      target.copy_(source, /*non_blocking=*/true);
      return;
    }
    if (!start_.defined()) start_ = at::empty({1}, target.options().dtype(at::kLong));
    auto* start = start_.mutable_data_ptr<std::int64_t>();
    void* stream = copies_->native_handle();
    pacing.pace(start, 0, stream);
    target.copy_(source, /*non_blocking=*/true);
    pacing.pace(start, static_cast<std::int64_t>(static_cast<double>(target.nbytes()) / pacing.gigabytes_per_second),
                stream);
  }

  State& state_;
  int rank_;
  std::optional<c10::Stream> copies_;  // the second stream
  at::Tensor start_;                   // when a paced copy began; allocated and used on the second stream
};

}  // namespace

c10::Stream virtual_stream(at::Device device, int number) {
  static std::mutex mutex;
  static std::unordered_map<at::Device, std::vector<c10::Stream>> streams;
  const std::lock_guard lock(mutex);
  std::vector<c10::Stream>& found = streams[device];
  while (static_cast<int>(found.size()) <= number) {
    found.push_back(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }
  return found[number];
}

LoopbackHub::LoopbackHub(int world_size, Pacing pacing) : state_(std::make_unique<State>()) {
  state_->world_size = world_size;
  state_->pacing = pacing;
  state_->mailboxes.resize(static_cast<std::size_t>(world_size) * world_size);
}

LoopbackHub::~LoopbackHub() = default;

std::unique_ptr<Transport> LoopbackHub::transport(int rank) {
  return std::make_unique<LoopbackTransport>(*state_, rank);
}

void LoopbackHub::abort(const std::string& reason) { state_->abort(reason); }

}  // namespace ringattn
