#!/usr/bin/env python3
"""Runs every test: the C++ programs through ctest, then the Python tests; writes build/results/test.json.

    .venv/bin/python tools/test.py --preset release
    .venv/bin/python tools/test.py --filter layout        (ctest -R, pytest -k; of many tests run as one program, the program's name)

Exit code 0 only when something ran and nothing failed. The last line is `tests: N passed, N failed, N skipped`.
"""

import argparse
import importlib.util
import os
import sys
import time

import results

PYTHON_TEST_TIMEOUT_S = 600  # one test of tests/package configures and builds a program of its own


def python_folders():
    """Folders below tests/ that hold pytest files."""
    return sorted({str(path.parent.relative_to(results.ROOT)) for path in results.ROOT.glob("tests/*/test_*.py")})


def run_pytest(preset, pattern):
    if importlib.util.find_spec("pytest") is None:
        missing = "this Python has no pytest: run tools/setup.sh where a package registry is reached"
        return [results.Case("pytest", "failed", missing)]
    junit = results.RESULTS / "pytest.xml"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short", "--no-summary",
               f"--junitxml={junit}", *python_folders()]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--timeout={PYTHON_TEST_TIMEOUT_S}")
    if pattern:
        command += ["-k", pattern]
    cases = results.run_recorded(command, junit, "pytest", {"FSDPP_PRESET": preset})
    if pattern and len(cases) == 1 and cases[0].name == "pytest":
        return []  # pytest exits 5 when the filter leaves no test: here that is no failure
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="release", help="the build to test, build/PRESET")
    parser.add_argument("--filter", default="", help="only tests whose name matches (ctest -R, pytest -k)")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(results.ROOT)

    begin = time.monotonic()
    cases = results.run_ctest(
        arguments.preset, results.RESULTS / "ctest.xml", ["-R", arguments.filter] if arguments.filter else []
    )
    parity = [case for case in cases if case.outcome == "passed" and "Parity" in case.name and "/" in case.name]
    cases += run_pytest(arguments.preset, arguments.filter)

    print()
    results.print_failures(cases)
    figures = {outcome: results.count(cases, outcome) for outcome in ("passed", "failed", "skipped")}
    figures["parity_configurations"] = len(parity)
    figures["hazards_checked"] = results.sum_printed(
        results.RESULTS / "ctest.xml", r"hazards: (\d+) operations checked")
    results.write_figures("test", figures | {"seconds": round(time.monotonic() - begin, 1)})
    if not figures["passed"] + figures["failed"]:
        print("no test ran")
    print("tests: {passed} passed, {failed} failed, {skipped} skipped".format(**figures), flush=True)
    sys.exit(0 if figures["passed"] and not figures["failed"] else 1)


if __name__ == "__main__":
    main()
