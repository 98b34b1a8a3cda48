# fsdpp::libtorch: the CPU half of the libtorch inside a Python's torch 2.11.
#
# find_package(Torch) demands a CUDA toolkit when the wheel is a CUDA build and links libtorch_cuda everywhere; this
# target takes libtorch_cpu and c10 alone, so that it configures without a toolkit and a program starts with a quarter
# of the memory. Set FSDPP_PYTHON to the interpreter whose torch is wanted, or FSDPP_TORCH_DIR to torch's own folder.
if(TARGET fsdpp::libtorch)
  return()
endif()
set(FSDPP_PYTHON "python3" CACHE STRING "Python interpreter whose torch is linked")
set(FSDPP_TORCH_DIR "" CACHE PATH "The folder `torch` of site-packages; empty: ask FSDPP_PYTHON")
set(FSDPP_TORCH_ROOT "${FSDPP_TORCH_DIR}")
if(NOT FSDPP_TORCH_ROOT)
  execute_process(
    COMMAND ${FSDPP_PYTHON} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE FSDPP_TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(NOT EXISTS "${FSDPP_TORCH_ROOT}/lib/libtorch_cpu.so")
  message(FATAL_ERROR "fsdpp: no libtorch found through FSDPP_PYTHON=${FSDPP_PYTHON}; "
                      "give -DFSDPP_PYTHON=<python with torch 2.11> or -DFSDPP_TORCH_DIR=<.../site-packages/torch>")
endif()
file(READ "${FSDPP_TORCH_ROOT}/version.py" _fsdpp_torch_version)
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" _fsdpp_torch_version "${_fsdpp_torch_version}")
if(NOT _fsdpp_torch_version MATCHES "^2\\.11\\.")
  message(FATAL_ERROR "fsdpp: torch ${_fsdpp_torch_version} in ${FSDPP_TORCH_ROOT}; 2.11 is needed")
endif()
message(STATUS "fsdpp: libtorch ${_fsdpp_torch_version}")

add_library(fsdpp_libtorch INTERFACE IMPORTED GLOBAL)
add_library(fsdpp::libtorch ALIAS fsdpp_libtorch)
target_include_directories(fsdpp_libtorch SYSTEM INTERFACE ${FSDPP_TORCH_ROOT}/include
                                                           ${FSDPP_TORCH_ROOT}/include/torch/csrc/api/include)
target_compile_features(fsdpp_libtorch INTERFACE cxx_std_20)
target_compile_definitions(fsdpp_libtorch INTERFACE _GLIBCXX_USE_CXX11_ABI=1)
target_link_options(fsdpp_libtorch INTERFACE "LINKER:-rpath,${FSDPP_TORCH_ROOT}/lib")
# --no-as-needed: operators register themselves when the library loads, no symbol of theirs is referenced. One item, so
# that CMake can neither reorder it nor drop a part of it.
target_link_libraries(
  fsdpp_libtorch
  INTERFACE "-Wl,--push-state,--no-as-needed,${FSDPP_TORCH_ROOT}/lib/libtorch_cpu.so,${FSDPP_TORCH_ROOT}/lib/libc10.so,--pop-state")
