#include "comm/settings.h"

#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ringattn {
namespace {

constexpr Check kChecks[] = {Check::automatic, Check::always, Check::off};

[[noreturn]] void refuse(const char* name, const char* expected, const std::string& text) {
  throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got '" + text + "'");
}

std::chrono::milliseconds read_seconds(const char* name, std::chrono::milliseconds otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds > 0) || !(seconds < 1e9)) refuse(name, "a number of seconds above 0", text);
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

Check read_check(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return Check::automatic;
  for (const Check check : kChecks) {
    if (std::string(text) == check_name(check)) return check;
  }
  refuse(name, "auto, always or off", text);
}

}  // namespace

const char* check_name(Check check) {
  switch (check) {
    case Check::automatic:
      return "auto";
    case Check::always:
      return "always";
    case Check::off:
      return "off";
  }
  return "";
}

const Settings& settings() {
  static const Settings settings{read_seconds("RINGATTN_WARN_SEC", Settings().warn_after),
                                 read_check("RINGATTN_CHECK")};
  return settings;
}

std::chrono::milliseconds warn_after() {
  try {
    return settings().warn_after;
  } catch (const std::invalid_argument&) {  // the call is refused, which the others must hear
    return Settings().warn_after;
  }
}

}  // namespace ringattn
