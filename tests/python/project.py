"""The project's own files, as the tests of this folder look at them."""

import functools
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


@functools.cache
def files():
    """Paths below the root of every file that is, or would be, in git; generated ones are left out."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode == 0:
        names = listing.stdout.splitlines()
    else:  # unpacked from an archive
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    paths = [pathlib.PurePosixPath(name) for name in names]
    generated = {".git", ".venv", "build", "__pycache__"}
    return sorted(p for p in paths if generated.isdisjoint(p.parts) and (ROOT / p).is_file())


def sources(*tops, suffixes=(".h", ".cpp", ".cu", ".cuh")):
    """The C++ files below the folders `tops`."""
    return [path for path in files() if path.parts[0] in tops and path.suffix in suffixes]


def text(path):
    return (ROOT / path).read_text(encoding="utf-8")
