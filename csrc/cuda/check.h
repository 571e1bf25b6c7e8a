// Errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace ringattn::cuda {

inline void check(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // so that nobody else finds it
  throw std::runtime_error(what + ": " + cudaGetErrorString(error));
}

}  // namespace ringattn::cuda
