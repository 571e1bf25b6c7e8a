// What the program that hosts the library does for it. Python's module fills it in; without Python it is empty.
#pragma once

#include <string>

#include "core/error.h"

namespace ringattn {

struct Host {
  // Throws if the user asks for an end, as by Ctrl-C. Called about ten times a second while a rank waits.
  void (*check_interrupt)() = nullptr;

  // Logs a warning; null: it goes to stderr.
  void (*warn)(const std::string& text) = nullptr;

  // Whether a group belongs to the process that this one was forked from; null: none does.
  bool (*is_inherited)(const std::string& group) = nullptr;

  // Called when an operator ends, whatever comes of it.
  void (*leave)() = nullptr;

  // Throws an error as the host knows it.
  void (*raise)(const RingError& error) = nullptr;
};

inline Host& host() {
  static Host host;
  return host;
}

}  // namespace ringattn
