# fsdpp::libtorch_cuda: the CUDA half of libtorch, for CUDA targets alone. There is one only where both a CUDA toolkit
# and a CUDA build of torch are found; everything else works without.
if(TARGET fsdpp::libtorch_cuda)
  return()
endif()
find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_FOUND)
  message(STATUS "fsdpp: no CUDA toolkit, CPU ranks only")
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
endif()
