#include "comm/host_exchange.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <atomic>
#include <iostream>
#include <map>
#include <optional>
#include <system_error>
#include <utility>

#include "comm/background.h"
#include "comm/settings.h"
#include "core/host.h"

namespace ringattn {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kGlance = 100ms;  // between two looks at the time, the user and the group
constexpr auto kLook = 500ms;    // between two looks at the connections and for reports of other ranks

// A rank that is not at the other end of a message may have done its part and left; then what it has said comes by
// others in this time.
constexpr auto kRelayed = 5s;
constexpr int kLooksAtOthers = 2;  // every so many looks: each costs a few bytes for the life of the group

std::string seconds(std::chrono::milliseconds time) {
  const auto tenths = time.count() / 100;
  const std::string text = std::to_string(tenths / 10);
  return (tenths >= 100 || tenths % 10 == 0 ? text : text + '.' + std::to_string(tenths % 10)) + " s";
}

class HostExchange final : public Exchange {
 public:
  HostExchange(Waiter waiter, Owner owner, Patience patience, std::vector<Pending> pending,
               std::vector<at::Tensor> tensors)
      : waiter_(std::move(waiter)),
        owner_(std::move(owner)),
        patience_(std::move(patience)),
        state_(std::make_shared<State>(std::move(pending), std::move(tensors))) {
    std::map<int, std::vector<std::size_t>> of_peers;
    for (std::size_t i = 0; i < state_->pending.size(); ++i) of_peers[state_->pending[i].peer].push_back(i);
    try {
      for (const auto& [peer, indices] : of_peers) {
        calls_.start([state = state_, waiter = waiter_, indices = indices, time = patience_.of_backend] {
          for (const std::size_t i : indices) wait_for(*state, waiter, i, time);
        });
      }
    } catch (...) {  // no thread
      abort();
      throw;
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
        if (!warned && waited >= warn_after()) warn(waited), warned = true;
        if (calls_.wait_for(0ms)) break;  // while handlers of signals or of the log were at it
        check_group();
        if (const auto looks = waited / kLook; looks > looks_) {
          looks_ = looks;
          if (const auto lost = look_at_connections()) {
            if (calls_.wait_for(kGlance)) break;  // its last message had come before
            throw *lost;
          }
          check_reports();
        }
        if (waited >= patience_.timeout) throw silence();
      } catch (...) {
        abort();
        throw;
      }
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
      if (c10d::resolve_process_group(owner_.name) == owner_.group.lock()) return;
    } catch (const std::exception&) {  // there is none of that name
    }
    throw waiter_.failure(-1, "the group", "was destroyed by this process");
  }

  std::optional<RingError> look_at_connections() {
    if (!patience_.probe) return std::nullopt;
    for (std::size_t i = 0; i < state_->pending.size(); ++i) {
      if (state_->over[i]) continue;
      if (auto lost = probe(state_->pending[i].peer, state_->pending[i].what)) return lost;
    }
    if (!patience_.probes_all || looks_ % kLooksAtOthers != 0) return std::nullopt;
    for (const int peer : waiter_.stage.awaited) {
      auto lost = probe(peer, "the connection to rank " + std::to_string(peer));
      if (lost && Clock::now() - closed_since_.try_emplace(peer, Clock::now()).first->second >= kRelayed) return lost;
    }
    return std::nullopt;
  }

  std::optional<RingError> probe(int peer, const std::string& what) const {
    try {
      patience_.probe(peer);
      return std::nullopt;
    } catch (const std::exception& error) {
      return waiter_.failure(peer, what, "failed: " + text_of(error));
    }
  }

  // A rank that failed elsewhere in the ring may be noticed late by the one that this rank waits for.
  void check_reports() {
    if (!questions_.wait_for(0ms)) return;
    const int rank = *failed_;
    if (rank >= 0 && rank != waiter_.rank) {
      const Pending& missing = state_->pending[state_->first_missing()];
      throw waiter_.failure(rank, missing.what,
                            "was ended, since rank " + std::to_string(rank) + " reported a failure");
    }
    try {
      questions_.start([reports = owner_.reports, failed = failed_] { *failed = reports.any(); });
    } catch (const std::system_error&) {  // no thread; perhaps at the next look
    }
  }

  RingError silence() const {
    const Pending& missing = state_->pending[state_->first_missing()];
    return waiter_.failure(missing.peer, missing.what,
                           "took longer than the group's timeout, " + seconds(patience_.timeout),
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
  std::map<int, Clock::time_point> closed_since_;  // connections to ranks that have no message under way
  BackgroundCalls questions_;                      // to the store, which may not answer
  std::shared_ptr<std::atomic<int>> failed_ = std::make_shared<std::atomic<int>>(-1);
};

}  // namespace

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

RingError Waiter::failure(int peer, const std::string& what, const std::string& reason, bool silent) const {
  Whereabouts where;
  where.rank = rank;
  where.peer = peer;
  where.hop = stage.hop;
  where.silent = silent;
  return RingError(stage.text() + ": " + what + ' ' + reason, std::move(where));
}

std::unique_ptr<Exchange> host_exchange(Waiter waiter, Owner owner, Patience patience, std::vector<Pending> pending,
                                        std::vector<at::Tensor> tensors) {
  return std::make_unique<HostExchange>(std::move(waiter), std::move(owner), std::move(patience), std::move(pending),
                                        std::move(tensors));
}

}  // namespace ringattn
