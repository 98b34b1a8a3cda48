# Installs headers, libraries and fsdppConfig.cmake: find_package(fsdpp) then gives fsdpp::fsdpp.
include(CMakePackageConfigHelpers)
get_property(_libraries GLOBAL PROPERTY FSDPP_LIBRARIES)
install(TARGETS ${_libraries} fsdpp EXPORT fsdppTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/fsdpp DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
set(_config ${CMAKE_INSTALL_LIBDIR}/cmake/fsdpp)
install(EXPORT fsdppTargets NAMESPACE fsdpp:: DESTINATION ${_config})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/fsdppConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/fsdppConfig.cmake INSTALL_DESTINATION ${_config})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdppConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fsdppConfig.cmake ${PROJECT_BINARY_DIR}/fsdppConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/FsdppLibtorch.cmake DESTINATION ${_config})
