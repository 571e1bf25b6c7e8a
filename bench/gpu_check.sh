#!/bin/bash
# On a machine with a GPU: builds the CUDA kernels for it, checks their results, times them, and runs the sanitizer's
# race and memory checks on the results where compute-sanitizer is installed. Needs nvcc, CMake, ninja and Google
# Benchmark (libbenchmark-dev); takes a few minutes.
#
#   bench/gpu_check.sh [file for the results, default build/gpu_check.txt]
set -euo pipefail
results=$(realpath "${1:-$(dirname "$0")/../build/gpu_check.txt}")
cd "$(dirname "$0")/.."
mkdir -p "$(dirname "$results")"

arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
cmake -S . -B build/gpu_check -G Ninja -DRINGATTN_CUDA=ON -DRINGATTN_BENCH=ON "-DRINGATTN_ARCHS=$arch" > /dev/null
ninja -C build/gpu_check ringattn_bench_cuda
{
  nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv,noheader
  nvcc --version | grep release
  git rev-parse HEAD
  for tool in memcheck racecheck; do
    if command -v compute-sanitizer > /dev/null; then
      compute-sanitizer --tool "$tool" --error-exitcode 1 build/gpu_check/ringattn_bench_cuda --benchmark_filter=none
    else
      echo "no compute-sanitizer: $tool was not run"
    fi
  done
  build/gpu_check/ringattn_bench_cuda --benchmark_min_time=0.2s
} 2>&1 | tee "$results"
