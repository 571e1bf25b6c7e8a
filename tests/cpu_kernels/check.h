// A check that reports where and for which case it failed, and counts.
#pragma once

#include <cstdio>
#include <string>

namespace ringattn::test {

inline int failures = 0;
inline std::string current_case;  // what a failing check prints beside itself

inline void report(const char* file, int line, const char* condition) {
  ++failures;
  if (failures <= 50) std::printf("%s:%d: %s [%s]\n", file, line, condition, current_case.c_str());
}

}  // namespace ringattn::test

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) ringattn::test::report(__FILE__, __LINE__, #condition); \
  } while (false)
