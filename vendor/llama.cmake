# libllama: the vocabulary at run time, and the oracle of the tests. Only its public header is exported.
file(GLOB llama_core CONFIGURE_DEPENDS ${LLAMA_CPP}/src/*.cpp)
file(GLOB llama_models CONFIGURE_DEPENDS ${LLAMA_CPP}/src/models/*.cpp)
set(LLAMA_VERSION "pyllama_dflash")
set(LLAMA_BUILD_COMMIT "pyllama_dflash")
configure_file(${LLAMA_CPP}/src/llama-version.h.in ${CMAKE_CURRENT_BINARY_DIR}/llama-version.h @ONLY)

add_library(llama SHARED ${llama_core} ${llama_models})
target_include_directories(llama PUBLIC ${LLAMA_CPP}/include PRIVATE ${LLAMA_CPP}/src ${CMAKE_CURRENT_BINARY_DIR})
target_compile_definitions(llama PUBLIC LLAMA_SHARED PRIVATE LLAMA_BUILD)
target_link_libraries(llama PUBLIC ggml)

# The time of a build goes here. The model files only build graphs, once per context: they are compiled in groups and
# without optimisation that would take longer than they run.
set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
set_source_files_properties(${llama_core} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
target_compile_options(llama PRIVATE $<$<CXX_COMPILER_ID:GNU,Clang,AppleClang>:-O1>)
