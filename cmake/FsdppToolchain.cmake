# Compiler settings of our own targets: they never leak into a parent project.
include(GNUInstallDirs)

find_program(FSDPP_CCACHE ccache)
if(FSDPP_CCACHE AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${FSDPP_CCACHE})
endif()
find_program(FSDPP_MOLD mold)

add_library(fsdpp_flags INTERFACE)
target_compile_features(fsdpp_flags INTERFACE cxx_std_20)
target_compile_options(fsdpp_flags INTERFACE -fPIC -Wall -Wextra -Wno-unused-parameter
                       -Wno-missing-field-initializers)  # designated initialisers name what they set
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(fsdpp_flags INTERFACE -Wno-restrict) # false for "text" + std::string: GCC bug 105651
endif()
if(FSDPP_WERROR)
  target_compile_options(fsdpp_flags INTERFACE -Werror)
endif()
if(FSDPP_CCACHE)
  target_compile_options(fsdpp_flags INTERFACE -fpch-preprocess) # lets ccache see through the precompiled header
endif()
if(FSDPP_SANITIZE)
  target_compile_options(fsdpp_flags INTERFACE -fsanitize=${FSDPP_SANITIZE} -fno-omit-frame-pointer -g1 -O1)
  target_link_options(fsdpp_flags INTERFACE -fsanitize=${FSDPP_SANITIZE})
  if(FSDPP_SANITIZE MATCHES "undefined")
    # vptr needs type information of libtorch that its libraries do not export.
    target_compile_options(fsdpp_flags INTERFACE -fno-sanitize=vptr -fno-sanitize-recover=undefined)
  endif()
  if(FSDPP_SANITIZE MATCHES "thread")
    target_compile_options(fsdpp_flags INTERFACE -Wno-tsan)
  endif()
endif()
if(FSDPP_MOLD AND PROJECT_IS_TOP_LEVEL)
  add_link_options(-fuse-ld=mold)
endif()
find_package(Threads REQUIRED)
