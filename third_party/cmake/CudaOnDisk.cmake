# CUDA as a language, with the nvcc of a toolkit or of pip's packages, and how the CUDA runtime is reached.
# find_package(CUDAToolkit) is not used: what pip installs does not look like a toolkit to it.

# pip's libraries lie in lib, where its nvcc does not look, and CMake links a program to try the compiler.
if(CMAKE_CUDA_COMPILER)
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --dryrun none.cu OUTPUT_QUIET ERROR_VARIABLE said)
  string(REGEX MATCH "#\\$ TOP=[^\r\n]+" root "${said}")
  string(REGEX REPLACE "^.*=" "" root "${root}")
  if(EXISTS "${root}/lib/libcudart_static.a")
    file(REAL_PATH "${root}/lib" libraries)
    string(APPEND CMAKE_CUDA_FLAGS " \"-L${libraries}\"")
  endif()
endif()
enable_language(CUDA)

# For host sources. Programs get the static runtime, as CMake does it by default.
add_library(cuda_headers INTERFACE)
target_include_directories(cuda_headers SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})

# A module for torch shares torch's runtime: two runtimes would have two current devices. Which of the files is linked
# does not matter: the module asks for its soname, and torch has loaded it by then. Some wheels of torch bring the
# runtime under a name of their own, in torch/lib.
function(share_torch_cuda_runtime module)
  string(REGEX MATCH "^[0-9]+" major "${CMAKE_CUDA_COMPILER_VERSION}")
  file(GLOB runtime "${RINGATTN_TORCH_DIR}/lib/libcudart*.so.${major}*")
  if(NOT runtime)
    unset(runtime)
    find_library(runtime libcudart.so.${major} NO_CACHE REQUIRED NO_DEFAULT_PATH PATHS
      "${RINGATTN_TORCH_DIR}/../nvidia/cu${major}/lib"
      "${RINGATTN_TORCH_DIR}/../nvidia/cuda_runtime/lib"
      ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES})
  endif()
  message(STATUS "CUDA runtime: ${runtime}")
  set_target_properties(${module} PROPERTIES CUDA_RUNTIME_LIBRARY None LINKER_LANGUAGE CXX)
  target_link_libraries(${module} PRIVATE "${runtime}")
endfunction()
