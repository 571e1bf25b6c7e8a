#include "cuda/device.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/check.h"
#include "cuda/registry.h"

namespace ringattn::cuda {
namespace {

constexpr const char* kProbe = "ringattn_forward_bf16_64";  // every build has it
constexpr int kOldestCapability = 80;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Why this process cannot use GPUs at all, or not that many; empty if it can.
std::string driver_obstacle(int device_index) {
  int count = 0, driver = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    (void)cudaDriverGetVersion(&driver);
    if (driver == 0) return "no NVIDIA driver was found";
    if (error == cudaErrorInsufficientDriver) {
      return "the NVIDIA driver serves CUDA up to " + version_text(driver) + ", and this build is for CUDA " +
             version_text(CUDART_VERSION) + "; update the driver";
    }
    return cudaGetErrorString(error);
  }
  if (device_index >= count) return "the driver shows " + std::to_string(count) + " GPUs";
  return "";
}

// Makes a device current, without the framework, and the one before it again at the end.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index) {
    check(cudaGetDevice(&before_), "no CUDA device");
    check(cudaSetDevice(index), "cuda:" + std::to_string(index));
  }
  ~CurrentDevice() { (void)cudaSetDevice(before_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

// name: receives "NVIDIA A100 (cuda:0, sm_80)".
std::string device_obstacle(int index, std::string& name) {
  name = "cuda:" + std::to_string(index);
  const std::string driver = driver_obstacle(index);
  if (!driver.empty()) return name + " cannot be used: " + driver;

  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), name);
  const int capability = 10 * properties.major + properties.minor;
  name = std::string(properties.name) + " (" + name + ", sm_" + std::to_string(capability) + ")";
  if (capability < kOldestCapability) return name + " is too old: kernels need sm_80 or newer";

  const CurrentDevice current(index);
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, find_kernel(kProbe)) != cudaSuccess) {
    (void)cudaGetLastError();
    return name + " has no code in this build; build it with RINGATTN_ARCHS=" + std::to_string(capability);
  }
  return "";
}

}  // namespace

Obstacle obstacle(DType dtype, std::int64_t head_dim, int device_index) {
  static std::mutex mutex;
  static std::map<int, std::string> fit;  // names
  std::string name;
  {
    const std::lock_guard lock(mutex);
    const auto found = fit.find(device_index);
    if (found == fit.end()) {
      const std::string problem = device_obstacle(device_index, name);
      if (!problem.empty()) return {Obstacle::Kind::device, problem};
      fit[device_index] = name;
    } else {
      name = found->second;
    }
  }
  if (dtype != DType::bfloat16 && dtype != DType::float16) {
    return {Obstacle::Kind::dtype, name + " takes bfloat16 and float16"};
  }
  if (head_dim % 8 != 0 || head_dim < 8 || head_dim > 256) {
    return {Obstacle::Kind::head_dim, name + " takes a head_dim that is a multiple of 8, from 8 to 256"};
  }
  return {};
}

std::uint64_t capture(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  // A GPU that has failed captures nothing; what comes next says how it failed.
  if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

int code_arch() {
  static std::mutex mutex;
  static std::map<int, int> known;
  int device = 0;
  check(cudaGetDevice(&device), "no CUDA device");
  const std::lock_guard lock(mutex);
  int& arch = known[device];
  if (arch == 0) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, find_kernel(kProbe)), "this build has no code for the GPU");
    arch = attributes.ptxVersion;
  }
  return arch;
}

void pace(std::int64_t* start, std::int64_t nanoseconds, void* stream) {
  void* arguments[] = {&start, &nanoseconds};
  check(
      cudaLaunchKernel(find_kernel("ringattn_pace"), dim3(1), dim3(1), arguments, 0, static_cast<cudaStream_t>(stream)),
      "ringattn_pace");
}

}  // namespace ringattn::cuda
