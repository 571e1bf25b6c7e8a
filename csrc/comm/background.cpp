#include "comm/background.h"

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace ringattn {
namespace {

class Pool {
 public:
  void run(std::function<void()> function) {
    std::unique_lock lock(mutex_);
    if (idle_.empty()) {
      std::thread([this, function = std::move(function)]() mutable { work(std::move(function)); }).detach();
      return;
    }
    Worker* worker = idle_.back();
    idle_.pop_back();
    worker->function = std::move(function);
    worker->wake.notify_one();
  }

 private:
  struct Worker {
    std::condition_variable wake;
    std::function<void()> function;
  };

  void work(std::function<void()> first) {
    Worker worker;
    worker.function = std::move(first);
    for (;;) {
      std::exchange(worker.function, nullptr)();
      std::unique_lock lock(mutex_);
      idle_.push_back(&worker);
      worker.wake.wait(lock, [&] { return worker.function != nullptr; });
    }
  }

  std::mutex mutex_;
  std::vector<Worker*> idle_;
};

// Never destroyed, since its threads end with the process. A forked process has none of its parent's threads.
Pool& pool() {
  static std::mutex mutex;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  const std::lock_guard lock(mutex);
  if (owner != ::getpid()) {
    pool = new Pool;
    owner = ::getpid();
  }
  return *pool;
}

}  // namespace

struct BackgroundCalls::State {
  std::mutex mutex;
  std::condition_variable changed;
  int running = 0;
  std::exception_ptr failure;
};

BackgroundCalls::BackgroundCalls() : state_(std::make_shared<State>()) {}

void BackgroundCalls::start(std::function<void()> function) {
  {
    const std::lock_guard lock(state_->mutex);
    ++state_->running;
  }
  const auto finish = [](State& state, std::exception_ptr failure) {
    const std::lock_guard lock(state.mutex);
    --state.running;
    if (!state.failure) state.failure = std::move(failure);
    state.changed.notify_all();
  };
  try {
    pool().run([state = state_, function = std::move(function), finish]() mutable {
      std::exception_ptr failure;
      try {
        function();
      } catch (...) {
        failure = std::current_exception();
      }
      function = nullptr;  // before whoever waits goes on
      finish(*state, std::move(failure));
    });
  } catch (...) {  // no thread
    finish(*state_, nullptr);
    throw;
  }
}

bool BackgroundCalls::wait_for(std::chrono::milliseconds time) const {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, time, [&] { return state_->running == 0 || state_->failure; });
}

void BackgroundCalls::join() const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->running == 0; });
}

std::exception_ptr BackgroundCalls::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

}  // namespace ringattn
