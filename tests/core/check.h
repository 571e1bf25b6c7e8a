// A check that reports where it failed and with which values, and counts. No framework.
#pragma once

#include <cstdint>
#include <iostream>
#include <random>
#include <sstream>
#include <string>

namespace ringattn::test {

using Random = std::mt19937_64;

inline int failures = 0;
inline std::string current_test;  // name and seed, printed beside every failure

inline void report(const char* file, int line, const char* condition, const std::string& values) {
  ++failures;
  if (failures > 50) return;
  std::cout << file << ":" << line << ": " << condition << " [" << current_test << "] " << values << std::endl;
}

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  ((stream << parts), ...);
  return stream.str();
}

// A number of [from, to].
inline std::int64_t between(Random& random, std::int64_t from, std::int64_t to) {
  return std::uniform_int_distribution<std::int64_t>(from, to)(random);
}

template <typename Error, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline bool contains(const std::string& whole, const std::string& part) {
  return whole.find(part) != std::string::npos;
}

// One function per file; main runs them.
void test_layouts(Random& random);
void test_masks(Random& random);
void test_schedules(Random& random);
void test_headers(Random& random);

}  // namespace ringattn::test

// CHECK(condition, values...): the values are put together only when it fails.
#define CHECK(condition, ...)                                                                                    \
  do {                                                                                                           \
    if (!(condition)) ringattn::test::report(__FILE__, __LINE__, #condition, ringattn::test::text(__VA_ARGS__)); \
  } while (false)
