// The one error of the ring. Bad input is std::invalid_argument here and ValueError or TypeError at the operators;
// RingError means that the ranks disagree, or that the ring failed under a correct call.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace ringattn {

// Where a ring failed, as far as it is known.
struct Whereabouts {
  int rank = -1;           // who raises
  int peer = -1;           // whose fault it is: the rank that is lost, silent, or has refused
  std::string group;       // its name
  std::int64_t call = -1;  // its number on the group
  int hop = -1;            // of the pass, from 0; none while calls are compared
  bool silent = false;     // the peer is not known to be lost, but has taken longer than the group's timeout
};

class RingError : public std::runtime_error {
 public:
  static constexpr const char* kPrefix = "ring: ";

  explicit RingError(const std::string& text, Whereabouts where = {})
      : std::runtime_error(kPrefix + text), where_(std::move(where)) {}

  const Whereabouts& where() const { return where_; }

  // Without the prefix.
  std::string text() const { return std::string(what()).substr(std::string(kPrefix).size()); }

 private:
  Whereabouts where_;
};

}  // namespace ringattn
