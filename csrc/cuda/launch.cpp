#include "cuda/launch.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/check.h"
#include "cuda/device.h"
#include "cuda/registry.h"

namespace ringattn::cuda {
namespace {

constexpr std::uint32_t kSharedBytesWithoutAsking = 48 * 1024;

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "no CUDA device");
  return device;
}

const void* function_of(const std::string& name) {
  const void* function = find_kernel(name.c_str());
  if (function == nullptr) throw std::runtime_error("this build has no kernel " + name);
  return function;
}

// More shared memory than every device grants must be asked for, once per device and kernel.
void allow_shared_bytes(const LaunchPlan& plan, const void* function) {
  if (plan.shared_bytes <= kSharedBytesWithoutAsking) return;
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, std::uint32_t> allowed;
  const std::lock_guard lock(mutex);
  std::uint32_t& bytes = allowed[{current_device(), function}];
  if (bytes >= plan.shared_bytes) return;
  check(
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(plan.shared_bytes)),
      plan.kernel + " with " + std::to_string(plan.shared_bytes) + " bytes of shared memory");
  bytes = plan.shared_bytes;
}

void launch_all(const std::vector<LaunchPlan>& plans, const Launch& where) {
  for (const LaunchPlan& plan : plans) launch(plan, where.stream);
}

}  // namespace

void launch(const LaunchPlan& plan, void* stream) {
  const void* function = function_of(plan.kernel);
  allow_shared_bytes(plan, function);
  Params params = plan.params;
  void* arguments[] = {&params};
  check(cudaLaunchKernel(function, dim3(plan.grid), dim3(plan.threads), arguments, plan.shared_bytes,
                         static_cast<cudaStream_t>(stream)),
        plan.kernel);
}

const KernelTable& kernels() {
  static const KernelTable table{
      .key_tile =
          [](DType, std::int64_t head_dim) {
            return std::int32_t{shape_of(Kernel::forward, code_arch(), padded_head_dim(head_dim)).keys};
          },
      .forward = [](const BlockArgs& block,
                    const Launch& where) { launch_all(plan_forward(block, code_arch()), where); },
      .finalize = [](const BlockArgs& block, const Launch& where) { launch_all(plan_finalize(block), where); },
      .merge = [](const BlockArgs& block, const Launch& where) { launch_all(plan_merge(block), where); },
      .delta = [](const BlockArgs& block, const Launch& where) { launch_all(plan_delta(block), where); },
      .backward = [](const BlockArgs& block,
                     const Launch& where) { launch_all(plan_backward(block, code_arch()), where); },
      .obstacle = obstacle,
      .capture = capture,
      .pace = pace,
  };
  return table;
}

}  // namespace ringattn::cuda
