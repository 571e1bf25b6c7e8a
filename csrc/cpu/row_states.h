// Memory for states of few rows, and for those that wait to be absorbed by another.
#pragma once

#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "cpu/micro.h"

namespace ringattn::cpu {

// (o, m, l) of some rows: a state, or what tiles make of the rows, one after another.
template <typename A>
class RowStates {
 public:
  RowStates() = default;
  RowStates(std::int64_t count, std::int64_t rows, std::int64_t D)
      : rows_(rows),
        D_(D),
        data_(static_cast<A*>(::operator new(static_cast<std::size_t>(count * elements()) * sizeof(A), kAlignment))) {}

  bool is_there() const { return data_ != nullptr; }

  FewRowsState<A> at(std::int64_t index, std::int64_t row) const {
    A* o = data_.get() + index * elements();
    A* m = o + rows_ * D_;
    return {o + row * D_, m + row, m + rows_ + row};
  }

 private:
  static constexpr std::align_val_t kAlignment{64};

  struct Release {
    void operator()(A* pointer) const { ::operator delete(pointer, kAlignment); }
  };

  std::int64_t elements() const { return (rows_ * (D_ + 2) + kRowPadding - 1) / kRowPadding * kRowPadding; }

  std::int64_t rows_ = 0, D_ = 0;
  std::unique_ptr<A, Release> data_;
};

// What threads that have finished with RowStates leave to others.
template <typename A>
class Spare {
 public:
  template <typename Make>
  RowStates<A> take(const Make& make) {
    {
      const std::lock_guard lock(mutex_);
      if (!states_.empty()) {
        RowStates<A> last = std::move(states_.back());
        states_.pop_back();
        return last;
      }
    }
    return make();
  }

  void give(RowStates<A> states) {
    const std::lock_guard lock(mutex_);
    states_.push_back(std::move(states));
  }

 private:
  std::mutex mutex_;
  std::vector<RowStates<A>> states_;
};

}  // namespace ringattn::cpu
