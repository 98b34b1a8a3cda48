"""docs/cases.md: every case has its row, the tests it names exist, and numbered tests are in their rows."""

import fnmatch
import pathlib
import re

import pytest
from project import ROOT, sources, text

TABLE = pathlib.PurePosixPath("docs/cases.md")
NUMBERS = range(1, 50)  # those of checkpoints come with them
ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`(\w+\.[\w*]+)` \(\[[\w.]+\]\(\.\./(tests/[\w./]+)\)\)")
TEST = re.compile(r"^\s*TEST(?:_[FP])?\(\s*(\w+)\s*,\s*(\w+)\s*\)", re.MULTILINE)


def rows(content):
    """(number, what holds, tests) of each row."""
    return [(int(number), what, tests) for number, what, tests in ROW.findall(content)]


def defined_in(content):
    """The names "Suite.Test" that C++ code defines."""
    return {f"{suite}.{name}" for suite, name in TEST.findall(content)}


def numbers_of(test):
    """The cases that a test is named after: Suite.Case12And26Means is of 12 and 26."""
    found = re.match(r"\w+\.Case(\d\d)(?:And(\d\d))?", test)
    return {int(number) for number in found.groups() if number} if found else set()


def faults(content, code):
    """What is wrong with a table, one sentence each; `code`: path of each test source, and what it holds."""
    wrong, table = [], rows(content)
    if [number for number, _, _ in table] != list(NUMBERS):
        wrong.append(f"rows {[number for number, _, _ in table]}, expected each of {NUMBERS} once, in order")
    defined = {path: defined_in(source) for path, source in code.items()}
    in_row = {number: set() for number in NUMBERS}
    for number, _, cell in table:
        named = NAMED.findall(cell)
        if not named and not cell.startswith("not yet: "):
            wrong.append(f"case {number} names no test, and no reason")
        if named and NAMED.sub("", cell).strip(", "):
            wrong.append(f"case {number}: what is {NAMED.sub('', cell).strip(', ')!r} beside its tests?")
        for pattern, path in named:
            found = set(fnmatch.filter(defined.get(path, ()), pattern))
            if not found:
                wrong.append(f"case {number}: {path} has no test {pattern}")
            in_row.setdefault(number, set()).update(found)
        if named and not any(number in numbers_of(test) for test in in_row[number]):
            wrong.append(f"case {number}: none of its tests is named after it")
    for path, tests in sorted(defined.items()):
        for test in sorted(tests):
            for number in numbers_of(test):
                if test not in in_row.get(number, ()):
                    wrong.append(f"{path}: {test} is not in the row of case {number}")
    return wrong


@pytest.fixture(scope="module")
def code():
    return {str(path): text(path) for path in sources("tests", suffixes=(".cpp",))}


def test_the_table_is_that_of_the_tests(code):
    assert (ROOT / TABLE).is_file()
    assert faults(text(TABLE), code) == []


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda table: re.sub(r"^\| 7 \|.*\n", "", table, flags=re.MULTILINE), "expected each of"),
        (lambda table: table.replace("Cases.Case06*", "Cases.Case06Nothing"), "has no test Cases.Case06Nothing"),
        (lambda table: re.sub(r"`CasesOfHooks.Case10\*` \([^ ]*\)", "nothing runs", table), "case 10 names no test"),
        (lambda table: re.sub(r", `CasesOfSums.Case08\*` \([^ ]*\)", "", table), "not in the row of case 8"),
        (lambda table: table.replace("CasesOfSums.Case11*", "CasesOfSums.Case13*"), "none of its tests is named"),
    ],
)
def test_what_is_wrong_is_noticed(code, change, fault):
    table = text(TABLE)
    assert change(table) != table
    assert any(fault in sentence for sentence in faults(change(table), code)), faults(change(table), code)
