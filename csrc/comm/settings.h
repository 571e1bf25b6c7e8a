// What environment variables say about rings, read once.
#pragma once

#include <chrono>

namespace ringattn {

// Which calls the ranks compare (RINGATTN_CHECK).
enum class Check { automatic, always, off };

struct Settings {
  std::chrono::milliseconds warn_after{30'000};  // RINGATTN_WARN_SEC: a wait that takes longer is logged
  Check check = Check::automatic;
};

// Throws std::invalid_argument if a variable has a value that means nothing.
const Settings& settings();

// Of settings(); the default where that throws.
std::chrono::milliseconds warn_after();

const char* check_name(Check check);

}  // namespace ringattn
