// The kernels of GPUs enter the registry; in CUDA builds alone.
#include <c10/core/DeviceType.h>

#include "core/kernels.h"
#include "cuda/launch.h"

namespace ringattn {
namespace {

[[maybe_unused]] const bool registered = [] {
  register_kernels(static_cast<int>(c10::DeviceType::CUDA), &cuda::kernels());
  return true;
}();

}  // namespace
}  // namespace ringattn
