"""Others can use fsdpp: installed, through find_package, and as a subfolder."""

import re

import pytest
from building import PYTHON, ROOT, run, succeed

HERE = ROOT / "tests" / "package"


@pytest.fixture(scope="module")
def prefix(cmake, build_folder, tmp_path_factory):
    """fsdpp installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("prefix")
    succeed(cmake.cmake, "--install", build_folder, "--prefix", folder)
    return folder


def test_every_public_header_is_installed(prefix):
    wanted = {path.relative_to(ROOT) for path in (ROOT / "fsdpp").rglob("*.h")}
    installed = {path.relative_to(prefix / "include") for path in (prefix / "include").rglob("*") if path.is_file()}
    assert installed == wanted
    assert len(wanted) > 10


def test_a_program_builds_and_runs_against_the_installed_tree(cmake, prefix, tmp_path):
    cmake.configure(HERE / "installed", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    cmake.build(tmp_path)
    compiled = (tmp_path / "build.ninja").read_text()
    assert str(ROOT / "fsdpp") not in compiled, "the program must not see the source tree"
    assert succeed(tmp_path / "consumer") == "covered 33033 sum 16\n"


def test_the_installed_package_takes_another_python(cmake, prefix, tmp_path):
    printed = cmake.configure(HERE / "installed", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", f"-DFSDPP_PYTHON={PYTHON}")
    assert "fsdpp: libtorch 2.11" in printed


def test_a_python_without_torch_is_an_error_with_the_remedy(cmake, prefix, tmp_path):
    result = run(cmake.cmake, "-S", HERE / "installed", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}",
                 "-DFSDPP_PYTHON=/bin/false", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={cmake.ninja}")
    assert result.returncode != 0
    assert "no libtorch found" in result.stdout and "-DFSDPP_TORCH_DIR" in result.stdout


def test_a_version_that_is_too_new_is_refused(cmake, prefix, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(p CXX)\nfind_package(fsdpp 99 REQUIRED)\n"
    )
    result = run(cmake.cmake, "-S", source, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}", "-G", "Ninja",
                 f"-DCMAKE_MAKE_PROGRAM={cmake.ninja}")
    assert result.returncode != 0
    assert re.search(r"requested\s+version\s+\"99\"", result.stdout)


def test_a_program_builds_with_fsdpp_as_a_subfolder(cmake, tmp_path):
    printed = cmake.configure(HERE / "subdirectory", tmp_path, f"-DFSDPP_SOURCE={ROOT}", f"-DFSDPP_PYTHON={PYTHON}")
    for variable in ("CMAKE_CXX_FLAGS", "CMAKE_CXX_STANDARD", "CMAKE_MODULE_PATH", "BUILD_TESTING", "options"):
        assert f"parent: {variable}=[]" in printed, "a parent project's settings are its own"
    assert "GTest" not in printed, "tests are built only when fsdpp is the project itself"
    cmake.build(tmp_path, "consumer")
    printed = succeed(tmp_path / "consumer")
    assert "ranks" in printed and "0" in printed
