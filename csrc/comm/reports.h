// What ranks that failed tell the others, who only see a connection close: each leaves a report in the store of the
// group, before it closes its own connections. So a rank far from the fault can name it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace ringattn {

struct Report {
  int peer = -1;        // the rank that it blames; none: the trouble is its own
  bool silent = false;  // because it took too long
  std::string text;
};

// The store may have gone with the rank that kept it, so every question has an end.
class Reports {
 public:
  Reports() = default;  // nobody reports

  // life: tells groups apart that one after another have the same store.
  Reports(c10::intrusive_ptr<c10d::Store> store, std::int64_t life)
      : store_(std::move(store)), prefix_("ringattn_ext/failure/" + std::to_string(life)) {}

  void publish(int rank, const Report& report) const;

  // Waits that long for it to come.
  std::optional<Report> of(int rank, std::chrono::milliseconds patience) const;

  // A rank that has left one; none: -1. May take as long as the store likes.
  int any() const;

 private:
  std::string key_of(int rank) const { return prefix_ + '/' + std::to_string(rank); }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string prefix_;  // a key too: of the number of a rank that has left a report
};

}  // namespace ringattn
