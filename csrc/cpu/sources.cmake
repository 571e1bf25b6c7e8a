# cpu: the block kernels of the CPU. micro.cpp is compiled once per instruction set, each time into a namespace of its
# own; the rest is compiled for the oldest CPU, so nothing else may carry instruction set flags.
include(CheckCXXCompilerFlag)

# Errno and floating-point traps are observed by nobody; NaN, infinity and the order of operations are kept.
set(RINGATTN_CPU_FLOAT_FLAGS -fno-math-errno -fno-trapping-math)

set(ringattn_cpu_capabilities generic)
set(ringattn_cpu_flags_generic "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(ringattn_cpu_flags_avx2 -mavx2 -mfma -mf16c)
  set(ringattn_cpu_flags_avx512 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mfma -mf16c)
  # gcc 12 warns of its own header.
  set(ringattn_cpu_flags_avx512_bf16 ${ringattn_cpu_flags_avx512} -mavx512bf16 -Wno-maybe-uninitialized)
  foreach(capability avx2 avx512 avx512_bf16)
    string(REPLACE ";" " " flags "${ringattn_cpu_flags_${capability}}")
    check_cxx_compiler_flag("${flags}" RINGATTN_CPU_COMPILER_HAS_${capability})
    if(RINGATTN_CPU_COMPILER_HAS_${capability})
      list(APPEND ringattn_cpu_capabilities ${capability})
    endif()
  endforeach()
endif()

add_library(ringattn_cpu STATIC
  ${CMAKE_CURRENT_LIST_DIR}/backward.cpp
  ${CMAKE_CURRENT_LIST_DIR}/capability.cpp
  ${CMAKE_CURRENT_LIST_DIR}/few_rows.cpp
  ${CMAKE_CURRENT_LIST_DIR}/forward.cpp
  ${CMAKE_CURRENT_LIST_DIR}/kernels.cpp
  ${CMAKE_CURRENT_LIST_DIR}/state.cpp)
target_include_directories(ringattn_cpu PUBLIC ${CMAKE_CURRENT_LIST_DIR}/..)
target_compile_options(ringattn_cpu PRIVATE ${RINGATTN_CPU_FLOAT_FLAGS} -ffp-contract=off)

foreach(capability ${ringattn_cpu_capabilities})
  add_library(ringattn_cpu_${capability} OBJECT ${CMAKE_CURRENT_LIST_DIR}/micro.cpp)
  target_include_directories(ringattn_cpu_${capability} PRIVATE ${CMAKE_CURRENT_LIST_DIR}/..)
  target_compile_definitions(ringattn_cpu_${capability} PRIVATE RINGATTN_CPU_CAPABILITY=${capability})
  # The products are written as a * b + c and must become fused multiply-adds: older gcc does that for "fast" alone.
  target_compile_options(ringattn_cpu_${capability} PRIVATE
    ${RINGATTN_CPU_FLOAT_FLAGS} -O3 -ffp-contract=fast ${ringattn_cpu_flags_${capability}})
  target_sources(ringattn_cpu PRIVATE $<TARGET_OBJECTS:ringattn_cpu_${capability}>)
  string(TOUPPER ${capability} upper)
  target_compile_definitions(ringattn_cpu PRIVATE RINGATTN_CPU_WITH_${upper})
endforeach()

if(RINGATTN_TESTS)
  set(ringattn_cpu_test_dir ${CMAKE_CURRENT_LIST_DIR}/../../tests/cpu_kernels)
  add_executable(ringattn_cpu_tests
    ${ringattn_cpu_test_dir}/kernels_test.cpp)
  find_package(Threads REQUIRED)
  target_link_libraries(ringattn_cpu_tests PRIVATE ringattn_cpu Threads::Threads)
  # The test says which of the tables was chosen.
  target_compile_definitions(ringattn_cpu_tests PRIVATE $<TARGET_PROPERTY:ringattn_cpu,COMPILE_DEFINITIONS>)
endif()
