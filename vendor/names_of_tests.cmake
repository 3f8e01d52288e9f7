# cmake -D CTEST=... -D BUILD=... -D NAMES=a,b -P: ctest knows every name, and a name that it does not know is an error.
string(REPLACE "," ";" NAMES "${NAMES}")
foreach(name ${NAMES})
  execute_process(COMMAND ${CTEST} --test-dir ${BUILD} -N -R "^${name}$" OUTPUT_VARIABLE listed)
  if(NOT listed MATCHES "Total Tests: 1\n")
    message(FATAL_ERROR "there is no test ${name}")
  endif()
endforeach()
execute_process(COMMAND ${CTEST} --test-dir ${BUILD} --no-tests=error -R "^nonesuch$"
  RESULT_VARIABLE code OUTPUT_QUIET ERROR_QUIET)
if(code EQUAL 0)
  message(FATAL_ERROR "ctest takes a selection that names nothing for a success")
endif()
