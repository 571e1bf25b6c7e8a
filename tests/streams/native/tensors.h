// Tensors of the machine.
#pragma once

#include <ATen/core/Tensor.h>

#include "native/log.h"

namespace streams {

at::Tensor on_cpu(const at::Tensor& tensor);  // over the same memory; a CPU tensor as it is
Ranges ranges_of(const at::Tensor& tensor);

}  // namespace streams
