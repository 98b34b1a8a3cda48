"""The pictures in docs/schedule are what the lanes are given now; and the tool that draws them."""

import copy
import json
import os
import subprocess
import sys

import pytest
from train_program import ROOT, environment

PROGRAM = ROOT / "build" / os.environ.get("FSDPP_PRESET", "release") / "tests/dist/schedule_trace"
PICTURES = ROOT / "docs" / "schedule"
TIMEOUT_S = 120  # a second's work: the machine may be busy


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """The folder of traces that the program writes."""
    assert PROGRAM.exists(), f"{PROGRAM} is not built: make build, or tools/build.sh PRESET schedule_trace"
    folder = tmp_path_factory.mktemp("traces")
    subprocess.run([PROGRAM, folder], env=environment(), check=True, timeout=TIMEOUT_S)
    return folder


@pytest.fixture(scope="module")
def tool():
    """The modules that draw."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import draw_schedule

        yield draw_schedule
    finally:
        sys.path.remove(str(ROOT / "tools"))


def read(folder):
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def test_the_pictures_are_of_the_schedule_as_it_is(traces, tmp_path):
    command = [sys.executable, ROOT / "tools/draw_schedule.py", traces, tmp_path]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    kept = {path.name: path.read_text() for path in PICTURES.glob("*.svg")}
    assert len(drawn) == 6
    stale = sorted(name for name in drawn | kept if drawn.get(name) != kept.get(name))
    assert not stale, f"docs/schedule shows another schedule than this one: look at what `make schedule` draws: {stale}"


def test_every_picture_is_shown_and_named_on_the_page():
    page = (ROOT / "docs/schedule.md").read_text()
    missing = [path.name for path in PICTURES.glob("*.svg") if f"(schedule/{path.name})" not in page]
    assert missing == []
    assert "make schedule" in page


def test_a_schedule_without_one_of_its_waits_is_drawn_differently(traces, tool):
    waits = 0
    for name, trace in read(traces).items():
        whole = tool.svg(trace)
        signalled = {(o["channel"], o["sequence"]) for o in trace["operations"] if o["kind"] == "signal"}
        for index, operation in enumerate(trace["operations"]):
            inside = "event" in operation or (operation.get("channel"), operation.get("sequence")) in signalled
            if operation["kind"] not in ("wait", "wait_signal") or not inside:
                continue  # what it waits for was over before the step
            waits += 1
            without = dict(trace, marks=copy.deepcopy(trace["marks"]))
            without["operations"] = [*trace["operations"][:index], operation | {"kind": "move"},
                                     *trace["operations"][index + 1:]]
            assert tool.svg(without) != whole, f"{name}: {operation}"
    assert waits > 300


def test_a_schedule_in_another_order_is_drawn_differently(traces, tool):
    for name, trace in read(traces).items():
        other = copy.deepcopy(trace)
        reduces = [o for o in other["operations"] if o["lane"] == "reduce" and o["name"].startswith("reduce block")]
        reduces[0]["name"], reduces[-1]["name"] = reduces[-1]["name"], reduces[0]["name"]
        assert tool.svg(other) != tool.svg(trace), name


# When operations run, by schedules of a few lines


def operation(lane, position, kind, name="", **more):
    return {"lane": lane, "position": position, "kind": kind, "name": name} | more


def boxes(tool, *operations):
    """[(name, start, end)] in the order of issue."""
    trace = {"units": ["root", "block0"], "marks": [], "operations": operations}
    return [(box.names[0], box.start, box.end) for box in tool.Timeline(trace).boxes]


def test_lanes_run_side_by_side_until_one_waits(tool):
    assert boxes(
        tool,
        operation("gather", 1, "copy", "gather block0"),
        operation("gather", 2, "record", event={"lane": "gather", "position": 2}),
        operation("compute", 1, "run", "wgrad first.weight"),
        operation("compute", 2, "wait", event={"lane": "gather", "position": 2}),
        operation("compute", 3, "run", "forward block0"),
        operation("gather", 3, "copy", "gather root"),
    ) == [("gather block0", 0, 3), ("wgrad first.weight", 0, 2), ("forward block0", 3, 7), ("gather root", 3, 6)]


def test_a_peers_signal_comes_with_this_ranks_own(tool):
    schedule = [
        operation("compute", 1, "run", "wgrad block0.weight"),
        operation("compute", 2, "signal", "ready block0", channel=1, sequence=4),
        operation("reduce", 1, "wait_signal", "ready block0", channel=1, sequence=4, peer=1),
        operation("reduce", 2, "run", "reduce block0"),
    ]
    assert boxes(tool, *schedule)[1] == ("reduce block0", 2, 5)
    with pytest.raises(ValueError, match="reduce #1 waits for ready block0, signalled only later"):
        boxes(tool, *reversed(schedule[1:3]))


def test_the_host_is_not_ahead_of_the_compute_lane(tool):
    done = operation("compute", 2, "run", "done with block0")
    gather = operation("gather", 1, "copy", "gather root")
    forward = [operation("compute", 1, "run", "forward block0"), operation("compute", 3, "run", "forward root")]
    assert boxes(tool, forward[0], gather, done, forward[1])[1] == ("gather root", 0, 3)
    assert boxes(tool, forward[0], done, gather, forward[1])[1] == ("gather root", 4, 7)


def test_what_the_host_waits_for_holds_up_what_it_gives_out_later(tool):
    assert boxes(
        tool,
        operation("compute", 1, "run", "forward block0"),
        operation("host", 1, "wait", event={"lane": "compute", "position": 1}),
        operation("gather", 1, "copy", "gather root"),
    )[1] == ("gather root", 4, 7)


def test_pieces_of_one_reduce_are_one_box(tool):
    assert boxes(
        tool,
        operation("reduce", 1, "run", "reduce block0"),
        operation("reduce", 2, "run", "reduce block0"),
        operation("reduce", 3, "signal", "pulled block0", channel=1, sequence=1),
        operation("reduce", 4, "run", "reduce block0 of replicas"),
    ) == [("reduce block0", 0, 3), ("reduce block0 of replicas", 3, 5)]
