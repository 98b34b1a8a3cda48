# fsdpp::libtorch_cuda: the CUDA half of libtorch, for CUDA targets alone. There is one only where both a CUDA toolkit
# and a CUDA build of torch are found; everything else works without.
if(TARGET fsdpp::libtorch_cuda)
  return()
endif()
find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_FOUND)
  message(STATUS "fsdpp: no CUDA toolkit, CPU ranks only")
elseif(NOT CUDAToolkit_NVCC_EXECUTABLE)
  message(STATUS "fsdpp: CUDA toolkit ${CUDAToolkit_VERSION} without nvcc: CPU ranks only")
elseif(NOT EXISTS "${FSDPP_TORCH_ROOT}/lib/libtorch_cuda.so")
  message(STATUS "fsdpp: CUDA toolkit ${CUDAToolkit_VERSION}, but a torch without CUDA: CPU ranks only")
else()
  message(STATUS "fsdpp: CUDA toolkit ${CUDAToolkit_VERSION}")
  add_library(fsdpp_libtorch_cuda INTERFACE IMPORTED GLOBAL)
  add_library(fsdpp::libtorch_cuda ALIAS fsdpp_libtorch_cuda)
  target_link_libraries(
    fsdpp_libtorch_cuda
    INTERFACE fsdpp::libtorch
              "-Wl,--push-state,--no-as-needed,${FSDPP_TORCH_ROOT}/lib/libtorch_cuda.so,${FSDPP_TORCH_ROOT}/lib/libc10_cuda.so,--pop-state"
              CUDA::cudart)
  # For what architectures our kernels are compiled; the default is what they are measured on (H100, H200).
  set(FSDPP_CUDA_ARCHITECTURES "90" CACHE STRING "CMAKE_CUDA_ARCHITECTURES of fsdpp's kernels")
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${FSDPP_CUDA_ARCHITECTURES})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared) # the one libtorch has loaded
  set(CMAKE_CUDA_STANDARD 20)
  if(FSDPP_CCACHE AND PROJECT_IS_TOP_LEVEL)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${FSDPP_CCACHE})
  endif()
  enable_language(CUDA)
endif()

# Makes fsdpp_cuda (alias fsdpp::cuda): all that needs a GPU, from several folders, linked by programs for GPUs alone;
# and beside it fsdpp_cuda_kernels, what nvcc compiles. Nothing where there is no toolkit.
function(fsdpp_cuda_library)
  if(NOT TARGET fsdpp::libtorch_cuda)
    return()
  endif()
  add_library(fsdpp_cuda_kernels STATIC)
  target_include_directories(fsdpp_cuda_kernels PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>)
  target_compile_options(fsdpp_cuda_kernels PRIVATE -Xcompiler=-fPIC,-Wall,-Wextra)
  target_link_libraries(fsdpp_cuda_kernels PUBLIC fsdpp_base)
  add_library(fsdpp_cuda STATIC)
  add_library(fsdpp::cuda ALIAS fsdpp_cuda)
  target_link_libraries(fsdpp_cuda PUBLIC fsdpp_cuda_kernels fsdpp_optim fsdpp::libtorch_cuda
                                   PRIVATE $<BUILD_INTERFACE:fsdpp_flags>)
endfunction()

# fsdpp_cuda_sources(a.cpp b.cu ...): adds sources of this folder that see CUDA.
function(fsdpp_cuda_sources)
  if(NOT TARGET fsdpp_cuda)
    return()
  endif()
  foreach(source ${ARGN})
    if(source MATCHES "\\.cuh?$")
      target_sources(fsdpp_cuda_kernels PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/${source})
    else()
      target_sources(fsdpp_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/${source})
    endif()
  endforeach()
endfunction()

# fsdpp_hopper_sources(a.cu ...): kernels for Hopper's tensor cores, which are part of architecture 90a alone; elsewhere
# they compile to nothing, and callers do without.
function(fsdpp_hopper_sources)
  if(NOT TARGET fsdpp_cuda)
    return()
  endif()
  string(REGEX REPLACE "(^|;)90(-real|-virtual)?(;|$)" "\\190a\\3" architectures "${CMAKE_CUDA_ARCHITECTURES}")
  add_library(fsdpp_cuda_hopper OBJECT ${ARGN})
  set_target_properties(fsdpp_cuda_hopper PROPERTIES CUDA_ARCHITECTURES "${architectures}")
  target_include_directories(fsdpp_cuda_hopper PRIVATE ${PROJECT_SOURCE_DIR})
  target_compile_options(fsdpp_cuda_hopper PRIVATE -Xcompiler=-fPIC,-Wall,-Wextra)
  target_link_libraries(fsdpp_cuda_hopper PRIVATE fsdpp_base)
  target_sources(fsdpp_cuda_kernels PRIVATE $<TARGET_OBJECTS:fsdpp_cuda_hopper>)
endfunction()
