"""What tools/test.py and tools/sanitize.py share: running ctest, reading JUnit files, printing and keeping figures."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "results"
OUTPUT_LIMIT = 20_000  # characters of one failed test's output that are printed; its end is the interesting part


@dataclasses.dataclass
class Case:
    """One test that a JUnit file reports."""

    name: str
    outcome: str  # passed, failed or skipped
    output: str  # what a failed test printed, or why a test was skipped


def tools():
    """The tools that tools/setup.sh found: {"CTEST": path, ...}; an empty value: there is none."""
    text = (ROOT / "build" / "tools.env").read_text()
    # Written with bash's %q, so bash reads it.
    script = 'set -a; . build/tools.env; for name in "$@"; do printf "%s\\n" "${!name}"; done'
    names = [line.split("=", 1)[0] for line in text.splitlines()]
    values = subprocess.run(
        ["bash", "-c", script, "bash", *names], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return dict(zip(names, values, strict=True))


def outcome_of(case):
    """(outcome, output) of a <testcase> of ctest, pytest or GoogleTest."""
    output = "\n".join(part.text or "" for part in case if part.tag in ("system-out", "system-err"))
    failure = next((part for part in case if part.tag in ("failure", "error")), None)
    if failure is not None:
        return "failed", "\n".join(filter(None, [failure.text or failure.get("message"), output]))
    skip = case.find("skipped")
    if case.get("result") == "suppressed":  # GoogleTest's DISABLED_
        return "skipped", "disabled"
    if skip is None and case.get("status", "run") == "run":
        return "passed", ""
    reason = (skip.get("message") if skip is not None else None) or "not run"
    # ctest lists a test whose program is missing beside those that skip themselves: only the latter are skipped.
    if case.get("status") == "notrun" and not reason.startswith("SKIP_"):
        return "failed", "\n".join(filter(None, [reason, output]))
    if reason.startswith("SKIP_"):  # the test's own words stand between GoogleTest's lines
        reason = "\n".join(line for line in output.splitlines() if not re.match(r"\[|Running main|Note:", line))
    return "skipped", reason


def read_junit(path):
    """The cases of a JUnit file; none when there is no file."""
    if not path.exists():
        return []
    cases = []
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        module = case.get("classname", "")
        name = case.get("name", "?")
        outcome, output = outcome_of(case)
        cases.append(Case(name if module in ("", name) else f"{module}::{name}", outcome, output))
    return cases


def sum_printed(path, pattern):
    """The sum of the numbers that tests printed, by a JUnit file: `pattern` has one group, the number."""
    if not path.exists():
        return 0
    outputs = (part.text or "" for part in xml.etree.ElementTree.parse(path).iter("system-out"))
    return sum(int(number) for output in outputs for number in re.findall(pattern, output))


def sum_recorded(path, name):
    """The sum of the figures called `name` that GoogleTest cases recorded, by a JUnit file."""
    if not path.exists():
        return 0
    cases = xml.etree.ElementTree.parse(path).iter("property")
    return sum(int(figure.get("value", 0)) for figure in cases if figure.get("name") == name)


def run_recorded(command, junit, what, environment=None, at_once=False):
    """Runs a test command that writes `junit`, streaming its output, or (`at_once`, beside others) showing it at the end;
    returns its cases.

    An exit code that the cases do not explain is a failed case of its own, named `what`.
    """
    junit.parent.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    line = "+ " + " ".join(map(str, command)) + "\n"
    if not at_once:
        print(line, end="", flush=True)
    into = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"} if at_once else {}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | (environment or {}), **into)
    if at_once:
        print(line + done.stdout, end="", flush=True)
    code = done.returncode
    cases = read_junit(junit)
    if code != 0 and all(case.outcome != "failed" for case in cases):
        cases.append(Case(what, "failed", f"{what} ended with exit code {code}; its output stands above"))
    return cases


def inner_cases(preset, programs):
    """The single tests inside the programs that ctest ran as a whole. One that was stopped is a failed case itself."""
    cases = []
    for program in programs:
        report = ROOT / "build" / preset / "Testing" / "cases" / f"{program.name}.xml"
        inside = read_junit(report)
        cases += inside
        if program.outcome == "failed" and all(case.outcome != "failed" for case in inside):
            cases.append(program)
        elif program.outcome == "passed" and not report.exists():
            cases.append(Case(program.name, "failed", f"{program.name} ended well, but wrote no report of its tests"))
    return cases


def run_ctest(preset, junit, options, environment=None, prefix=()):
    """Runs ctest in build/PRESET, two tests at a time; returns its cases, of programs run as a whole those inside."""
    folder = ROOT / "build" / preset
    shutil.rmtree(folder / "Testing" / "cases", ignore_errors=True)
    command = [*prefix, tools()["CTEST"], "--test-dir", f"build/{preset}", "-j2", "--output-junit", junit,
               "--test-output-size-passed", str(OUTPUT_LIMIT), *options]
    cases = run_recorded(command, junit, "ctest", environment)
    listed = subprocess.run([tools()["CTEST"], "--test-dir", folder, "-N", "-L", "^whole$"], capture_output=True, text=True)
    whole = set(re.findall(r"Test +#\d+: (\S+)", listed.stdout))
    programs = [case for case in cases if case.name in whole]
    return [case for case in cases if case.name not in whole] + inner_cases(preset, programs)


def count(cases, outcome):
    return sum(case.outcome == outcome for case in cases)


def print_failures(cases):
    """Prints the failed cases, each with its name and output, and why others were skipped."""
    for case in cases:
        if case.outcome == "skipped":
            print(f"skipped: {case.name}: {' '.join(case.output.split())[:200]}")
    for case in cases:
        if case.outcome == "failed":
            print(f"\n==== failed: {case.name}\n{case.output.strip()[-OUTPUT_LIMIT:]}")
    names = [case.name for case in cases if case.outcome == "failed"]
    if names:
        print("\nfailed tests:\n  " + "\n  ".join(names))


def write_figures(name, figures):
    """Writes build/results/NAME.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
