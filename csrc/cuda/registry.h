// The kernels of this build by name. Every file in kernels/ enters its kernel here, so the list of files in
// sources.cmake is the only list, and adding an instantiation is one line there.
#pragma once

namespace ringattn::cuda {

struct Registered {
  Registered(const char* name, const void* function);

  const char* name;
  const void* function;  // what the CUDA runtime launches
  const Registered* next;
};

// Null if this build has no such kernel.
const void* find_kernel(const char* name);

}  // namespace ringattn::cuda
