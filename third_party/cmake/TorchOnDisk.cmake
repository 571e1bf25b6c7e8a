# torch_on_disk: the installed torch as a target. find_package(Torch) is not used: it fails on slim CUDA toolkits and
# forces its own architectures.
find_package(OpenMP REQUIRED COMPONENTS CXX)  # without it at::parallel_for is silently serial

add_library(torch_on_disk INTERFACE)
target_include_directories(torch_on_disk SYSTEM INTERFACE
  "${RINGATTN_TORCH_DIR}/include"
  "${RINGATTN_TORCH_DIR}/include/torch/csrc/api/include")
foreach(name IN ITEMS torch torch_cpu c10)
  # Not cached: RINGATTN_TORCH_DIR may change from one build to the next.
  unset(library)
  find_library(library ${name} PATHS "${RINGATTN_TORCH_DIR}/lib" NO_DEFAULT_PATH NO_CACHE REQUIRED)
  target_link_libraries(torch_on_disk INTERFACE "${library}")
endforeach()
target_compile_definitions(torch_on_disk INTERFACE USE_DISTRIBUTED)
target_link_libraries(torch_on_disk INTERFACE OpenMP::OpenMP_CXX)
# torch is loaded before this module, so its libraries are found without a path that would tie the wheel to one place.
set(CMAKE_SKIP_RPATH ON)
