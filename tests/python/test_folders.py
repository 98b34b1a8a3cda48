"""The folder rules of the design: who may include whom, what sees torch and CUDA, that sources are listed."""

import pathlib
import re

import pytest
from project import ROOT, files, sources, text

BELOW_RUNTIME = {"base", "layout", "device", "trace", "comm", "buffer"}
# Folder of fsdpp/: the folders that it may include besides itself.
MAY_INCLUDE = {
    "base": set(),
    "layout": {"base"},
    "device": {"base"},
    "trace": {"base", "device"},
    "comm": {"base", "layout", "device"},
    "buffer": {"base", "layout", "device", "comm"},
    "runtime": BELOW_RUNTIME,
    "nn": BELOW_RUNTIME | {"runtime"},
    "optim": BELOW_RUNTIME | {"runtime"},
    "checkpoint": BELOW_RUNTIME | {"runtime", "optim"},
    "data": {"base"},
    "observe": {"base", "trace"},
}
# Which of libtorch's include trees a folder may name; folders that are not listed: all of them.
LIBTORCH = {"ATen", "c10", "torch", "caffe2"}
MAY_INCLUDE_LIBTORCH = {
    "base": set(),
    "layout": set(),
    "device": {"ATen", "c10"},
    "trace": set(),
    "data": {"ATen", "c10"},
    "observe": set(),
}
CUDA_HEADER = re.compile(r"^(cuda|cu[a-z]*\.h|cub/|cublas|thrust/|nccl|nvtx|cooperative_groups|mma\.h|ATen/cuda|c10/cuda|torch/csrc/cuda)")
MAY_SEE_CUDA = re.compile(r"^fsdpp/(device|comm)/cuda[^/]*$|\.cuh?$")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
LINE_LIMIT = 500


def includes(content):
    """(delimiter, name) of every include."""
    return INCLUDE.findall(content)


def broken_rules(path, content):
    """What the file `path`, of this content, includes against the rules: one sentence each."""
    path = pathlib.PurePosixPath(path)
    folder = path.parts[1] if path.parts[0] == "fsdpp" and len(path.parts) > 2 else None
    broken = []
    for delimiter, name in includes(content):
        top, _, rest = name.partition("/")
        if top == "fsdpp":
            target = rest.partition("/")[0]
            if delimiter != '"' or not (ROOT / name).is_file():
                broken.append(f'{path} includes {name}: written "fsdpp/folder/file.h", naming a file that exists')
            if folder and target != folder and target not in MAY_INCLUDE[folder]:
                broken.append(f"{path} includes {name}: {folder} may include {sorted(MAY_INCLUDE[folder])}")
        elif folder and delimiter == '"':
            broken.append(f'{path} includes "{name}": our own headers are written "fsdpp/folder/file.h"')
        if folder and top in LIBTORCH and top not in MAY_INCLUDE_LIBTORCH.get(folder, LIBTORCH):
            broken.append(f"{path} includes {name}: {folder} may see {sorted(MAY_INCLUDE_LIBTORCH[folder])} of libtorch")
        if top in ("torch", "ATen", "c10") and name in ("torch/torch.h", "torch/all.h"):
            broken.append(f"{path} includes {name}: 40 s of compile time; include the headers that are needed")
        if CUDA_HEADER.match(name) and not MAY_SEE_CUDA.search(str(path)):
            broken.append(f"{path} includes {name}: only device/cuda*, comm/cuda* and kernels see CUDA")
        if top == "tests" and path.parts[0] != "tests" or top == "apps" and path.parts[0] not in ("apps", "tests"):
            broken.append(f"{path} includes {name}: nothing depends on {top}/")
    return broken


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_a_library_folder_includes_only_what_it_may(folder):
    found = [path for path in sources("fsdpp") if path.parts[1] == folder]
    assert [rule for path in found for rule in broken_rules(path, text(path))] == []


@pytest.mark.parametrize("top", ["apps", "benchmarks", "tests"])
def test_programs_and_tests_include_headers_that_exist_and_no_cuda(top):
    assert [rule for path in sources(top) for rule in broken_rules(path, text(path))] == []


def test_the_library_has_only_the_folders_of_the_design():
    folders = {path.parts[1] for path in sources("fsdpp") if len(path.parts) > 2}
    assert {"base", "layout", "device", "comm"} <= folders <= set(MAY_INCLUDE)


@pytest.mark.parametrize(
    "path, line",
    [
        ("fsdpp/layout/x.h", '#include "fsdpp/comm/connect.h"'),
        ("fsdpp/observe/x.cpp", '#  include "fsdpp/layout/mesh.h"'),
        ("fsdpp/layout/x.h", "#include <ATen/core/Tensor.h>"),
        ("fsdpp/layout/x.cpp", "#include <cuda_runtime.h>"),
        ("fsdpp/device/x.cpp", "#include <torch/nn/module.h>"),
        ("fsdpp/comm/peers.cpp", "#include <cuda_runtime.h>"),
        ("fsdpp/comm/x.cpp", "#include <c10/cuda/CUDAStream.h>"),
        ("fsdpp/nn/x.cpp", "#include <torch/torch.h>"),
        ("fsdpp/nn/x.cpp", '#include "llama.h"'),
        ("fsdpp/comm/x.cpp", "#include <fsdpp/base/error.h>"),
        ("fsdpp/comm/x.cpp", '#include "fsdpp/base/no_such_file.h"'),
        ("fsdpp/comm/x.cpp", '#include "tests/support/ranks.h"'),
        ("apps/x.cpp", "#include <nccl.h>"),
    ],
)
def test_the_rules_catch(path, line):
    assert broken_rules(path, f"#pragma once\n{line}\n")


@pytest.mark.parametrize(
    "path, line",
    [
        ("fsdpp/comm/x.cpp", '#include "fsdpp/layout/mesh.h"'),
        ("fsdpp/comm/cuda_memory.cpp", "#include <cuda_runtime.h>"),
        ("fsdpp/device/add.cu", "#include <cuda_bf16.h>"),
        ("fsdpp/data/x.cpp", "#include <ATen/core/Tensor.h>"),
        ("tests/unit/x.cpp", '#include "tests/support/ranks.h"'),
        ("fsdpp/base/x.cpp", "#include <cstring>"),
    ],
)
def test_the_rules_allow(path, line):
    assert broken_rules(path, f"{line}\n") == []


def cmake_lists(path):
    """The texts of the CMakeLists.txt beside `path` and above it, without comments."""
    folders = [parent / "CMakeLists.txt" for parent in path.parents if (ROOT / parent / "CMakeLists.txt").is_file()]
    return {folder.parent: re.sub(r"#.*", "", text(folder)) for folder in folders}


def is_listed(path):
    if path.parts[0] == "fsdpp":  # the folder's own list, nobody else's
        lists = {path.parent: cmake_lists(path).get(path.parent, "")}
    else:
        lists = cmake_lists(path)
    return any(
        re.search(rf"(?<![\w./]){re.escape(str(path.relative_to(folder)))}(?![\w./])", content)
        for folder, content in lists.items()
    )


def test_every_source_is_listed_by_its_folder():
    checked = sources("fsdpp") + sources("apps", "benchmarks", "tests", suffixes=(".cpp", ".cu"))
    checked = [path for path in checked if path.parts[:2] != ("tests", "package")]  # built by their tests
    assert [str(path) for path in checked if not is_listed(path)] == []


def test_no_list_is_made_by_a_wildcard():
    lists = [path for path in files() if path.name == "CMakeLists.txt" or path.suffix == ".cmake"]
    assert lists
    assert [str(path) for path in lists if re.search(r"\bGLOB(_RECURSE)?\b", text(path))] == []


def test_no_file_is_long():
    suffixes = {".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".cmake", ".txt"}
    counted = {path: len(text(path).splitlines()) for path in files() if path.suffix in suffixes}
    assert {str(path): count for path, count in counted.items() if count > LINE_LIMIT} == {}
