#!/usr/bin/env python3
"""Runs the tests that need GPUs, on the GPUs of this machine; writes build/results/test-gpu.json, with the configurations that
trained with one process's bits and the operations that were held up in turn (hazards_checked).

    python3 tools/test_gpu.py --preset release
    python3 tools/test_gpu.py --filter 'GpuParity*'        (a GoogleTest filter)
    python3 tools/test_gpu.py --sanitizer memcheck         (our kernels under compute-sanitizer)
    python3 tools/test_gpu.py --shared-ranks 8             (many ranks, which take turns on the GPUs: slow)

One GPU does for all but NCCL, with two ranks at most unless told.

Needs the programs of build/PRESET, this Python's torch and nothing else: they may have been built on another machine.
Where this Python has pytest, tests/gpu/test_*.py run too, unless a filter or a sanitizer is given. Exit code 0 only when
something passed and nothing failed. The last line is `tests: N passed, N failed, N skipped`.
"""

import argparse
import concurrent.futures
import importlib.util
import os
import pathlib
import sys
import time

import results

LIMIT_S = 600  # of one program, or part of it
JOBS = 4  # at once: most of a small test is the start of its processes, and the GPUs take turns
PYTEST_LIMIT_S = 1800  # of all pytest files together
EVERY = "-Bandwidth*"


def library_path():
    """Where a program built elsewhere finds the libraries of this Python's torch."""
    torch = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    folders = [torch / "lib", *sorted(torch.parent.glob("nvidia/*/lib"))]
    return ":".join([*map(str, folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def programs(preset):
    folder = results.ROOT / "build" / preset / "tests" / "gpu"
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix == "" and os.access(path, os.X_OK))


def run_pytest(preset, environment):
    """The cases of tests/gpu/test_*.py."""
    if importlib.util.find_spec("pytest") is None:
        return [results.Case("pytest", "skipped", "this Python has no pytest: python3 -m pip install pytest")]
    junit = results.RESULTS / "gpu" / "pytest.xml"
    command = ["timeout", str(PYTEST_LIMIT_S), sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-s",
               "--tb=short", "--no-summary", f"--junitxml={junit}", "tests/gpu"]
    return results.run_recorded(command, junit, "pytest", environment | {"FSDPP_PRESET": preset})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="release", help="the build to test, build/PRESET")
    parser.add_argument("--filter", default=EVERY, help="GoogleTest filter [%(default)s]")
    parser.add_argument("--jobs", type=int, default=JOBS, help="programs, or parts of one, at once [%(default)s]")
    parser.add_argument("--shared-ranks", type=int, default=2, help="ranks that share GPUs where there are fewer, at most [%(default)s]")
    parser.add_argument("--sanitizer", choices=["memcheck", "racecheck", "initcheck", "synccheck"],
                        help="run kernels_test under this tool of compute-sanitizer")
    arguments = parser.parse_args()
    environment = {
        "LD_LIBRARY_PATH": library_path(),
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "FSDPP_TEST_SHARED_RANKS": str(arguments.shared_ranks),
    }
    chosen = programs(arguments.preset)
    prefix = ["timeout", str(LIMIT_S)]
    if arguments.sanitizer:
        chosen = [path for path in chosen if path.name == "kernels_test"]
        prefix += ["compute-sanitizer", "--tool", arguments.sanitizer, "--error-exitcode", "9"]
    if not chosen:
        sys.exit(f"no test program in build/{arguments.preset}/tests/gpu: build it where there is a CUDA toolkit")

    begin = time.monotonic()
    jobs = 1 if arguments.sanitizer else arguments.jobs
    tasks, reports = [], []
    for path in chosen:
        parts = 1 if path.name == "kernels_test" else 2 * jobs
        for part in range(parts):
            reports.append(results.RESULTS / "gpu" / f"{path.name}.{part}.xml")
            command = [*prefix, path, f"--gtest_output=xml:{reports[-1]}", f"--gtest_filter={arguments.filter}"]
            own = environment | {"GTEST_TOTAL_SHARDS": str(parts), "GTEST_SHARD_INDEX": str(part)}
            tasks.append(lambda c=command, r=reports[-1], n=path.name, e=own: results.run_recorded(c, r, n, e, jobs > 1))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        cases = [case for found in pool.map(lambda task: task(), tasks) for case in found]
    if arguments.filter == EVERY and not arguments.sanitizer:
        # By itself, since it expects lost ranks to be named in time. It sets library path and multicast for its programs as a
        # user's shell would not.
        kept = ("OMP_NUM_THREADS", "FSDPP_TEST_SHARED_RANKS")
        cases += run_pytest(arguments.preset, {name: environment[name] for name in kept})
    checked = {
        figure: sum(results.sum_recorded(report, figure) for report in reports)
        for figure in ("parity_configurations", "hazards_checked")
    }
    print()
    results.print_failures(cases)
    figures = {outcome: results.count(cases, outcome) for outcome in ("passed", "failed", "skipped")}
    name = "test-gpu" + (f"-{arguments.sanitizer}" if arguments.sanitizer else "")
    results.write_figures(name, figures | checked | {"seconds": round(time.monotonic() - begin, 1)})
    print("tests: {passed} passed, {failed} failed, {skipped} skipped".format(**figures), flush=True)
    sys.exit(0 if figures["passed"] and not figures["failed"] else 1)


if __name__ == "__main__":
    main()
