// The one error of the ring. Bad input is std::invalid_argument here and ValueError or TypeError at the operators;
// RingError means that the ranks disagree, or that the ring failed under a correct call.
#pragma once

#include <stdexcept>
#include <string>

namespace ringattn {

class RingError : public std::runtime_error {
 public:
  // By the prefix the Python functions, which see a RuntimeError, know that it is to be a ringattn_ext.RingError.
  static constexpr const char* kPrefix = "ring: ";

  explicit RingError(const std::string& text) : std::runtime_error(kPrefix + text) {}
};

}  // namespace ringattn
