# pacer_add_program: one program from all source files of a folder and of those in it, or from the named files; for
# tests, benchmarks and examples. And the commit that programs report, PACER_COMMIT_NAME.
set(PACER_COMMIT "" CACHE STRING "The commit that pacer-bench and pacer-info report; empty: ask git when configuring")
set(PACER_COMMIT_NAME "${PACER_COMMIT}")
if(NOT PACER_COMMIT_NAME)
  execute_process(COMMAND git describe --always --dirty WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    OUTPUT_VARIABLE PACER_COMMIT_NAME OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

set(PACER_LINKER "" CACHE STRING "Link programs with this linker, such as gold, where the compiler has it")
if(PACER_LINKER)
  include(CheckLinkerFlag)
  check_linker_flag(CXX -fuse-ld=${PACER_LINKER} PACER_HAS_LINKER)
  if(PACER_HAS_LINKER)
    add_link_options($<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:-fuse-ld=${PACER_LINKER}>)
  endif()
endif()

# How the programs that people start read their command lines.
if(PACER_EXAMPLES OR PACER_BENCHMARKS)
  find_package(Boost 1.74 QUIET CONFIG COMPONENTS program_options)
  if(NOT TARGET Boost::program_options)
    message(FATAL_ERROR "pacer: Boost.Program_options was not found; run cmake/bootstrap.sh, or configure with -DPACER_EXAMPLES=OFF and -DPACER_BENCHMARKS=OFF.")
  endif()
endif()

set(PACER_PROGRAM_OPTIMIZATION "" CACHE STRING
  "How programs, tests and benchmarks are optimized in place of what the build type says, such as -O0")

# pacer_add_headers(TARGET [option...]): LibTorch's headers, precompiled for programs that are compiled with these options.
# They are most of what a small program costs to compile: 24 s without, 8 s with them.
function(pacer_add_headers target)
  set(empty "${CMAKE_CURRENT_BINARY_DIR}/${target}.cpp")
  file(CONFIGURE OUTPUT "${empty}" CONTENT "")
  add_library(${target} OBJECT EXCLUDE_FROM_ALL "${empty}")
  pacer_target_flags(${target})
  target_compile_options(${target} PRIVATE ${ARGN} -fPIC $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)
  target_link_libraries(${target} PRIVATE ${PACER_PROGRAMS_USE} torch_cpu_library)
  target_precompile_headers(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<torch/torch.h$<ANGLE-R>>")
endfunction()

# pacer_use_headers(TARGET HEADERS): the target's sources begin with those. Code is as for shared libraries in all targets that
# do, because one form serves only one kind of code.
function(pacer_use_headers target headers)
  target_precompile_headers(${target} REUSE_FROM ${headers})
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # The first as ccache wants it. The others are false: GCC takes what is precompiled for no system header any more, and
    # warns of the standard library's strings (PR 105651 and its like).
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess;-Wno-array-bounds;-Wno-stringop-overflow>)
  endif()
endfunction()

# What programs are linked with. Tests and benchmarks change it: they look behind the public interface.
set(PACER_PROGRAMS_USE pacer::pacer)
# How they are compiled beyond the flags of all targets, and the headers that were precompiled so. Tests may change these.
set(PACER_PROGRAM_OPTIONS ${PACER_PROGRAM_OPTIMIZATION})
set(PACER_PROGRAM_HEADERS pacer_headers)
pacer_add_headers(pacer_headers ${PACER_PROGRAM_OPTIONS})

# pacer_add_program(TARGET FOLDER_OR_SOURCES [library...]): does nothing when the folder has no sources yet.
function(pacer_add_program target from)
  if(from MATCHES "\\.cpp$")
    pacer_sources(sources ${from})
  else()
    pacer_sources(sources ${from}/*.cpp ${from}/*/*.cpp)
  endif()
  if(NOT sources)
    return()
  endif()
  add_executable(${target} ${sources})
  pacer_make_program(${target} ${ARGN})
endfunction()

# pacer_make_program(TARGET [library...]): gives a target what all programs have.
function(pacer_make_program target)
  pacer_target_flags(${target})
  # LibTorch's data loader moves empty optionals, which GCC takes for a use of what was never set.
  target_compile_options(${target} PRIVATE ${PACER_PROGRAM_OPTIONS}
    $<$<CXX_COMPILER_ID:GNU>:$<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>>)
  pacer_use_headers(${target} ${PACER_PROGRAM_HEADERS})
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY None)  # comes with pacer::kernels
  target_include_directories(${target} SYSTEM PRIVATE ${PACER_HEADER_ONLY})
  target_link_libraries(${target} PRIVATE ${PACER_PROGRAMS_USE} torch_cpu_library ${ARGN})
endfunction()
