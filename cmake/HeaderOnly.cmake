# Header-only libraries used inside source files, never in public headers. They may come from PACER_DEPS. Sets
# PACER_HEADER_ONLY, their include folders.
set(PACER_HEADER_ONLY "")
set(_headers xxhash.h)
if(PACER_TESTS)  # reads back what the JSON writer wrote
  list(APPEND _headers nlohmann/json.hpp)
endif()
foreach(_header IN LISTS _headers)
  string(MAKE_C_IDENTIFIER "PACER_INCLUDE_${_header}" _variable)
  find_path(${_variable} ${_header})
  mark_as_advanced(${_variable})
  if(NOT ${_variable})
    message(FATAL_ERROR "pacer: ${_header} was not found; run cmake/bootstrap.sh, or set PACER_DEPS to a folder that has usr/include/${_header}.")
  endif()
  list(APPEND PACER_HEADER_ONLY "${${_variable}}")
endforeach()
list(REMOVE_DUPLICATES PACER_HEADER_ONLY)
