// Faults for the tests, from outside of the library: what the profiler sees of it (operators, and scopes such as "ring
// step 1: ...") says how far a process has come, and there it does to itself what it was told.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

enum class Action : int { kill, stop, exit, hold, raise };  // as in inject.py

// Memory that other processes read.
struct Notice {
  std::atomic<double> at;              // when the fault began, by the monotonic clock; 0: not yet
  std::atomic<std::int32_t> released;  // ends Action::hold
};

// A moment: the first time after the one before it that a scope of such a name begins, or ends.
struct Moment {
  std::string prefix;
  bool end = false;
};

std::mutex mutex;
std::vector<Moment> moments;  // what is still to come, the next one last
Action chosen;
int patience;  // milliseconds
Notice* notice;

// Nothing but `raise` includes this key, for the thread that it is called on.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

void fail_instead(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  c10::impl::tls_set_dispatch_key_included(kKey, false);
  throw std::runtime_error("injected into " + op.schema().name());
}

// What an observer throws is only logged, so it makes the next operator of this thread throw.
void raise_in_next_operator() {
  static const auto registration = c10::Dispatcher::singleton().registerFallback(
      kKey, c10::KernelFunction::makeFromBoxedFunction<&fail_instead>(), "faults of the tests");
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void pause_for_milliseconds(int count) {
  const timespec duration{count / 1000, count % 1000 * 1'000'000L};
  nanosleep(&duration, nullptr);
}

void carry_out(Action action) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  notice->at = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  switch (action) {
    case Action::kill:
      kill(getpid(), SIGKILL);
      break;
    case Action::stop:
      kill(getpid(), SIGSTOP);
      break;
    case Action::exit:
      _exit(0);
    case Action::hold:
      while (notice->released == 0) pause_for_milliseconds(2);
      break;
    case Action::raise:
      raise_in_next_operator();
      break;
  }
}

void see(const char* name, bool end) {
  {
    const std::lock_guard lock(mutex);
    if (moments.empty() || moments.back().end != end) return;
    if (std::strncmp(name, moments.back().prefix.data(), moments.back().prefix.size()) != 0) return;
    moments.pop_back();
    if (!moments.empty()) return;
  }
  pause_for_milliseconds(patience);
  carry_out(chosen);
}

std::unique_ptr<at::ObserverContext> began(const at::RecordFunction& scope) {
  see(scope.name(), false);
  return nullptr;
}

void ended(const at::RecordFunction& scope, at::ObserverContext*) { see(scope.name(), true); }

}  // namespace

extern "C" {

// The action is carried out some milliseconds after the last of the moments, each of which is looked for after the one
// before it.
void faults_arm(int action, int milliseconds, void* where_to_note, int count, const char* const* prefixes,
                const int* ends) {
  const std::lock_guard lock(mutex);
  chosen = static_cast<Action>(action);
  patience = milliseconds;
  notice = static_cast<Notice*>(where_to_note);
  moments.clear();
  for (int i = count; i-- > 0;) moments.push_back({prefixes[i], ends[i] != 0});
  [[maybe_unused]] static const auto once = at::addGlobalCallback(
      at::RecordFunctionCallback(began, ended).scopes({at::RecordScope::FUNCTION, at::RecordScope::USER_SCOPE}));
}

// The action is carried out now, by the calling thread.
void faults_act(int action, void* where_to_note) {
  notice = static_cast<Notice*>(where_to_note);
  carry_out(static_cast<Action>(action));
}
}
