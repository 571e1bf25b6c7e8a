// The kernels for a tensor's device, and where the calling thread launches them.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <utility>
#include <vector>

#include "core/host.h"
#include "ring/pass.h"

namespace ringattn {

// Kernels that take `dtype` and `head_dim`, on the current stream of `where`. Raises NotImplementedError if this build
// or this machine has none for the device, TypeError or ValueError for what its kernels do not take; `name` is the
// argument that is to blame. The device need not be the current one yet.
Device kernels_for(at::Device where, const char* name, DType dtype, std::int64_t head_dim,
                   int threads = at::get_num_threads());

// The graph into which the current stream of a device is being captured, or of the current device that is no CPU; 0:
// none.
std::uint64_t capture_on(at::Device where);
std::uint64_t current_capture();

// Mask::document_bounds where kernels on the current stream of `where` can read them: a tensor that must outlive the
// launches; undefined if they read the host's. It is copied once and kept, so that later calls move nothing. While a
// graph is captured it must be there already: else RuntimeError.
at::Tensor place_documents(at::Device where, const std::vector<std::int32_t>& bounds);

struct Leave {
  ~Leave() {
    if (host().leave != nullptr) host().leave();
  }
};

// The function of an operator, which throws RingError as the host knows it.
template <auto function>
struct Operator;

template <typename Result, typename... Arguments, Result (*function)(Arguments...)>
struct Operator<function> {
  static Result call(Arguments... arguments) {
    const Leave leave;
    try {
      return function(std::forward<Arguments>(arguments)...);
    } catch (const RingError& error) {
      if (host().raise != nullptr) host().raise(error);
      throw;
    }
  }
};

// Registers one function for every kind of device: what runs on which, kernels_for decides.
template <auto function>
void implement(torch::Library& library, const char* name) {
  for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::PrivateUse1}) {
    library.impl(name, torch::dispatch(key, &Operator<function>::call));
  }
}

}  // namespace ringattn
