// Rows of keys and values as they are stored: how they become vectors, and how they are fetched before they are needed.
// Included by micro.cpp alone.
#pragma once

#include "cpu/micro_convert.h"
#include "cpu/micro_vector.h"

namespace ringattn::cpu {
namespace {

// How a row of keys or values is stored, and how 2 * kCount numbers of it become two vectors of A. For bfloat16 these
// are the even and the odd numbers, a shift and a mask away: query and o have their even columns before their odd ones.
template <typename Number>
struct PlainRows {
  using A = Number;
  using Element = Number;
  static constexpr bool kEvenOdd = false;
  static void load_two(const Element* source, Vector<A>& first, Vector<A>& second) {
    first = load<Vector<A>>(source), second = load<Vector<A>>(source + kCount<A>);
  }
};

struct Float16Rows {
  using A = float;
  using Element = std::uint16_t;
  static constexpr bool kEvenOdd = false;
  static void load_two(const Element* source, Vector<A>& first, Vector<A>& second) {
    first = Float16Format::widen(load<HalfBits>(source));
    second = Float16Format::widen(load<HalfBits>(source + kCount<A>));
  }
};

struct BFloat16Rows {
  using A = float;
  using Element = std::uint16_t;
  static constexpr bool kEvenOdd = true;
  static void load_two(const Element* source, Vector<A>& first, Vector<A>& second) {
    const FloatBits both = load<FloatBits>(source);
    first = float_of(both << 16), second = float_of(both & 0xffff0000u);
  }
};

// Where the two vectors stand that are made of the numbers from column d on, a multiple of 2 * kCount.
template <typename Storage>
inline std::int64_t first_of(std::int64_t d) {
  return Storage::kEvenOdd ? d / 2 : d;
}
template <typename Storage>
inline std::int64_t second_of(std::int64_t d, std::int64_t D) {
  return Storage::kEvenOdd ? (D + d) / 2 : d + kCount<typename Storage::A>;
}

// Fetches rows of [keys][D] into the second cache, a few lines at a step of the loop that runs meanwhile, so that the
// memory is as busy during arithmetic as between it.
class Fetch {
 public:
  Fetch(const void* rows, std::int64_t stride, std::int64_t keys, std::int64_t D, int size, std::int64_t steps)
      : row_(static_cast<const char*>(rows)),
        stride_(stride * size),
        lines_per_row_((D * size + kLine - 1) / kLine),
        left_(keys * lines_per_row_),
        per_step_(steps > 0 ? (left_ + steps - 1) / steps : left_) {}

  void step() {
    for (std::int64_t i = 0; i < per_step_ && left_ > 0; ++i, --left_) {
      __builtin_prefetch(row_ + line_ * kLine, 0, 2);
      if (++line_ < lines_per_row_) continue;
      line_ = 0;
      row_ += stride_;
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;

  const char* row_;
  std::int64_t stride_, lines_per_row_, left_, per_step_, line_ = 0;
};

}  // namespace
}  // namespace ringattn::cpu
