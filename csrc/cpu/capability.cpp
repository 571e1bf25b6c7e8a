// Which instruction set the inner loops use: the best that this machine and this build have, or a lower one that the
// environment variable RINGATTN_CPU asks for.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/micro.h"

namespace ringattn::cpu {

namespace generic {
extern const MicroTable table;
}
namespace avx2 {
extern const MicroTable table;
}
namespace avx512 {
extern const MicroTable table;
}
namespace avx512_bf16 {
extern const MicroTable table;
}

namespace {

// The table of a name, or null if this machine or this build lacks it.
const MicroTable* find_table(const std::string& name) {
#if defined(RINGATTN_CPU_WITH_AVX512)
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#if defined(RINGATTN_CPU_WITH_AVX512_BF16)
  if (name == "avx512_bf16" && has_avx512 && __builtin_cpu_supports("avx512bf16")) return &avx512_bf16::table;
#endif
  if (name == "avx512" && has_avx512) return &avx512::table;
#endif
#if defined(RINGATTN_CPU_WITH_AVX2)
  // Every CPU with AVX2 has F16C, which older compilers cannot ask for.
  if (name == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2::table;
#endif
  return name == "generic" ? &generic::table : nullptr;
}

const MicroTable& choose_table() {
  if (const char* name = std::getenv("RINGATTN_CPU")) {
    if (const MicroTable* table = find_table(name)) return *table;
    throw std::invalid_argument(
        "RINGATTN_CPU is \"" + std::string(name) +
        "\": expected generic, avx2, avx512 or avx512_bf16, and one that this machine and build have");
  }
  for (const char* name : {"avx512_bf16", "avx512", "avx2"}) {
    if (const MicroTable* table = find_table(name)) return *table;
  }
  return generic::table;
}

}  // namespace

const MicroTable& micro_table() {
  static const MicroTable& table = choose_table();
  return table;
}

}  // namespace ringattn::cpu
