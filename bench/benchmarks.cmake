# The C++ benchmarks, with Google Benchmark; without it one line says so.
find_package(benchmark QUIET)
if(NOT benchmark_FOUND)
  message(STATUS "No C++ benchmarks: Google Benchmark was not found; on Debian: apt-get install libbenchmark-dev")
  return()
endif()

add_executable(ringattn_bench_cpu bench/cpu_kernels.cpp)
target_link_libraries(ringattn_bench_cpu PRIVATE ringattn_cpu benchmark::benchmark)

if(RINGATTN_CUDA)
  add_executable(ringattn_bench_cuda bench/cuda_kernels.cpp)
  target_link_libraries(ringattn_bench_cuda PRIVATE ringattn_cuda benchmark::benchmark)
endif()
