# cmake --install: the headers, the libraries, and a package for find_package(pacer) that finds LibTorch again.
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

configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/pacer-config.cmake.in ${PROJECT_BINARY_DIR}/pacer-config.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# The C++ interface may change with each minor version while the major one is 0.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/pacer-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/pacer-config.cmake ${PROJECT_BINARY_DIR}/pacer-config-version.cmake
  ${PROJECT_SOURCE_DIR}/cmake/LibTorch.cmake DESTINATION ${package_dir})
