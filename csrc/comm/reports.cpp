#include "comm/reports.h"

#include <memory>
#include <thread>
#include <utility>

#include "comm/background.h"

namespace ringattn {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<std::uint8_t>;

constexpr auto kPatience = 1s;  // with the store itself

// Whether the function is over in time, and did not throw.
template <typename Function>
bool ask(std::chrono::milliseconds time, Function function) {
  BackgroundCalls call;
  try {
    call.start(std::move(function));
  } catch (...) {
    return false;
  }
  return call.wait_for(time) && !call.failure();
}

}  // namespace

void Reports::publish(int rank, const Report& report) const {
  if (!store_) return;
  const std::string name = std::to_string(rank),
                    text = std::to_string(report.peer) + (report.silent ? "? " : " ") + report.text;
  ask(kPatience, [store = store_, key = key_of(rank), bytes = Bytes(text.begin(), text.end()), any = prefix_,
                  number = Bytes(name.begin(), name.end())] {
    store->set(key, bytes);
    store->set(any, number);
    store->check({any});  // the answer says that both have arrived
  });
}

int Reports::any() const {
  if (!store_ || !store_->check({prefix_})) return -1;
  const Bytes text = store_->get(prefix_);
  try {
    return std::stoi(std::string(text.begin(), text.end()));
  } catch (const std::exception&) {  // not ours
    return -1;
  }
}

std::optional<Report> Reports::of(int rank, std::chrono::milliseconds patience) const {
  if (!store_) return std::nullopt;
  const auto found = std::make_shared<Bytes>();
  const auto end = std::chrono::steady_clock::now() + patience;
  const bool answered = ask(patience + kPatience, [store = store_, key = key_of(rank), found, end] {
    while (!store->check({key})) {
      if (std::chrono::steady_clock::now() >= end) return;
      std::this_thread::sleep_for(20ms);
    }
    *found = store->get(key);
  });
  if (!answered || found->empty()) return std::nullopt;
  const std::string text(found->begin(), found->end());
  const std::size_t space = text.find(' ');
  if (space == std::string::npos || space == 0) return std::nullopt;
  try {
    return Report{std::stoi(text), text[space - 1] == '?', text.substr(space + 1)};
  } catch (const std::exception&) {  // not ours
    return std::nullopt;
  }
}

}  // namespace ringattn
