// The kernels and the threads for a tensor's device.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

#include "cpu/kernels.h"
#include "ring/pass.h"

namespace ringattn {

// Tasks are handed out one by one, because masks make them unequal. Kernels do not depend on who runs what.
inline ParallelFor parallel_over(int threads) {
  return [threads](std::int64_t count, const std::function<void(std::int64_t)>& task) {
    std::atomic<std::int64_t> next{0};
    const auto worker = [&](std::int64_t, std::int64_t) {
      for (std::int64_t i = next++; i < count; i = next++) task(i);
    };
    const std::int64_t workers = std::min<std::int64_t>(threads, count);
    if (workers <= 1) {
      worker(0, 1);
    } else {
      at::parallel_for(0, workers, 1, worker);
    }
  };
}

inline Device kernels_for(const at::Tensor& tensor, int threads) {
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.is_cpu(), "ringattn_ext has no kernels for device ", tensor.device(),
                              " in this build");
  Device device;
  device.kernels = &cpu::kernels();
  device.launch.parallel = parallel_over(threads);
  return device;
}

inline Device kernels_for(const at::Tensor& tensor) { return kernels_for(tensor, at::get_num_threads()); }

}  // namespace ringattn
