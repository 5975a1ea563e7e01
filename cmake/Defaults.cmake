# What pacer prefers when it is the top-level project. As part of another project it changes none of these.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, Debug or RelWithDebInfo" FORCE)
endif()
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(PACER_CCACHE ccache)
if(PACER_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # The unity files are written anew by each configure, so their time must not count.
  set(_pacer_launcher "env;CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime;${PACER_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${_pacer_launcher}" CACHE STRING "")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${_pacer_launcher}" CACHE STRING "")
endif()
