# libpacer.so: the shared form of pacer, one library made of the objects of all archives.
#
# What it exports is what public headers declare: names in pacer:: but those in pacer::detail. The linker decides by the
# mangled names below, so no declaration carries a macro, and everything else stays inside: private parts, LibTorch's
# inline functions, instances of std's templates. Types of exceptions and options have names of their own in pacer::, so
# they can be caught and cast on either side.

# Forms of a mangled name in front of the name's first namespace: functions, const functions and those with a reference
# qualifier; tables and types of classes; thunks; variables, local static variables and their guards.
set(_pacer_symbol_forms N NK NR NO NKR NKO TVN TIN TSN TTN Th*_N Tv*_N ZN ZNK GVN GVZN GVZNK)
# The private names that inline functions of public headers call.
set(_pacer_symbol_exceptions region_is_running remembered)

function(_pacer_write_exports file)
  set(lines "")
  foreach(form IN LISTS _pacer_symbol_forms)
    # Every name in pacer but 6detail, whose letters are excluded one after the other: the linker lets a pattern to
    # export win over one to hide.
    foreach(rest IN ITEMS "[!6]*" "6[!d]*" "6d[!e]*" "6de[!t]*")
      string(APPEND lines "    _Z${form}5pacer${rest};\n")
    endforeach()
  endforeach()
  foreach(name IN LISTS _pacer_symbol_exceptions)
    string(LENGTH ${name} length)
    string(APPEND lines "    _ZN5pacer6detail${length}${name}*;\n")
  endforeach()
  file(CONFIGURE OUTPUT "${file}" CONTENT "{\n  global:\n${lines}  local: *;\n};\n" @ONLY)
endfunction()

# pacer_shared_library(TARGET FOLDER...): the library itself, made of the folders' objects.
function(pacer_shared_library target)
  list(TRANSFORM ARGN PREPEND pacer_ OUTPUT_VARIABLE archives)
  set(exports "${PROJECT_BINARY_DIR}/pacer-exports.map")
  _pacer_write_exports("${exports}")
  list(TRANSFORM archives REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  add_library(${target} SHARED ${objects})
  # The archives bring what they are linked with; as all their objects are there already, nothing is taken from them.
  target_link_libraries(${target} PUBLIC torch_cpu_library PRIVATE ${archives})
  if(PACER_WITH_CUDA)
    target_link_libraries(${target} PUBLIC torch_cuda_library)
  endif()
  if(PACER_WITH_NCCL)
    # For the linker of a program, which looks for what LibTorch needs: an older NCCL may lie where it looks first.
    cmake_path(GET PACER_NCCL_LIBRARY PARENT_PATH folder)
    target_link_options(${target} INTERFACE "LINKER:-rpath-link,${folder}")
  endif()
  target_compile_features(${target} PUBLIC cxx_std_${LIBTORCH_CXX_STANDARD})
  target_include_directories(${target} PUBLIC "$<BUILD_INTERFACE:${PACER_INCLUDE_DIR}>" "$<INSTALL_INTERFACE:include>")
  target_link_options(${target} PRIVATE "LINKER:--version-script=${exports},--no-undefined" ${PACER_SANITIZE_FLAGS})
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME pacer
    LINK_DEPENDS "${exports}"
    LINKER_LANGUAGE CXX
    CUDA_RUNTIME_LIBRARY None
    VERSION ${PROJECT_VERSION}
    SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
endfunction()

# pacer_add_shared(FOLDER...): the target pacer is the shared library; pacer::FOLDER is another name for it.
function(pacer_add_shared)
  pacer_shared_library(pacer ${ARGN})
  if(NOT DEFINED CMAKE_INSTALL_RPATH)
    # On this machine: LibTorch, CUDA and NCCL lie where they were.
    set(folders "$ORIGIN;${LIBTORCH_PREFIX}/lib")
    if(PACER_WITH_CUDA)
      list(APPEND folders "${PACER_CUDART_DIR}")
    endif()
    if(PACER_WITH_NCCL)
      cmake_path(GET PACER_NCCL_LIBRARY PARENT_PATH folder)
      list(APPEND folders "${folder}")
    endif()
    set_target_properties(pacer PROPERTIES INSTALL_RPATH "${folders}")
  endif()
  foreach(folder IN LISTS ARGN)
    add_library(pacer_${folder}_part INTERFACE)
    target_link_libraries(pacer_${folder}_part INTERFACE pacer)
    set_target_properties(pacer_${folder}_part PROPERTIES EXPORT_NAME ${folder})
    add_library(pacer::${folder} ALIAS pacer_${folder}_part)
  endforeach()
endfunction()
