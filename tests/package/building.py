"""Running commands and CMake for the tests of set-up, build and installation."""

import dataclasses
import pathlib
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"


def run(*command, **settings):
    """Runs a command; returns its CompletedProcess with stdout and stderr together in `stdout`."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | settings
    return subprocess.run([str(part) for part in command], **settings)


def succeed(*command, **settings):
    """Like run(), but the command must succeed; returns what it printed."""
    result = run(*command, **settings)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout[-6000:]}"
    return result.stdout


@dataclasses.dataclass
class Cmake:
    """The CMake and Ninja that set-up found."""

    cmake: str
    ninja: str

    def configure(self, source, build, *definitions, **settings):
        launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
        return succeed(self.cmake, "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={self.ninja}",
                       "-DCMAKE_CXX_COMPILER=g++", "-DCMAKE_BUILD_TYPE=Release", *launcher, *definitions, **settings)

    def build(self, build, *targets, **settings):
        return succeed(self.cmake, "--build", build, "--parallel", "2",
                       *(["--target", *targets] if targets else []), **settings)


def needed_libraries(program):
    """The shared libraries that a program names: its own NEEDED entries."""
    printed = succeed("readelf", "-d", program)
    return [line.split("[")[1].rstrip("]") for line in printed.splitlines() if "(NEEDED)" in line]
