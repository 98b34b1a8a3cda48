"""tools/setup.sh in a copy of the tree, without a registry and without root."""

import os
import pathlib
import shutil
import sys

import pytest
from building import PYTHON, ROOT, run, succeed

# What setup.sh itself calls.
BASICS = ["bash", "sh", "cat", "cksum", "cut", "dirname", "env", "head", "mkdir", "readlink", "rm"]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what set-up reads."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "tools", folder / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def commands(tmp_path):
    """A folder of commands, to be the whole PATH: link(name) adds the machine's, write(name, script) one's own."""

    class Commands:
        folder = tmp_path / "commands"

        def link(self, *names):
            for name in names:
                (self.folder / name).symlink_to(shutil.which(name))

        def write(self, name, script):
            (self.folder / name).write_text(f"#!{shutil.which('sh')}\n{script}\n")
            (self.folder / name).chmod(0o755)

        def environment(self, **more):
            inherited = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") and k not in ("CXX", "PYTHON")}
            return inherited | {"PATH": str(self.folder)} | more

    result = Commands()
    result.folder.mkdir()
    result.link(*BASICS)
    return result


def a_python(tmp_path, hidden):
    """A Python whose packages are those of the checkout's venv, without the distributions named `hidden`."""
    source = pathlib.Path(succeed(PYTHON, "-c", "import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))").strip())
    succeed(sys.executable, "-m", "venv", "--without-pip", tmp_path / "python")
    target = pathlib.Path(
        succeed(tmp_path / "python/bin/python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip()
    )
    for entry in source.iterdir():
        name = entry.name.lower().replace("-", "_")
        if not any(name.startswith(part) for part in (*hidden, "pip", "setuptools", "_distutils", "distutils")):
            (target / entry.name).symlink_to(entry)
    return tmp_path / "python" / "bin" / "python"


def test_without_root_the_missing_packages_are_listed(checkout, commands):
    commands.link("python3")  # neither a compiler nor make
    commands.write("id", "echo 1000")
    result = run("tools/setup.sh", cwd=checkout, env=commands.environment())
    assert result.returncode != 0
    assert "missing: g++ make" in result.stdout
    assert "sudo apt-get install g++ make" in result.stdout
    assert not (checkout / ".venv").exists()


def test_as_root_the_missing_packages_are_installed(checkout, commands, tmp_path):
    commands.link("python3")
    commands.write("id", "echo 0")
    commands.write("apt-get", f'echo "$@" >>{tmp_path}/calls; exit 100')
    result = run("tools/setup.sh", cwd=checkout, env=commands.environment())
    assert result.returncode != 0
    assert "apt-get could not install: g++ make" in result.stdout
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].startswith("update")
    assert any(call.startswith("install -y") and " g++ make " in f"{call} " for call in calls)


def test_an_old_compiler_is_named(checkout, commands):
    commands.link("python3", "make")
    commands.write("g++", "echo 11.4.0")
    result = run("tools/setup.sh", cwd=checkout, env=commands.environment(FSDPP_SKIP_PACKAGES="1"))
    assert result.returncode != 0
    assert "g++ is version 11" in result.stdout and "CXX=g++-12" in result.stdout


def test_a_python_that_is_none_is_named(checkout):
    result = run("tools/setup.sh", cwd=checkout, env=os.environ | {"PYTHON": "/no/such/python3"})
    assert result.returncode != 0
    assert "PYTHON=/no/such/python3 is not a command" in result.stdout


def test_a_python_that_has_torch_lends_it(checkout):
    """All pinned tools are there too: nothing is downloaded. A second run, with or without PYTHON, does nothing."""
    environment = os.environ | {"PYTHON": str(PYTHON), "PIP_NO_INDEX": "1", "FSDPP_SKIP_PACKAGES": "1"}
    environment.pop("PIP_FIND_LINKS", None)
    printed = succeed("tools/setup.sh", cwd=checkout, env=environment)
    assert "using torch 2.11.0 of" in printed and "installing torch" not in printed
    where = succeed(checkout / ".venv/bin/python", "-c", "import torch; print(torch.__version__, torch.__file__)")
    assert where.startswith("2.11.0") and str(checkout) not in where
    before = (checkout / ".venv").stat().st_mtime_ns
    assert succeed("tools/setup.sh", cwd=checkout, env=environment) == ""
    environment.pop("PYTHON")
    assert succeed("tools/setup.sh", cwd=checkout, env=environment) == ""
    assert (checkout / ".venv").stat().st_mtime_ns == before


def test_without_a_registry_the_tools_of_the_path_are_used(checkout, commands, tmp_path):
    python = a_python(tmp_path, hidden=("cmake", "ninja", "clang_format", "pytest"))
    commands.link("g++", "make")
    for tool in ("cmake", "ctest", "ninja"):
        commands.write(tool, "true")
    environment = commands.environment(PYTHON=str(python), PIP_NO_INDEX="1", FSDPP_SKIP_PACKAGES="1")
    printed = succeed("tools/setup.sh", cwd=checkout, env=environment)
    assert "pip reached no registry: using" in printed
    tools = dict(line.split("=", 1) for line in (checkout / "build/tools.env").read_text().splitlines())
    assert tools["CMAKE"] == str(commands.folder / "cmake") and tools["NINJA"] == str(commands.folder / "ninja")
    assert tools["CLANG_FORMAT"] in ("", "''")


def test_without_a_registry_and_without_tools_the_missing_one_is_named(checkout, commands, tmp_path):
    python = a_python(tmp_path, hidden=("cmake", "ninja", "clang_format", "pytest"))
    commands.link("g++", "make")
    environment = commands.environment(PYTHON=str(python), PIP_NO_INDEX="1", FSDPP_SKIP_PACKAGES="1")
    result = run("tools/setup.sh", cwd=checkout, env=environment)
    assert result.returncode != 0
    assert "cmake is not on PATH: install cmake" in result.stdout


def test_building_before_set_up_says_what_to_run(checkout):
    result = run("tools/build.sh", "release", cwd=checkout)
    assert result.returncode != 0
    assert "run tools/setup.sh first" in result.stdout
