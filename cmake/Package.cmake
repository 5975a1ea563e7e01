# cpack: an archive and a Debian package of what cmake --install installs. LibTorch is not in them: it comes from pip and
# is looked for when a program is configured. Only the static form is packed: libpacer.so finds LibTorch, CUDA and NCCL
# through its run path, so it belongs to the machine that built it.
if(PACER_WITH_CUDA)
  set(_kind "cuda${CUDAToolkit_VERSION_MAJOR}")
  set(_built_with "with CUDA ${CUDAToolkit_VERSION_MAJOR}")
else()
  set(_kind "cpu")
  set(_built_with "without CUDA")
endif()
set(CPACK_GENERATOR "TGZ;DEB")
set(CPACK_PACKAGE_NAME pacer)
set(CPACK_PACKAGE_VENDOR "The pacer authors")
set(CPACK_PACKAGE_CONTACT "The pacer authors")
set(CPACK_PACKAGE_DESCRIPTION
  "Headers, libraries and the files for CMake and pkg-config, built ${_built_with}.
It needs LibTorch ${LIBTORCH_MINOR}, which no package of the system has: it comes from pip,
as torch ${LIBTORCH_VERSION}.")
set(CPACK_RESOURCE_FILE_LICENSE "${PROJECT_SOURCE_DIR}/LICENSE")
set(CPACK_PACKAGE_FILE_NAME "pacer-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR}-${_kind}")
set(CPACK_DEBIAN_PACKAGE_NAME libpacer-dev)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "cmake (>= 3.24), g++, python3-venv")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)

# What only holds on this machine stays out of packages.
set(CPACK_PRE_BUILD_SCRIPTS "${PROJECT_SOURCE_DIR}/cmake/forget-places.cmake")
set(CPACK_PACER_LIBTORCH "${LIBTORCH_PREFIX}")
if(PACER_WITH_CUDA)
  set(CPACK_PACER_CUDART "${PACER_CUDART}")
  set(CPACK_PACER_CUDA_FOLDER "cu${CUDAToolkit_VERSION_MAJOR}")
endif()
if(PACER_WITH_NCCL)
  set(CPACK_PACER_NCCL "${PACER_NCCL_LIBRARY}")
endif()
include(CPack)
