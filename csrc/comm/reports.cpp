#include "comm/reports.h"

#include <sstream>
#include <thread>
#include <vector>

#include "comm/background.h"

namespace ringattn {
namespace {

using namespace std::chrono_literals;
using Store = c10::intrusive_ptr<c10d::Store>;

constexpr auto kPatience = 500ms;  // with the store itself

std::int64_t now() {
  const auto since_1970 = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(since_1970).count();
}

// Of a rank's report. Without the rank: of the number of one that has left a report.
std::string key_of(std::int64_t life, std::optional<int> rank = std::nullopt) {
  const std::string key = "ringattn_ext/failure/" + std::to_string(life);
  return rank ? key + '/' + std::to_string(*rank) : key;
}

// What is kept under a key begins with the time.
void put(const Store& store, const std::string& key, const std::string& text) {
  const std::string whole = std::to_string(now()) + ' ' + text;
  store->set(key, std::vector<std::uint8_t>(whole.begin(), whole.end()));
}

// Of this life. A rank may fail before it knows the number of its life, and then earlier ones had the same key.
std::optional<std::string> find(const Store& store, const Life& life, std::optional<int> rank = std::nullopt) {
  const std::int64_t known = life.number;
  for (const std::int64_t number : known == 0 ? std::vector{known} : std::vector{known, std::int64_t{0}}) {
    const std::string key = key_of(number, rank);
    if (!store->check({key})) continue;
    const std::vector<std::uint8_t> bytes = store->get(key);
    std::istringstream whole(std::string(bytes.begin(), bytes.end()));
    std::int64_t time = 0;
    std::string text;
    if (!(whole >> time) || (number == 0 && time < life.begin)) continue;
    std::getline(whole >> std::ws, text, '\0');
    return text;
  }
  return std::nullopt;
}

}  // namespace

Life::Life(bool is_first) : begin(is_first ? 0 : now()) {}

template <typename Function>
bool Reports::ask(std::chrono::milliseconds time, Function function) const {
  if (!store_ || life_->store_failed) return false;
  BackgroundCalls call;
  try {
    call.start([function = std::move(function), life = life_] {
      try {
        function();
      } catch (...) {
        life->store_failed = true;
        throw;
      }
    });
  } catch (const std::exception&) {  // no thread
    return false;
  }
  return call.wait_for(time) && !call.failure();
}

void Reports::publish(int rank, const Report& report) const {
  ask(kPatience, [store = store_, life = life_, rank, report] {
    const std::int64_t number = life->number;
    put(store, key_of(number, rank), std::to_string(report.peer) + (report.silent ? "? " : " ") + report.text);
    put(store, key_of(number), std::to_string(rank));
    store->check({key_of(number)});  // the answer says that both have arrived
  });
}

int Reports::any() const {
  if (!store_ || life_->store_failed) return -1;
  try {
    const auto text = find(store_, *life_);
    return text ? std::stoi(*text) : -1;
  } catch (const std::logic_error&) {  // not ours
    return -1;
  } catch (...) {
    life_->store_failed = true;
    return -1;
  }
}

std::optional<Report> Reports::of(int rank, std::chrono::milliseconds patience) const {
  const auto found = std::make_shared<std::optional<std::string>>();
  const auto end = std::chrono::steady_clock::now() + patience;
  const bool answered = ask(patience + kPatience, [store = store_, life = life_, rank, found, end] {
    while (!(*found = find(store, *life, rank)) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(20ms);
    }
  });
  if (!answered || !*found) return std::nullopt;
  const std::string& text = **found;
  const std::size_t space = text.find(' ');
  if (space == std::string::npos || space == 0) return std::nullopt;
  try {
    return Report{std::stoi(text), text[space - 1] == '?', text.substr(space + 1)};
  } catch (const std::logic_error&) {  // not ours
    return std::nullopt;
  }
}

}  // namespace ringattn
