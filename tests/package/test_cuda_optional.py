"""CUDA is optional: found by itself where it is, not missed where it is not."""

import pytest
from building import PYTHON, ROOT, needed_libraries, run, succeed

SUBDIRECTORY = ROOT / "tests" / "package" / "subdirectory"
# /usr/local/cuda is looked at whatever PATH says: only this hides it.
HIDDEN = "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"


def test_the_whole_project_configures_without_a_toolkit(cmake, no_cuda_environment, tmp_path):
    assert run("which", "nvcc", env=no_cuda_environment).returncode != 0
    printed = cmake.configure(ROOT, tmp_path, HIDDEN, f"-DFSDPP_PYTHON={PYTHON}", env=no_cuda_environment)
    assert "fsdpp: no CUDA toolkit, CPU ranks only" in printed
    assert "Build files have been written" in printed


def test_a_program_links_and_runs_without_a_toolkit(cmake, no_cuda_environment, tmp_path):
    cmake.configure(SUBDIRECTORY, tmp_path, HIDDEN, f"-DFSDPP_SOURCE={ROOT}", f"-DFSDPP_PYTHON={PYTHON}",
                    env=no_cuda_environment)
    cmake.build(tmp_path, "cpu_consumer", env=no_cuda_environment)
    assert succeed(tmp_path / "cpu_consumer", env=no_cuda_environment).startswith("sum ")
    needed = needed_libraries(tmp_path / "cpu_consumer")
    assert "libtorch_cpu.so" in needed and "libc10.so" in needed
    assert not [name for name in needed if "cuda" in name]


def test_a_cuda_target_gets_the_cuda_half_and_others_do_not(cmake, tmp_path):
    printed = cmake.configure(SUBDIRECTORY, tmp_path, f"-DFSDPP_SOURCE={ROOT}", f"-DFSDPP_PYTHON={PYTHON}")
    if "CPU ranks only" in printed:
        pytest.skip("no CUDA toolkit, or a torch without CUDA, on this machine")
    cmake.build(tmp_path, "cpu_consumer", "cuda_consumer")
    assert "libtorch_cuda.so" in needed_libraries(tmp_path / "cuda_consumer")
    assert "libtorch_cuda.so" not in needed_libraries(tmp_path / "cpu_consumer")


def is_for_gpus(path):
    return path.parent.name == "gpu" or path.name.endswith(("-cuda", "_gpu"))


def test_no_program_of_the_build_for_cpus_names_a_cuda_library(build_folder):
    programs = [
        path
        for top in ("apps", "tests", "benchmarks")
        for path in (build_folder / top).rglob("*")
        if path.is_file() and path.read_bytes()[:4] == b"\x7fELF" and path.suffix == "" and not is_for_gpus(path)
    ]
    assert programs
    wrong = {path.name: name for path in programs for name in needed_libraries(path) if "cuda" in name}
    assert wrong == {}
