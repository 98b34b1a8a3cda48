#!/usr/bin/env python3
"""Builds and runs the unit and thread-rank tests under ASan with UBSan, then under TSan.

    .venv/bin/python tools/sanitize.py
    .venv/bin/python tools/sanitize.py --only tsan --filter 'Comm*'

Writes build/results/sanitize.json; exit code 0 only when tests ran under each and none failed. The suppression files
in tools/sanitizers/ are for third parties alone.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time

import results

EXIT_CODE = 66  # of a program that a sanitizer stopped
SUPPRESSIONS = results.ROOT / "tools" / "sanitizers"


def sanitizer_options(name, **settings):
    """NAME_OPTIONS of a sanitizer: stop at the first report, with this project's suppressions."""
    settings = {"halt_on_error": 1, "exitcode": EXIT_CODE, "suppressions": SUPPRESSIONS / f"{name}.supp"} | settings
    return ":".join(f"{key}={value}" for key, value in settings.items())


ENVIRONMENT = {
    "asan": {
        "ASAN_OPTIONS": sanitizer_options("asan", detect_leaks=1, detect_stack_use_after_return=1, strict_string_checks=1),
        "LSAN_OPTIONS": f"suppressions={SUPPRESSIONS / 'lsan.supp'}:print_suppressions=0",
        "UBSAN_OPTIONS": sanitizer_options("ubsan", print_stacktrace=1),
    },
    # The history keeps the other access's stack through the thousands of accesses between two waits.
    "tsan": {"TSAN_OPTIONS": sanitizer_options("tsan", second_deadlock_stack=1, history_size=4)},
}


def fixed_addresses():
    """A command prefix that turns off address randomisation: g++'s TSan fails where it uses 32 bits (Ubuntu 24.04)."""
    setarch = shutil.which("setarch")
    prefix = [setarch, platform.machine(), "-R"] if setarch else []
    usable = prefix and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if usable else []


def sanitize(preset, pattern):
    """Builds and runs one preset; returns its cases."""
    print(f"== {preset}: build", flush=True)
    build = subprocess.run(["tools/build.sh", preset, "fsdpp_thread_tests"], cwd=results.ROOT)
    if build.returncode:
        return [results.Case(f"{preset}: build", "failed", "the build failed; its output stands above")]
    print(f"== {preset}: tests", flush=True)
    prefix = fixed_addresses() if preset == "tsan" else []
    environment = {"OMP_NUM_THREADS": "1", "GTEST_FILTER": pattern} | ENVIRONMENT[preset]
    options = ["-L", "^threads$"]
    return results.run_ctest(preset, results.RESULTS / f"{preset}.xml", options, environment, prefix)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ENVIRONMENT), help="one of the two")
    parser.add_argument("--filter", default="*", help="only these tests, as GTEST_FILTER says it")
    arguments = parser.parse_args()
    os.chdir(results.ROOT)

    figures, lines, clean = {}, [], True
    for preset in [arguments.only] if arguments.only else ENVIRONMENT:
        begin = time.monotonic()
        cases = sanitize(preset, arguments.filter)
        results.print_failures(cases)
        counts = {outcome: results.count(cases, outcome) for outcome in ("passed", "failed", "skipped")}
        figures[preset] = counts | {"seconds": round(time.monotonic() - begin, 1)}
        lines.append("{name} {passed} passed {failed} failed".format(name=preset, **counts))
        clean = clean and counts["passed"] > 0 and counts["failed"] == 0
    results.write_figures("sanitize", figures)
    print("sanitize: " + ", ".join(lines), flush=True)
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
