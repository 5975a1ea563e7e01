# Finds LibTorch and defines its own targets (torch_cpu_library, torch_cuda_library), plus pacer::openmp.
#
# find_package(Torch) is not used: with a CUDA build of LibTorch it needs nvcc even for a CPU-only program, and it
# edits the project's CUDA flags. The target file that LibTorch ships is enough. This file is also installed with pacer.
#
# Looked at, in this order: Torch_DIR, TORCH_ROOT, CMAKE_PREFIX_PATH (a wrong version there is an error), then the place
# that the last set-up chose (build/libtorch), or recorded when an installed pacer was built, the torch of python3, and
# the .venv of the project (a wrong version is passed by).
# Sets LIBTORCH_PREFIX, LIBTORCH_VERSION, LIBTORCH_MINOR (its first two numbers), and LIBTORCH_CXX_STANDARD, the C++
# standard that its headers need.
include_guard(GLOBAL)

# The versions that pacer is built and tested with, and the only place that says so: scripts read these two lines.
set(PACER_LIBTORCH_OLDEST 2.11.0)
set(PACER_LIBTORCH_NEWEST 2.15.0)

if(NOT PACER_LIBTORCH_BUILT_WITH)
  option(PACER_LIBTORCH_STRICT "Refuse a LibTorch that is newer than those pacer is tested with, instead of warning" OFF)
endif()

# Sets `minor` to the first two numbers of a version.
function(_pacer_minor version minor)
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" found "${version}")
  set(${minor} "${found}" PARENT_SCOPE)
endfunction()

# Sets `fits` to whether pacer can be used with that version, and `is_newer` to whether nobody has tried that. An
# installed pacer sets PACER_LIBTORCH_BUILT_WITH, the minor version it was built with, and can be used with that alone.
function(_pacer_libtorch_fits version fits is_newer)
  _pacer_minor("${version}" minor)
  _pacer_minor("${PACER_LIBTORCH_NEWEST}" newest)
  set(${fits} FALSE PARENT_SCOPE)
  set(${is_newer} FALSE PARENT_SCOPE)
  if(PACER_LIBTORCH_BUILT_WITH)
    if(minor STREQUAL PACER_LIBTORCH_BUILT_WITH)
      set(${fits} TRUE PARENT_SCOPE)
    endif()
  elseif(minor VERSION_GREATER newest)
    set(${is_newer} TRUE PARENT_SCOPE)
    if(NOT PACER_LIBTORCH_STRICT)
      set(${fits} TRUE PARENT_SCOPE)
    endif()
  elseif(version VERSION_GREATER_EQUAL PACER_LIBTORCH_OLDEST)
    set(${fits} TRUE PARENT_SCOPE)
  endif()
endfunction()

# Sets `out` to the prefix of the LibTorch that `hint` names, or to nothing. A hint may be the prefix, its parent
# (site-packages), or any folder below share/cmake.
function(_pacer_libtorch_at hint out)
  set(${out} "" PARENT_SCOPE)
  foreach(place IN ITEMS "" /torch /../../.. /../..)
    get_filename_component(prefix "${hint}${place}" ABSOLUTE)
    if(EXISTS "${prefix}/share/cmake/Caffe2/Caffe2Targets.cmake")
      get_filename_component(prefix "${prefix}" REALPATH)
      set(${out} "${prefix}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

function(_pacer_libtorch_version prefix out)
  set(numbers "")
  set(header "${prefix}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${header}")  # its place before 2.9
    set(header "${prefix}/include/torch/csrc/api/include/torch/version.h")
  endif()
  if(EXISTS "${header}")
    foreach(part IN ITEMS MAJOR MINOR PATCH)
      file(STRINGS "${header}" line REGEX "define TORCH_VERSION_${part} " LIMIT_COUNT 1)
      string(REGEX MATCH "[0-9]+" number "${line}")
      list(APPEND numbers "${number}")
    endforeach()
  endif()
  list(JOIN numbers . version)
  set(${out} "${version}" PARENT_SCOPE)
endfunction()

# The torch that python3 would import. It is located, not imported: that is fast, and an install without its
# dependencies cannot be imported.
function(_pacer_libtorch_of_python out)
  set(${out} "" PARENT_SCOPE)
  execute_process(
    COMMAND python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

function(_pacer_find_libtorch)
  foreach(hint IN LISTS Torch_DIR TORCH_ROOT CMAKE_PREFIX_PATH ITEMS $ENV{Torch_DIR} $ENV{TORCH_ROOT} $ENV{CMAKE_PREFIX_PATH})
    string(REPLACE ":" ";" hint "${hint}")
    foreach(part IN LISTS hint)
      _pacer_libtorch_at("${part}" prefix)
      if(prefix)
        _pacer_libtorch_version("${prefix}" version)
        set(LIBTORCH_PREFIX "${prefix}" PARENT_SCOPE)
        set(LIBTORCH_VERSION "${version}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
  if(Torch_DIR)
    message(FATAL_ERROR "pacer: Torch_DIR is ${Torch_DIR}, but there is no LibTorch there.")
  endif()
  set(of_set_up "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../build/libtorch")
  if(EXISTS "${of_set_up}")
    file(STRINGS "${of_set_up}" of_set_up LIMIT_COUNT 1)
  endif()
  _pacer_libtorch_of_python(of_python)
  file(GLOB of_venv "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../.venv/lib/python3*/site-packages/torch")
  foreach(hint IN ITEMS "${PACER_LIBTORCH_HINT}" "${of_set_up}" "${of_python}" ${of_venv})
    _pacer_libtorch_at("${hint}" prefix)
    _pacer_libtorch_version("${prefix}" version)
    _pacer_libtorch_fits("${version}" fits is_newer)
    if(hint AND prefix AND fits)
      set(LIBTORCH_PREFIX "${prefix}" PARENT_SCOPE)
      set(LIBTORCH_VERSION "${version}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  if(PACER_LIBTORCH_BUILT_WITH)
    message(FATAL_ERROR "pacer: LibTorch ${PACER_LIBTORCH_BUILT_WITH}, which this pacer was built with, was not found; install "
      "it with pip, or name it with -DTorch_DIR=FOLDER/share/cmake/Torch.")
  endif()
  message(FATAL_ERROR "pacer: no LibTorch from ${PACER_LIBTORCH_OLDEST} to ${PACER_LIBTORCH_NEWEST} was found; run "
    "cmake/bootstrap.sh, or name one with -DTorch_DIR=FOLDER/share/cmake/Torch.")
endfunction()

if(TARGET torch_cpu_library)  # the parent project has called find_package(Torch)
  foreach(_property IN ITEMS IMPORTED_LOCATION_RELEASE IMPORTED_LOCATION)
    get_target_property(_location torch_cpu ${_property})
    if(_location)
      get_filename_component(LIBTORCH_PREFIX "${_location}/../.." REALPATH)
      break()
    endif()
  endforeach()
  _pacer_libtorch_version("${LIBTORCH_PREFIX}" LIBTORCH_VERSION)
else()
  _pacer_find_libtorch()
endif()
_pacer_libtorch_fits("${LIBTORCH_VERSION}" _fits _is_newer)
if(PACER_LIBTORCH_BUILT_WITH AND NOT _fits)
  message(FATAL_ERROR "pacer: this pacer was built with LibTorch ${PACER_LIBTORCH_BUILT_WITH}, whose C++ ABI other minor "
    "versions do not have, but ${LIBTORCH_PREFIX} holds ${LIBTORCH_VERSION}; build pacer again with that one, or name a "
    "LibTorch ${PACER_LIBTORCH_BUILT_WITH} with Torch_DIR.")
elseif(NOT _fits)
  message(FATAL_ERROR "pacer: it is made for LibTorch ${PACER_LIBTORCH_OLDEST} to ${PACER_LIBTORCH_NEWEST}, but "
    "${LIBTORCH_PREFIX} holds ${LIBTORCH_VERSION}; name another one with Torch_DIR, or let cmake/bootstrap.sh install one.")
elseif(_is_newer)
  message(WARNING "pacer: LibTorch ${LIBTORCH_VERSION} in ${LIBTORCH_PREFIX} is newer than ${PACER_LIBTORCH_NEWEST}, the "
    "newest that pacer is tested with; if it does not build or work, name an older one with Torch_DIR.")
endif()
_pacer_minor("${LIBTORCH_VERSION}" LIBTORCH_MINOR)
if(LIBTORCH_VERSION VERSION_LESS 2.13)
  set(LIBTORCH_CXX_STANDARD 17)
else()
  set(LIBTORCH_CXX_STANDARD 20)
endif()

if(NOT TARGET torch_cpu_library)
  # LibTorch's target file refers to targets of other packages (protobuf::libprotobuf, caffe2::mkl, torch::cudart ...).
  # None of them is needed to link against a finished LibTorch, so each becomes an empty one.
  set(_targets_file "${LIBTORCH_PREFIX}/share/cmake/Caffe2/Caffe2Targets.cmake")
  file(STRINGS "${_targets_file}" _lines REGEX "INTERFACE_LINK_LIBRARIES")
  string(REGEX MATCHALL "[A-Za-z0-9_]+::[A-Za-z0-9_]+" _empty "${_lines}")
  list(APPEND _empty protobuf::libprotobuf)
  list(REMOVE_DUPLICATES _empty)
  foreach(_target IN LISTS _empty)
    if(NOT TARGET ${_target})
      add_library(${_target} INTERFACE IMPORTED GLOBAL)
    endif()
  endforeach()
  include("${_targets_file}")
  foreach(_target IN ITEMS headeronly c10 c10_cuda torch_nvshmem torch_cpu torch_cpu_library torch_cuda
                           torch_cuda_library torch torch_library)
    if(TARGET ${_target})
      set_target_properties(${_target} PROPERTIES IMPORTED_GLOBAL TRUE)
    endif()
  endforeach()
endif()

# Headers as of the system, without warnings. The second folder is one that only the target torch would carry.
foreach(_target IN ITEMS torch_cpu_library torch_cuda_library)
  if(TARGET ${_target})
    target_include_directories(${_target} SYSTEM INTERFACE
      "${LIBTORCH_PREFIX}/include" "${LIBTORCH_PREFIX}/include/torch/csrc/api/include")
  endif()
endforeach()

# at::parallel_for is inline and runs on one thread unless its caller is compiled with -fopenmp. The run-time library
# must then be LibTorch's own, or two thread pools would compete.
if(NOT TARGET pacer::openmp)
  add_library(pacer::openmp INTERFACE IMPORTED GLOBAL)
  file(GLOB _openmp "${LIBTORCH_PREFIX}/lib/libgomp*.so*")
  if(_openmp)
    list(GET _openmp 0 _openmp)
    set_target_properties(pacer::openmp PROPERTIES INTERFACE_LINK_LIBRARIES "${_openmp}")
  else()
    set_target_properties(pacer::openmp PROPERTIES INTERFACE_LINK_LIBRARIES gomp)
  endif()
endif()
