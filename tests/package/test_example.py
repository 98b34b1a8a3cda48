"""The README's C++ example compiles against the installed tree, and trains, alone and on two ranks."""

import os
import re
import socket

import pytest
from building import ROOT, run, succeed

CMAKE = """cmake_minimum_required(VERSION 3.25)
project(example LANGUAGES CXX)
{find}
add_executable(example example.cpp)
target_link_libraries(example PRIVATE fsdpp::fsdpp)
"""


@pytest.fixture(scope="module")
def example(cmake, build_folder, tmp_path_factory):
    """The program of the README, built as the README says."""
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"```cpp\n(.*?)```", readme, re.S).group(1)
    find = re.search(r"find_package\(fsdpp REQUIRED\)", readme).group(0)
    folder = tmp_path_factory.mktemp("example")
    succeed(cmake.cmake, "--install", build_folder, "--prefix", folder / "prefix")
    (folder / "example.cpp").write_text("#include <iostream>\n" + code)
    (folder / "CMakeLists.txt").write_text(CMAKE.format(find=find))
    cmake.configure(folder, folder / "build", f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}")
    cmake.build(folder / "build")
    return folder / "build" / "example"


def losses(printed):
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", printed, re.M)]


def alone():
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}


def test_it_trains_alone(example):
    seen = losses(succeed(example, env=alone()))
    assert len(seen) == 20
    assert seen[-1] < 0.5 * seen[0]


def test_it_trains_on_two_ranks(example):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = alone() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = f"RANK=1 {example} & RANK=0 {example}; first=$?; wait $! && exit $first"
    result = run("bash", "-c", command, env=environment)
    assert result.returncode == 0, result.stdout
    seen = losses(result.stdout)
    assert len(seen) == 20
    assert seen[-1] < 0.5 * seen[0]
