// What ranks that failed tell the others, who only see a connection close: each leaves a report in the store of the
// group, before it closes its own connections. So a rank far from the fault can name it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace ringattn {

struct Report {
  int peer = -1;        // the rank that it blames; none: the trouble is its own
  bool silent = false;  // because it took too long
  std::string text;
};

// What tells groups apart that one after another have the same store.
struct Life {
  std::atomic<std::int64_t> number = 0;    // the same on all ranks; 0 until they have compared their first call
  const std::int64_t begin;                // reports from before it are of another one; in ms since 1970
  std::atomic<bool> store_failed = false;  // it is not asked again

  // is_first: of the lives in this process that have the store and the name of the group.
  explicit Life(bool is_first);
};

// The store may have gone with the rank that kept it, so every question has an end.
class Reports {
 public:
  Reports() = default;  // nobody reports

  Reports(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Life> life)
      : store_(std::move(store)), life_(std::move(life)) {}

  void publish(int rank, const Report& report) const;

  // Waits that long for it to come.
  std::optional<Report> of(int rank, std::chrono::milliseconds patience) const;

  // A rank that has left one; none: -1. May take as long as the store likes.
  int any() const;

 private:
  // Whether there is a store, the function is over in time, and did not throw.
  template <typename Function>
  bool ask(std::chrono::milliseconds time, Function function) const;

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Life> life_;
};

}  // namespace ringattn
