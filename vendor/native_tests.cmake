# Programs of ggml_patches/src/tests: each test-*.cpp is a test on the CPU module, bench-*.cpp are measured by hand and
# only tried here. Both take modules of backends as arguments and find the CPU's by DFLASH_CPU_MODULE.
file(GLOB sources CONFIGURE_DEPENDS
  ${CMAKE_SOURCE_DIR}/ggml_patches/src/tests/test-*.cpp ${CMAKE_SOURCE_DIR}/ggml_patches/src/tests/bench-*.cpp)
foreach(source ${sources})
  get_filename_component(name ${source} NAME_WE)
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE ggml ggml-base)
  target_include_directories(${name} PRIVATE ${LLAMA_CPP}/ggml/src)
  target_compile_definitions(${name} PRIVATE DFLASH_CPU_MODULE="$<TARGET_FILE:ggml-cpu>")
  target_compile_options(${name} PRIVATE -Wall -Wextra)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
  add_dependencies(${name} ggml-cpu)
  if(name MATCHES "^test-")
    add_test(NAME ${name} COMMAND ${name} $<TARGET_FILE:ggml-cpu>)
  endif()
endforeach()

# On the devices of every GPU backend that was built. Without a device there the test fails; it does not pass silently.
foreach(backend cuda hip sycl)
  if(TARGET ggml-${backend})
    add_dependencies(test-dflash-ops ggml-${backend})
    add_test(NAME test-dflash-ops-${backend}
      COMMAND test-dflash-ops $<TARGET_FILE:ggml-cpu> $<TARGET_FILE:ggml-${backend}>)
  endif()
endforeach()

add_test(NAME bench-dflash-ops-small COMMAND bench-dflash-ops --small --only gdn --only select $<TARGET_FILE:ggml-cpu>)

# A selection that names nothing is an error, in the program and in ctest: else a misspelt name would test nothing.
add_test(NAME unknown-group COMMAND test-dflash-ops --only nonesuch)
set_property(TEST unknown-group PROPERTY PASS_REGULAR_EXPRESSION "there is no such group: nonesuch")
add_test(NAME unknown-module COMMAND test-dflash-ops nonesuch.so)
set_property(TEST unknown-module PROPERTY PASS_REGULAR_EXPRESSION "module nonesuch.so does not load")
# cmake and ctest of whoever runs the tests: those that built may have been pip's, in a folder that is gone.
add_test(NAME names-of-tests COMMAND cmake
  -D CTEST=ctest -D BUILD=${CMAKE_BINARY_DIR}
  -D "NAMES=test-dflash-ops,bench-dflash-ops-small,unknown-group,unknown-module"
  -P ${CMAKE_CURRENT_SOURCE_DIR}/names_of_tests.cmake)

# The oracle of the Python tests: libllama on the same files. No test by itself.
add_executable(dflash-oracle ${CMAKE_SOURCE_DIR}/tests/native/oracle.cpp)
target_link_libraries(dflash-oracle PRIVATE llama ggml ggml-base)
target_include_directories(dflash-oracle PRIVATE ${LLAMA_CPP}/src)
target_compile_options(dflash-oracle PRIVATE -O1)
set_target_properties(dflash-oracle PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/tests)
