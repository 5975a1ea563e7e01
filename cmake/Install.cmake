# cmake --install: the headers, the libraries, a package for find_package(pacer) that finds LibTorch again, and pacer.pc for
# pkg-config.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/pacer)

install(TARGETS ${PACER_TARGETS} EXPORT pacer
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT pacer NAMESPACE pacer:: FILE pacer-targets.cmake DESTINATION ${package_dir})

install(FILES ${PROJECT_SOURCE_DIR}/pacer.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/pacer)
foreach(folder IN LISTS PACER_FOLDERS)
  # No public header includes one of detail/ (a test sees to that), so these stay behind.
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/${folder}/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/pacer/${folder}
    FILES_MATCHING PATTERN "*.h" PATTERN detail EXCLUDE PATTERN gloo_stubs EXCLUDE PATTERN cuda EXCLUDE PATTERN cpu EXCLUDE)
endforeach()

# The loops that rules of others go through (optimizers/own_rule.h), and what they include.
install(FILES ${PROJECT_SOURCE_DIR}/kernels/cpu/element_loop.h
  ${PROJECT_SOURCE_DIR}/kernels/cpu/target.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/pacer/kernels/cpu)
install(FILES ${PROJECT_SOURCE_DIR}/kernels/cuda/element_loop.cuh ${PROJECT_SOURCE_DIR}/kernels/cuda/packet.cuh
  ${PROJECT_SOURCE_DIR}/kernels/cuda/launch.cuh DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/pacer/kernels/cuda)

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/pacer-config.cmake.in ${PROJECT_BINARY_DIR}/pacer-config.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# The C++ interface may change with each minor version while the major one is 0.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/pacer-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/pacer-config.cmake ${PROJECT_BINARY_DIR}/pacer-config-version.cmake
  ${PROJECT_SOURCE_DIR}/cmake/LibTorch.cmake DESTINATION ${package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

# What compilers do not take by default yet; a program's own -std, behind these flags, may ask for a newer one.
set(cxx_standard "")
if(LIBTORCH_CXX_STANDARD GREATER 17)
  set(cxx_standard "-std=c++${LIBTORCH_CXX_STANDARD} ")
endif()
# Folders of libraries, which become variables of pacer.pc, and flags in the order in which a linker has to see them.
set(folders "")
if(BUILD_SHARED_LIBS)
  set(libraries "-L\${libdir} -Wl,-rpath,\${libdir} -lpacer")
else()
  set(libraries "-L\${libdir}")
  set(floor_last ${PACER_FOLDERS})
  list(REVERSE floor_last)
  foreach(folder IN LISTS floor_last)
    get_target_property(type pacer_${folder} TYPE)
    if(type STREQUAL "STATIC_LIBRARY")
      string(APPEND libraries " -lpacer_${folder}")
    endif()
  endforeach()
endif()
string(APPEND libraries " -L\${torch_prefix}/lib -Wl,-rpath,\${torch_prefix}/lib")
# One flag, so that no tool takes apart or reorders what belongs together.
if(PACER_WITH_CUDA)
  string(APPEND libraries " -Wl,--push-state,--no-as-needed,-ltorch_cpu,-ltorch_cuda,--pop-state -lc10_cuda -lc10")
else()
  string(APPEND libraries " -Wl,--push-state,--no-as-needed,-ltorch_cpu,--pop-state -lc10")
endif()
if(NOT BUILD_SHARED_LIBS)
  file(GLOB openmp RELATIVE "${LIBTORCH_PREFIX}/lib" "${LIBTORCH_PREFIX}/lib/libgomp*.so*")
  if(openmp)
    list(GET openmp 0 openmp)
    string(APPEND libraries " -l:${openmp}")
  else()
    string(APPEND libraries " -lgomp")
  endif()
  if(PACER_WITH_NCCL)  # before CUDA, whose folder may have an older one
    cmake_path(GET PACER_NCCL_LIBRARY PARENT_PATH nccl_dir)
    cmake_path(GET PACER_NCCL_LIBRARY FILENAME nccl_name)
    string(APPEND folders "nccl_libdir=${nccl_dir}\n")
    string(APPEND libraries " -L\${nccl_libdir} -Wl,-rpath,\${nccl_libdir} -l:${nccl_name}")
  endif()
  if(PACER_WITH_CUDA)
    string(APPEND folders "cuda_libdir=${PACER_CUDART_DIR}\n")
    string(APPEND libraries
      " -L\${cuda_libdir} -Wl,-rpath,\${cuda_libdir} -l:libcudart.so.${CUDAToolkit_VERSION_MAJOR}")
  endif()
endif()
file(RELATIVE_PATH up "${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
string(REGEX REPLACE "/$" "" up "${up}")
configure_file(${PROJECT_SOURCE_DIR}/cmake/pacer.pc.in ${PROJECT_BINARY_DIR}/pacer.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/pacer.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
