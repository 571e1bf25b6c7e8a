#include "comm/background.h"

#include <pthread.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace ringattn {
namespace {

constexpr const char* kThreadName = "ringattn_wait";  // for who lists the threads of a process

// Calls `function`, then, when its thread is free for the next, `done`.
struct Job {
  std::function<void()> function, done;
};

class Pool {
 public:
  void run(Job job) {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) {
      try {
        std::thread([this, job = std::move(job)]() mutable { work(std::move(job)); }).detach();
      } catch (const std::system_error& error) {
        throw std::system_error(error.code(), "no thread could be started to wait for other ranks");
      }
      return;
    }
    Worker* worker = idle_.back();
    idle_.pop_back();
    worker->job = std::move(job);
    worker->wake.notify_one();
  }

 private:
  struct Worker {
    std::condition_variable wake;
    std::optional<Job> job;
  };

  void work(Job first) {
    ::pthread_setname_np(::pthread_self(), kThreadName);
    Worker worker;
    worker.job = std::move(first);
    std::unique_lock lock(mutex_);
    for (;;) {
      Job job = *std::exchange(worker.job, std::nullopt);
      lock.unlock();
      job.function();
      job.function = nullptr;  // with all that it holds
      lock.lock();
      idle_.push_back(&worker);
      lock.unlock();
      job.done();
      job.done = nullptr;
      lock.lock();
      worker.wake.wait(lock, [&] { return worker.job.has_value(); });
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
  const auto done = [state = state_] {
    const std::lock_guard lock(state->mutex);
    --state->running;
    state->changed.notify_all();
  };
  try {
    pool().run({[state = state_, function = std::move(function)] {
                  try {
                    function();
                  } catch (...) {
                    const std::lock_guard lock(state->mutex);
                    if (!state->failure) state->failure = std::current_exception();
                    state->changed.notify_all();
                  }
                },
                done});
  } catch (...) {  // no thread
    done();
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
