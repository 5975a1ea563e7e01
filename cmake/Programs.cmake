# pacer_add_program: one program from all source files of a folder; for tests, benchmarks and examples.

# Header-only helpers that only programs use. They may come from PACER_DEPS.
foreach(_header IN ITEMS nlohmann/json.hpp xxhash.h)
  string(MAKE_C_IDENTIFIER "PACER_INCLUDE_${_header}" _variable)
  find_path(${_variable} ${_header})
  mark_as_advanced(${_variable})
  if(NOT ${_variable})
    message(FATAL_ERROR "pacer: ${_header} was not found; run cmake/bootstrap.sh, or set PACER_DEPS to a folder that has usr/include/${_header}.")
  endif()
  list(APPEND PACER_PROGRAM_INCLUDES "${${_variable}}")
endforeach()

# pacer_add_program(TARGET FOLDER [library...]): does nothing when the folder has no sources yet.
function(pacer_add_program target folder)
  pacer_sources(sources ${folder}/*.cpp)
  if(NOT sources)
    return()
  endif()
  add_executable(${target} ${sources})
  pacer_target_flags(${target})
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY None)  # comes with pacer::kernels
  target_include_directories(${target} SYSTEM PRIVATE ${PACER_PROGRAM_INCLUDES})
  target_link_libraries(${target} PRIVATE pacer::pacer torch_cpu_library ${ARGN})
endfunction()
