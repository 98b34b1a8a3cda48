"""Fixtures of the tests of set-up, build and installation."""

import os
import pathlib

import pytest
from building import ROOT, Cmake, succeed


@pytest.fixture(scope="session")
def cmake():
    printed = succeed("bash", "-c", '. build/tools.env && printf "%s\\n" "$CMAKE" "$NINJA"', cwd=ROOT)
    return Cmake(*printed.split("\n")[:2])


@pytest.fixture(scope="session")
def build_folder():
    """The finished build that these tests look at."""
    folder = ROOT / "build" / os.environ.get("FSDPP_PRESET", "release")
    assert (folder / "build.ninja").exists(), f"{folder} is not built: run `make build`"
    return folder


@pytest.fixture(scope="session")
def no_cuda_environment(tmp_path_factory):
    """An environment in which no CUDA toolkit shows: no nvcc on PATH, no variable that names one."""
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder]
    without = [folder for folder in folders if not (pathlib.Path(folder) / "nvcc").exists()]
    hidden = {"CUDA_HOME", "CUDA_PATH", "CUDACXX", "CUDA_ROOT", "CUDAToolkit_ROOT"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return environment | {"PATH": os.pathsep.join(without)}
