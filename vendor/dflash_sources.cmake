# Our own sources in the mirrored tree join upstream's targets here, so that no patch has to touch a CMake file.
function(dflash_add target)
  list(TRANSFORM ARGN PREPEND ${LLAMA_CPP}/ggml/src/)
  file(GLOB sources CONFIGURE_DEPENDS ${ARGN})
  if(NOT TARGET ${target} OR NOT sources)
    return()
  endif()
  target_sources(${target} PRIVATE ${sources})
  if(target STREQUAL "ggml-hip")  # a .cu file is HIP there
    set_property(SOURCE ${sources} TARGET_DIRECTORY ${target} PROPERTY LANGUAGE HIP)
  endif()
  foreach(source ${sources})
    if(source MATCHES "\\.(c|cpp)$")
      # Rounding is part of the ops' contract: a multiply-add is fused where the source says so and nowhere else.
      set_property(SOURCE ${source} TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_OPTIONS
        -ffp-contract=off -Wall -Wextra -Wno-unused-function)
    elseif(target STREQUAL "ggml-cuda")  # undoes upstream's -use_fast_math for these files
      set_property(SOURCE ${source} TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_OPTIONS
        -ftz=false -prec-div=true -prec-sqrt=true -fmad=false)
    elseif(target STREQUAL "ggml-hip")
      set_property(SOURCE ${source} TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_OPTIONS -ffp-contract=off)
    endif()
    if(target STREQUAL "ggml-sycl" AND CMAKE_CXX_COMPILER_ID STREQUAL "IntelLLVM")  # whose default knows no NaN
      set_property(SOURCE ${source} TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_OPTIONS -fp-model=precise)
    endif()
  endforeach()
endfunction()

if(TARGET ggml-cuda)
  enable_language(CUDA)
endif()

# Kernels of instructions that compute capability 9.0 alone has: built for it alone, where ggml is built for it too. The
# files that call them are given.
function(dflash_add_sm90a)
  if(NOT TARGET ggml-cuda)
    return()
  endif()
  get_target_property(architectures ggml-cuda CUDA_ARCHITECTURES)
  if(NOT architectures MATCHES "(^|;)(90|all|native)" OR CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.0)
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS ${LLAMA_CPP}/ggml/src/ggml-cuda/dflash/sm90a/*.cu)
  add_library(ggml-cuda-sm90a OBJECT ${sources})
  set_target_properties(ggml-cuda-sm90a PROPERTIES CUDA_ARCHITECTURES 90a-real POSITION_INDEPENDENT_CODE ON)
  foreach(property INCLUDE_DIRECTORIES COMPILE_DEFINITIONS COMPILE_OPTIONS)
    set_property(TARGET ggml-cuda-sm90a PROPERTY ${property} $<TARGET_PROPERTY:ggml-cuda,${property}>)
  endforeach()
  target_compile_options(ggml-cuda-sm90a PRIVATE -ftz=false -prec-div=true -prec-sqrt=true -fmad=false)
  target_sources(ggml-cuda PRIVATE $<TARGET_OBJECTS:ggml-cuda-sm90a>)
  list(TRANSFORM ARGN PREPEND ${LLAMA_CPP}/ggml/src/ggml-cuda/dflash/)
  set_property(SOURCE ${ARGN} TARGET_DIRECTORY ggml-cuda APPEND PROPERTY COMPILE_DEFINITIONS DFLASH_SM90A)
endfunction()

dflash_add(ggml-base ggml-dflash*.c ggml-dflash*.cpp dflash/*.c dflash/*.cpp)
dflash_add(ggml-cpu ggml-cpu/dflash/*.c ggml-cpu/dflash/*.cpp)
dflash_add(ggml-cuda ggml-cuda/dflash/*.cu)
dflash_add_sm90a(mul_mat.cu dflash.cu)
dflash_add(ggml-hip ggml-cuda/dflash/*.cu)
dflash_add(ggml-sycl ggml-sycl/dflash/*.cpp)

# The repacked weight formats are switched off (GGML_CPU_REPACK), yet upstream compiles them: half a minute for nothing.
get_target_property(sources ggml-cpu SOURCES)
list(FILTER sources EXCLUDE REGEX "repack\\.cpp$")
set_property(TARGET ggml-cpu PROPERTY SOURCES ${sources})
