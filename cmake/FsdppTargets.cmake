# One target per folder, one shared precompiled header per build.

# Makes fsdpp_pch, the precompiled header that files which see libtorch's autograd share.
function(fsdpp_precompiled_header)
  add_library(fsdpp_pch OBJECT ${PROJECT_SOURCE_DIR}/cmake/pch.cpp)
  target_link_libraries(fsdpp_pch PRIVATE fsdpp_flags fsdpp::libtorch)
  target_precompile_headers(fsdpp_pch PRIVATE ${PROJECT_SOURCE_DIR}/cmake/pch.h)
endfunction()

# Lets `target` use the shared precompiled header: worth it for files that include libtorch's autograd or nn.
function(fsdpp_use_pch target)
  target_precompile_headers(${target} REUSE_FROM fsdpp_pch)
endfunction()

# Compiles the files of `target` several at a time: most of a file's time are libtorch's templates, which each instantiates
# anew, precompiled header or not. So files of one target must not give two things one name, in unnamed namespaces neither.
function(fsdpp_few_large_files target)
  if(FSDPP_UNITY)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 7)
  endif()
endfunction()

# fsdpp_library(NAME name SOURCES a.cpp ... HEADERS a.h ... DEPENDS target ... [PCH])
# Makes the static library fsdpp_<name>, alias fsdpp::<name>.
function(fsdpp_library)
  cmake_parse_arguments(L "PCH" "NAME" "SOURCES;HEADERS;DEPENDS" ${ARGN})
  set(target fsdpp_${L_NAME})
  add_library(${target} STATIC ${L_SOURCES} ${L_HEADERS})
  add_library(fsdpp::${L_NAME} ALIAS ${target})
  target_include_directories(${target} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                                              $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_link_libraries(${target} PUBLIC ${L_DEPENDS} PRIVATE $<BUILD_INTERFACE:fsdpp_flags>)
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${L_NAME})
  if(L_PCH)
    fsdpp_use_pch(${target})
    fsdpp_few_large_files(${target})
  endif()
  set_property(GLOBAL APPEND PROPERTY FSDPP_LIBRARIES ${target})
endfunction()
