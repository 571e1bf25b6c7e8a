# cuda: the block kernels of GPUs. Knows core alone. RINGATTN_ARCHS: architectures with machine code, as in "80;90";
# the newest also gets PTX, from which a driver makes code for GPUs that come later.
set(RINGATTN_ARCHS "80;86;89;90" CACHE STRING "GPU architectures with machine code")
set(architectures ${RINGATTN_ARCHS})
list(SORT architectures COMPARE NATURAL)
list(POP_BACK architectures newest)
list(TRANSFORM architectures APPEND -real)
set(CMAKE_CUDA_ARCHITECTURES ${architectures} ${newest})
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
include(CudaOnDisk)

# One line for each instantiation: its file in kernels/.
set(ringattn_cuda_kernels
  backward_keys_bf16_64
  backward_keys_bf16_128
  backward_keys_bf16_256
  backward_keys_fp16_64
  backward_keys_fp16_128
  backward_keys_fp16_256
  backward_queries_bf16_64
  backward_queries_bf16_128
  backward_queries_bf16_256
  backward_queries_fp16_64
  backward_queries_fp16_128
  backward_queries_fp16_256
  cast_bf16
  cast_fp16
  delta_bf16
  delta_fp16
  finalize_bf16
  finalize_fp16
  forward_bf16_64
  forward_bf16_128
  forward_bf16_256
  forward_fp16_64
  forward_fp16_128
  forward_fp16_256
  merge_bf16
  merge_fp16
  pace)
list(TRANSFORM ringattn_cuda_kernels PREPEND ${CMAKE_CURRENT_LIST_DIR}/kernels/)
list(TRANSFORM ringattn_cuda_kernels APPEND .cu)

# Objects, not an archive: a linker drops archive members that only register kernels.
add_library(ringattn_cuda OBJECT
  ${CMAKE_CURRENT_LIST_DIR}/device.cpp
  ${CMAKE_CURRENT_LIST_DIR}/launch.cpp
  ${CMAKE_CURRENT_LIST_DIR}/plan.cpp
  ${CMAKE_CURRENT_LIST_DIR}/registry.cpp
  ${ringattn_cuda_kernels})
target_link_libraries(ringattn_cuda PUBLIC ringattn_core cuda_headers)
