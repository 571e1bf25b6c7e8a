// See system_calls.h. What kernels print is collected in Report.printed; lanes print one after the other.
#include "system_calls.h"

#include "access.h"

namespace emulator {

namespace {

uint64_t argument(Warp& w, const Instruction& in, int i, int lane) {
  uint64_t value = 0;
  std::memcpy(&value, w.frame->param(lane) + in.argument_offsets[i].first, in.argument_bytes[i]);
  return value;
}

std::string text_at(Warp& w, uint64_t address, int lane) {
  std::string text;
  while (const auto c = *access_memory(w, Space::generic, address++, 1, Access::read, lane, nullptr))
    text += static_cast<char>(c);
  return text;
}

// The arguments of a vprintf: one after the other, each aligned to its size.
struct Arguments {
  Warp& w;
  uint64_t address;
  int lane;
  template <class T>
  T next() {
    address = static_cast<uint64_t>(align_up(static_cast<int64_t>(address), sizeof(T)));
    T value;
    std::memcpy(&value, access_memory(w, Space::generic, address, sizeof(T), Access::read, lane, nullptr), sizeof(T));
    address += sizeof(T);
    return value;
  }
};

template <class T>
std::string formatted(const std::string& form, T value) {
  char text[512];
  std::snprintf(text, sizeof text, form.c_str(), value);
  return text;
}

std::string print(const std::string& format, Arguments arguments) {
  std::string text;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      text += format[i];
      continue;
    }
    std::string form = "%";
    bool wide = false;
    for (++i; i < format.size() && std::string_view("-+ #0123456789.*hljzt").find(format[i]) != std::string::npos;
         ++i) {
      if (format[i] == '*')
        form += std::to_string(arguments.next<int32_t>());
      else if (std::string_view("hljzt").find(format[i]) == std::string::npos)
        form += format[i];
      wide |= std::string_view("ljzt").find(format[i]) != std::string::npos;
    }
    const char kind = i < format.size() ? format[i] : '\0';
    if (kind == '%')
      text += '%';
    else if (kind == 'c')
      text += formatted(form + kind, arguments.next<int32_t>());
    else if (kind && std::string_view("diouxX").find(kind) != std::string::npos)
      text += wide ? formatted(form + "ll" + kind, arguments.next<int64_t>())
                   : formatted(form + kind, arguments.next<int32_t>());
    else if (kind && std::string_view("aAeEfFgG").find(kind) != std::string::npos)
      text += formatted(form + kind, arguments.next<double>());
    else if (kind == 'p')
      text += formatted(form + kind, reinterpret_cast<void*>(arguments.next<uint64_t>()));
    else if (kind == 's')
      text += formatted(form + kind, text_at(arguments.w, arguments.next<uint64_t>(), arguments.lane).c_str());
    else
      throw Fault("printf: unknown conversion in \"" + format + "\"");
  }
  return text;
}

void run_print(Warp& w, const Instruction& in) {
  each_lane(w.mask, [&](int lane) {
    const std::string format = text_at(w, argument(w, in, 0, lane), lane);
    w.block->counters->printed += print(format, {w, argument(w, in, 1, lane), lane});
    const int32_t result = 0;
    if (!in.result_offsets.empty()) std::memcpy(w.frame->param(lane) + in.result_offsets[0].first, &result, 4);
  });
}

void run_assertion(Warp& w, const Instruction& in) {  // message, file, line, function, size of a character
  const int lane = __builtin_ctz(w.mask);
  throw Fault("assertion failed: " + text_at(w, argument(w, in, 0, lane), lane) + ", " +
              text_at(w, argument(w, in, 1, lane), lane) + ":" + std::to_string(argument(w, in, 2, lane)) + ", " +
              text_at(w, argument(w, in, 3, lane), lane));
}

}  // namespace

bool system_call(Decoder& s, int at) {
  const std::string& name = s.expression(at).name;
  const bool prints = name == "vprintf";
  if (!prints && name != "__assertfail") return false;
  auto remember = [&](int operand, auto& offsets, auto& bytes) {
    for (const Expression& item : s.expression(operand).items) {
      const Variable* variable = s.variable(item.name);
      if (!variable || variable->space != Space::param) s.unknown("a .param variable expected");
      offsets.emplace_back(variable->offset, 0);
      bytes.push_back(variable->bytes);
    }
  };
  if (at) remember(0, s.in.result_offsets, s.in.result_bytes);
  remember(at + 1, s.in.argument_offsets, s.in.argument_bytes);
  if (s.in.argument_offsets.size() != (prints ? 2 : 5)) s.unknown("wrong number of call parameters");
  s.in.execute = prints ? run_print : run_assertion;
  return true;
}

}  // namespace emulator
