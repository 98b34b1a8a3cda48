"""clang-format has nothing to change."""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from project import ROOT, files


def clang_format():
    """The path of the clang-format that set-up found, else the one beside this Python or on PATH, else None."""
    tools = ROOT / "build" / "tools.env"
    if tools.exists():
        for line in tools.read_text().splitlines():
            name, _, value = line.partition("=")
            if name == "CLANG_FORMAT" and value:
                return shlex.split(value)[0]
    beside = pathlib.Path(sys.executable).parent / "clang-format"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("clang-format")


def complaints(paths, cwd=ROOT):
    tool = clang_format()
    if tool is None:
        pytest.skip("no clang-format: pip reached no registry and there is none on PATH")
    command = [tool, "--dry-run", "-Werror", "--style=file", *map(str, paths)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    return result.stderr if result.returncode else ""


def test_sources_are_formatted():
    paths = [path for path in files() if path.suffix in (".h", ".cpp", ".cu", ".cuh")]
    assert paths
    wrong = complaints(paths)
    names = sorted(set(re.findall(r"^(\S+?):\d+:\d+: error", wrong, re.MULTILINE)))
    assert not wrong, f"run `make format`: {names or wrong[:2000]}"


def test_a_badly_formatted_file_is_noticed(tmp_path):
    shutil.copy(ROOT / ".clang-format", tmp_path)
    (tmp_path / "bad.cpp").write_text("int   f( ){return 1 ;}\n")
    assert "clang-format-violations" in complaints(["bad.cpp"], cwd=tmp_path)
