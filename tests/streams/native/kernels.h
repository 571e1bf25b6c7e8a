// The kernel table of the machine.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/kernels.h"
#include "cuda/plan.h"

namespace streams {

const ringattn::KernelTable& kernels();

// An argument of a kernel as the emulator sees it: bytes of the host at an address of the kernel's own.
struct Region {
  std::uint64_t address = 0;
  std::uintptr_t host = 0;
  std::int64_t bytes = 0;
  std::string name;
  bool read_only = false;
};

// Runs the launches that csrc/cuda plans for a call. What lies outside of the regions cannot be reached.
using Runner = std::function<void(const std::vector<ringattn::cuda::LaunchPlan>&, const std::vector<Region>&)>;

// How calls are computed from now on: by the kernels of the CPU (no runner), or by a runner of plans for `arch`.
void set_runner(Runner runner, int arch);

}  // namespace streams
