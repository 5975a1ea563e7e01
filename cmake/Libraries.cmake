# pacer_add_library: one archive per folder, all built alike. pacer_add_umbrella: the library that is their sum, either
# all archives together or, with BUILD_SHARED_LIBS, one shared library made from them (Shared.cmake).

# <pacer/FOLDER/HEADER.h> in the build tree: a folder of links to the source folders.
set(PACER_INCLUDE_DIR "${PROJECT_BINARY_DIR}/include")
file(MAKE_DIRECTORY "${PACER_INCLUDE_DIR}/pacer")
file(CREATE_LINK "${PROJECT_SOURCE_DIR}/pacer.h" "${PACER_INCLUDE_DIR}/pacer/pacer.h" SYMBOLIC)

set(PACER_CXX_FLAGS -Wall -Wextra -Wpedantic)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13 AND LIBTORCH_CXX_STANDARD GREATER 17)
  list(APPEND PACER_CXX_FLAGS -Wno-restrict)  # false where a literal and a string are added (GCC's PR 105651)
endif()
# 177: constants of templates count as unused although they are used.
set(PACER_CUDA_FLAGS -Xcompiler=-Wall,-Wextra -diag-suppress=177)
if(PACER_WERROR)
  list(APPEND PACER_CXX_FLAGS -Werror)
  list(APPEND PACER_CUDA_FLAGS -Werror=all-warnings -Xcompiler=-Werror)
endif()
# The same bits on every machine and device: the compiler must not fuse a multiplication and an addition on its own.
list(APPEND PACER_CXX_FLAGS -ffp-contract=off)
list(APPEND PACER_CUDA_FLAGS --fmad=false -Xcompiler=-ffp-contract=off)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # They are false where LibTorch's autograd::Function reserves a vector<bool>.
  list(APPEND PACER_CXX_FLAGS -Wno-array-bounds -Wno-stringop-overflow)
endif()

set(PACER_SANITIZE_FLAGS "")
set(PACER_TEST_ENVIRONMENT "")
if(PACER_SANITIZE STREQUAL "address")
  set(PACER_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer)
  # Tests ask for memory that is not to be had, and expect LibTorch's error.
  set(PACER_TEST_ENVIRONMENT "LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/cmake/leaks.txt:print_suppressions=0"
    "UBSAN_OPTIONS=print_stacktrace=1" "ASAN_OPTIONS=allocator_may_return_null=1")
elseif(PACER_SANITIZE STREQUAL "thread")
  set(PACER_SANITIZE_FLAGS -fsanitize=thread -fno-omit-frame-pointer)
  # LibTorch is not instrumented, so what it does to its own memory looks like races. The second as above. The third, as
  # the sanitizer writes down all of an allocation at once: one of 100 GB, which has room there, takes minutes.
  string(CONCAT PACER_TEST_ENVIRONMENT "TSAN_OPTIONS=ignore_noninstrumented_modules=1:allocator_may_return_null=1:"
    "max_allocation_size_mb=4096")
elseif(PACER_SANITIZE STREQUAL "fuzzer")
  set(PACER_SANITIZE_FLAGS -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined
    -fno-omit-frame-pointer)
elseif(PACER_SANITIZE STREQUAL "coverage")
  # Neither tests nor the headers of others are counted. An inlined copy would have branches of its own.
  set(PACER_SANITIZE_FLAGS --coverage -fno-inline "-fprofile-exclude-files=^/usr/|/torch/include/|(^|/)tests/[a-z_]+/[^/]+$")
elseif(PACER_SANITIZE)
  message(FATAL_ERROR
    "pacer: PACER_SANITIZE is ${PACER_SANITIZE}, but it can only be address, thread, fuzzer, coverage or empty.")
endif()

# The flags that all targets of pacer share: libraries, tests and programs.
function(pacer_target_flags target)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:${PACER_CXX_FLAGS};${PACER_SANITIZE_FLAGS}>"
    "$<$<COMPILE_LANGUAGE:CUDA>:${PACER_CUDA_FLAGS}>")
  if(PACER_SANITIZE_FLAGS)
    target_link_options(${target} PRIVATE ${PACER_SANITIZE_FLAGS})
  endif()
  # Nothing reads the version; it makes everything be compiled again once another LibTorch lies in the same folder.
  target_compile_definitions(${target} PRIVATE PACER_WITH_CUDA=${PACER_WITH_CUDA}
    "$<$<COMPILE_LANGUAGE:CXX>:PACER_COMPILED_FOR_LIBTORCH=${LIBTORCH_VERSION}>")
  set_target_properties(${target} PROPERTIES
    CXX_EXTENSIONS OFF
    UNITY_BUILD ${PACER_UNITY}
    UNITY_BUILD_BATCH_SIZE ${PACER_UNITY_FILES})
endfunction()

# Source files matching the patterns, less those for the other kind of build: *_cuda.cpp needs CUDA, *_no_cuda.cpp is
# for a build without it.
function(pacer_sources out)
  file(GLOB found CONFIGURE_DEPENDS ${ARGN})
  set(without ${found})
  list(FILTER without INCLUDE REGEX "_no_cuda\\.cpp$")
  if(PACER_WITH_CUDA)
    list(REMOVE_ITEM found ${without})
  else()
    list(FILTER found EXCLUDE REGEX "_cuda\\.cpp$")
    list(APPEND found ${without})
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# pacer_add_library(NAME pattern...): the archive pacer_NAME (pacer::NAME) from the files of the current folder. It is an
# archive in either form, of code that may go into a shared library, so both forms are made of the same objects.
function(pacer_add_library name)
  set(target pacer_${name})
  pacer_sources(sources ${ARGN})
  if(sources)
    add_library(${target} STATIC ${sources})
    set(visible PUBLIC)
    pacer_target_flags(${target})
    set_target_properties(${target} PROPERTIES
      POSITION_INDEPENDENT_CODE ON
      CUDA_RUNTIME_LIBRARY None  # linked by name, so that who links pacer needs no nvcc
      CUDA_SEPARABLE_COMPILATION OFF)
  else()
    add_library(${target} INTERFACE)
    set(visible INTERFACE)
  endif()
  if(NOT BUILD_SHARED_LIBS)
    add_library(pacer::${name} ALIAS ${target})
    set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
  endif()
  target_compile_features(${target} ${visible} cxx_std_${LIBTORCH_CXX_STANDARD})
  file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}" "${PACER_INCLUDE_DIR}/pacer/${name}" SYMBOLIC)
  target_include_directories(${target} ${visible}
    "$<BUILD_INTERFACE:${PACER_INCLUDE_DIR}>" "$<INSTALL_INTERFACE:include>")
endfunction()

# Links `target` as users of it see it, whether it has sources yet or not.
function(pacer_link target)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "INTERFACE_LIBRARY")
    target_link_libraries(${target} INTERFACE ${ARGN})
  else()
    target_link_libraries(${target} PUBLIC ${ARGN})
  endif()
endfunction()

# pacer_add_umbrella(NAME...): pacer::pacer, which is all the named folders, and pacer_archives, which is their archives in
# either form, for programs that look behind the public interface.
function(pacer_add_umbrella)
  list(TRANSFORM ARGN PREPEND pacer_ OUTPUT_VARIABLE archives)
  add_library(pacer_archives INTERFACE)
  target_link_libraries(pacer_archives INTERFACE ${archives})
  if(BUILD_SHARED_LIBS)
    pacer_add_shared(${ARGN})
    list(TRANSFORM archives APPEND _part OUTPUT_VARIABLE targets)
  else()
    add_library(pacer INTERFACE)
    target_link_libraries(pacer INTERFACE ${archives})
    set(targets ${archives})
  endif()
  add_library(pacer::pacer ALIAS pacer)
  set(PACER_FOLDERS "${ARGN}" PARENT_SCOPE)
  set(PACER_TARGETS "${targets};pacer" PARENT_SCOPE)
endfunction()
