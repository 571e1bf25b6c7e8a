// Calls that block, on threads of their own, so that the caller can watch the time and the user meanwhile.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>

namespace ringattn {

// Several calls that are waited for together. Threads come from a pool of the process, which has as many as were ever
// needed at the same time.
class BackgroundCalls {
 public:
  BackgroundCalls();

  // Begins at once. What the function refers to must live until it is over, whether or not this object does.
  void start(std::function<void()> function);

  // Until all calls are over or one has thrown, but no longer than this; whether it came to that.
  bool wait_for(std::chrono::milliseconds time) const;

  // Until all calls are over.
  void join() const;

  // What the first that threw has thrown; null if none has.
  std::exception_ptr failure() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace ringattn
