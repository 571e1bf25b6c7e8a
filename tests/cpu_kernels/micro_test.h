// The inner loops that have an exact or nearly exact answer: conversions, exponentials, products.
#pragma once

#include <bit>

#include "check.h"
#include "cpu/micro.h"
#include "tensors.h"

namespace ringattn::test {

inline bool equal_or_both_nan(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

inline void check_widen(cpu::Conversions::Widen widen, int fraction) {
  // Rows of 37, so that there are whole vectors, a rest and padding; the last row ends at the end of the memory.
  constexpr int columns = 37, padded = 48, rows = 65536 / columns + 1;
  std::vector<std::uint16_t> source(rows * columns);
  for (int i = 0; i < rows * columns; ++i) source[i] = static_cast<std::uint16_t>(i);
  std::vector<float> target(rows * padded, 7.0f);
  widen(source.data(), columns, target.data(), padded, rows, columns, padded);
  for (int i = 0; i < rows * padded; ++i) {
    const int row = i / padded, column = i % padded;
    const double expected = column < columns ? decode16(source[row * columns + column], fraction) : 0.0;
    CHECK(equal_or_both_nan(target[i], expected));
  }
}

inline void check_narrow(cpu::Conversions::Narrow narrow, int fraction, std::mt19937_64& random) {
  std::vector<float> source;
  for (int bits = 0; bits < 65536; ++bits) {  // every number, every half-way point and its neighbours
    const double value = decode16(bits, fraction), next = decode16(bits + 1, fraction);
    source.push_back(static_cast<float>(value));
    if (!std::isfinite(value) || !std::isfinite(next)) continue;
    const float middle = static_cast<float>((value + next) / 2);
    for (const float to : {-INFINITY, INFINITY}) source.push_back(std::nextafter(middle, to));
    source.push_back(middle);
  }
  for (int i = 0; i < 100000; ++i) source.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  for (const float x : {65504.0f, 65519.9f, 65520.0f, 3.4e38f, 1e-45f}) source.push_back(x);
  source.resize(source.size() / 37 * 37);
  std::vector<std::uint16_t> target(37);
  for (std::size_t i = 0; i < source.size(); i += 37) {
    narrow(source.data() + i, target.data(), 37);
    for (std::size_t j = 0; j < 37; ++j) {
      const float x = source[i + j];
      CHECK(std::isnan(x) ? std::isnan(decode16(target[j], fraction)) : target[j] == encode16(x, fraction));
    }
  }
}

template <typename A>
void check_exponentials(const cpu::Micro<A>& micro, double tolerance, std::mt19937_64& random) {
  constexpr int rows = 300;
  std::vector<A> scores(rows * cpu::kLanes), m(cpu::kLanes, A{0}), sum(cpu::kLanes);
  std::uniform_real_distribution<double> uniform(-126.0, 0.0), small(-2.0, 0.0);
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<A>(i % 2 ? uniform(random) : small(random));
  scores[0] = 0, scores[1] = -INFINITY, scores[2] = NAN, scores[3] = -300, scores[4] = -1, scores[5] = -126;
  for (const cpu::Rounding rounding : {cpu::Rounding::none, cpu::Rounding::bfloat16, cpu::Rounding::float16}) {
    if (sizeof(A) == 8 && rounding != cpu::Rounding::none) continue;
    std::vector<A> exact = scores, rounded = scores;
    CHECK(!micro.exponentials(exact.data(), rows, m.data(), A{1}, sum.data(), cpu::Rounding::none));
    micro.exponentials(rounded.data(), rows, m.data(), A{1}, sum.data(), rounding);
    CHECK(exact[0] == 1 && exact[4] == A{0.5} && exact[1] == 0 && std::isnan(exact[2]) && exact[3] < 1e-37);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      const double x = scores[i], expected = std::exp2(x);
      if (x >= -126.0) CHECK(std::abs(exact[i] - expected) <= tolerance * expected);
      const DType dtype = rounding == cpu::Rounding::bfloat16  ? DType::bfloat16
                          : rounding == cpu::Rounding::float16 ? DType::float16
                                                               : DType::float64;
      CHECK(equal_or_both_nan(rounded[i], round_to(exact[i], dtype)));
    }
    for (int lane = 6; lane < cpu::kLanes; ++lane) {
      double total = 0;
      for (int n = 0; n < rows; ++n) total += exact[n * cpu::kLanes + lane];
      CHECK(std::abs(sum[lane] - total) <= 100 * tolerance * total);
    }
  }
}

// The same in pairs of bfloat16, whose scores are factors of c away from those above.
inline void check_pair_exponentials(const cpu::Pairs& pairs, std::mt19937_64& random) {
  if (pairs.exponentials == nullptr) return;
  constexpr int rows = 30;
  for (const float c : {cpu::kSmallestFactor, 0.18f, 1.0f, 1e30f}) {
    std::vector<float> scores(rows * cpu::kLanes), m(cpu::kLanes), sum(cpu::kLanes);
    std::vector<std::uint16_t> p(scores.size());
    std::uniform_real_distribution<double> uniform(-300.0, 0.0), small(-3.0, 0.0), any(-10.0, 10.0);
    for (float& x : m) x = static_cast<float>(any(random) / c);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      scores[i] = m[i % cpu::kLanes] + static_cast<float>((i % 2 ? uniform(random) : small(random)) / c);
      scores[i] = std::min(scores[i], m[i % cpu::kLanes]);
    }
    scores[0] = m[0], scores[1] = -INFINITY;
    for (const bool some_nan : {false, true}) {
      if (some_nan) scores[rows / 2 * cpu::kLanes + 2] = NAN;
      CHECK(pairs.exponentials(scores.data(), rows, m.data(), c, sum.data(), p.data()) == !some_nan);
      for (int lane = 0; lane < cpu::kLanes; ++lane) {
        double total = 0;
        for (int n = 0; n < rows; ++n) {
          const double x = (static_cast<double>(scores[n * cpu::kLanes + lane]) - m[lane]) * c, expected = std::exp2(x);
          const double got = decode16(p[n / 2 * 2 * cpu::kLanes + 2 * lane + n % 2], 7);
          total += expected;
          if (std::isnan(expected)) CHECK(std::isnan(got));
          if (x >= -125) CHECK(std::abs(got - expected) <= 0x1.02p-8 * expected + 1e-5 * expected * std::abs(x));
          if (x < -127) CHECK(got == 0);
        }
        CHECK(std::isnan(total) ? std::isnan(sum[lane]) : std::abs(sum[lane] - total) <= 1e-4 * total);
      }
    }
    CHECK(p[0] == encode16(1.0f, 7) && p[2] == 0);
  }
}

// A NaN stays, wherever it stands among the scores or in what was there before.
template <typename A, typename Function>
void check_column_max(const Function& column_max, std::mt19937_64& random) {
  constexpr int rows = 6;
  std::vector<A> scores(rows * cpu::kLanes), m(cpu::kLanes);
  for (auto* numbers : {&scores, &m}) {
    for (A& x : *numbers) {
      const auto kind = random() % 16;
      x = kind == 0 ? static_cast<A>(NAN) : kind < 4 ? static_cast<A>(-INFINITY) : static_cast<A>(random() % 100) - 50;
    }
  }
  std::vector<A> expected = m;
  for (int i = 0; i < rows * cpu::kLanes; ++i) {
    A& largest = expected[i % cpu::kLanes];
    if (std::isnan(scores[i]) || scores[i] > largest) largest = scores[i];
  }
  column_max(scores.data(), rows, m.data());
  for (int lane = 0; lane < cpu::kLanes; ++lane) CHECK(equal_or_both_nan(m[lane], expected[lane]));
}

// Small whole numbers: every sum is exact. factor and largest in turn with neither.
template <typename A>
void check_products(const cpu::Micro<A>& micro, std::mt19937_64& random) {
  const auto number = [&] { return static_cast<A>(static_cast<int>(random() % 17) - 8); };
  for (int columns = 16; columns <= 256; columns += 16) {
    for (const int rows : {0, 1, 2, 3, 4, 5, 6, 7, 13, 64}) {
      for (const int depth : {0, 1, 7, 64}) {
        const bool accumulate = random() % 2, transposed = random() % 2;
        std::vector<A> a(rows * depth), b(depth * columns), c(rows * columns);
        for (auto* array : {&a, &b, &c}) {
          for (A& x : *array) x = number();
        }
        const bool extra = random() % 2;
        std::vector<A> factor(columns), largest(columns);
        for (A& x : factor) x = random() % 4 == 0 ? static_cast<A>(cpu::kOverwrite) : static_cast<A>(random() % 3);
        for (A& x : largest) x = random() % 4 == 0 ? static_cast<A>(-INFINITY) : number() * 20;
        for (int j = 0; accumulate && extra && rows > 0 && j < columns; j += 5) {
          factor[j] = static_cast<A>(cpu::kOverwrite), c[j] = static_cast<A>(j % 2 ? NAN : INFINITY);
        }
        std::vector<A> expected = c, expected_largest = largest;
        for (int i = 0; i < rows; ++i) {
          for (int j = 0; j < columns; ++j) {
            A& sum = expected[i * columns + j];
            if (!accumulate) sum = 0;
            if (accumulate && extra) sum = factor[j] == static_cast<A>(cpu::kOverwrite) ? 0 : sum * factor[j];
            for (int k = 0; k < depth; ++k) sum += a[transposed ? k * rows + i : i * depth + k] * b[k * columns + j];
            if (!accumulate && extra) expected_largest[j] = std::max(expected_largest[j], sum);
          }
        }
        micro.multiply({c.data(), columns, a.data(), transposed ? 1 : depth, transposed ? rows : 1, b.data(), columns,
                        rows, depth, columns, accumulate, accumulate && extra ? factor.data() : nullptr,
                        !accumulate && extra ? largest.data() : nullptr});
        CHECK(c == expected && largest == expected_largest);
      }
    }
  }
}

// The same with pairs of bfloat16.
inline void check_pair_products(const cpu::Pairs& pairs, std::mt19937_64& random) {
  if (pairs.multiply == nullptr) return;
  const auto number = [&] { return static_cast<float>(static_cast<int>(random() % 17) - 8); };
  for (int columns = 16; columns <= 256; columns += 16) {
    for (const int rows : {1, 2, 3, 4, 5, 6, 7, 13, 64}) {
      for (const int depth : {0, 1, 3, 32}) {
        for (const bool accumulate : {false, true}) {
          for (const bool extra : {false, true}) {
            std::vector<std::uint16_t> a(rows * depth * 2), b(depth * columns * 2);
            for (auto* array : {&a, &b}) {
              for (std::uint16_t& x : *array) x = encode16(number(), 7);
            }
            std::vector<float> c(rows * columns), factor(columns), largest(columns);
            for (float& x : c) x = number();
            for (float& x : factor) x = random() % 4 == 0 ? static_cast<float>(cpu::kOverwrite) : random() % 3;
            for (float& x : largest) x = random() % 4 == 0 ? -INFINITY : number() * 20;
            for (int j = 0; accumulate && extra && j < columns; j += 5) {
              factor[j] = static_cast<float>(cpu::kOverwrite), c[j] = j % 2 ? NAN : INFINITY;
            }
            std::vector<float> expected = c, expected_largest = largest;
            for (int i = 0; i < rows; ++i) {
              for (int j = 0; j < columns; ++j) {
                float& sum = expected[i * columns + j];
                if (!accumulate) sum = 0;
                if (accumulate && extra) sum = factor[j] == static_cast<float>(cpu::kOverwrite) ? 0 : sum * factor[j];
                for (int k = 0; k < 2 * depth; ++k) {
                  const std::uint16_t y = b[(k / 2 * columns + j) * 2 + k % 2];
                  sum += static_cast<float>(decode16(a[i * 2 * depth + k], 7) * decode16(y, 7));
                }
                if (!accumulate && extra) expected_largest[j] = std::max(expected_largest[j], sum);
              }
            }
            pairs.multiply({c.data(), columns, a.data(), 2 * depth, 2, b.data(), 2 * columns, rows, depth, columns,
                            accumulate, accumulate && extra ? factor.data() : nullptr,
                            !accumulate && extra ? largest.data() : nullptr});
            CHECK(c == expected && largest == expected_largest);
          }
        }
      }
    }
  }
}

inline void run_micro_tests(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  current_case = "micro, seed " + std::to_string(seed);
  const cpu::MicroTable& table = cpu::micro_table();
  check_widen(table.conversions.widen_bfloat16, 7);
  check_widen(table.conversions.widen_float16, 10);
  check_narrow(table.conversions.narrow_bfloat16, 7, random);
  check_narrow(table.conversions.narrow_float16, 10, random);
  check_exponentials(table.float32, 2e-7, random);
  check_exponentials(table.float64, 1e-15, random);
  for (int i = 0; i < 100; ++i) {
    check_column_max<float>(table.float32.column_max, random);
    check_column_max<double>(table.float64.column_max, random);
    if (table.pairs.column_max != nullptr) check_column_max<float>(table.pairs.column_max, random);
  }
  check_products(table.float32, random);
  check_products(table.float64, random);
  check_pair_products(table.pairs, random);
  check_pair_exponentials(table.pairs, random);
}

}  // namespace ringattn::test
