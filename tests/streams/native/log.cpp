#include "native/log.h"

#include <atomic>
#include <map>

namespace streams {
namespace {

int thread_number() {
  static std::atomic<int> next{0};
  thread_local const int number = next++;
  return number;
}

struct Faults {
  std::mutex mutex;
  std::map<std::string, std::int64_t> planted, counts;
  bool paused = false;
};

Faults& faults() {
  static Faults all;
  return all;
}

}  // namespace

void Log::add(Entry entry) {
  entry.thread = thread_number();
  const std::lock_guard lock(mutex_);
  entries_.push_back(std::move(entry));
}

std::vector<Entry> Log::entries() const {
  const std::lock_guard lock(mutex_);
  return entries_;
}

void Log::clear() {
  const std::lock_guard lock(mutex_);
  entries_.clear();
}

Log& log() {
  static Log* const one = new Log;  // never destroyed: tensors may be freed while the process ends
  return *one;
}

void plant_fault(const std::string& name, std::int64_t nth) {
  const std::lock_guard lock(faults().mutex);
  faults().planted[name] = nth;
}

void clear_faults() {
  const std::lock_guard lock(faults().mutex);
  faults().planted.clear();
  faults().counts.clear();
}

void pause_faults(bool pause) {
  const std::lock_guard lock(faults().mutex);
  faults().paused = pause;
}

bool fault(const std::string& name) {
  const std::lock_guard lock(faults().mutex);
  if (faults().paused) return false;
  const std::int64_t now = faults().counts[name]++;
  const auto found = faults().planted.find(name);
  return found != faults().planted.end() && (found->second == kEvery || found->second == now);
}

std::int64_t occurrences(const std::string& name) {
  const std::lock_guard lock(faults().mutex);
  return faults().counts[name];
}

}  // namespace streams
