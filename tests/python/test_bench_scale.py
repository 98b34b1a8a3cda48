"""bench_scale.py: the rows it asks for, the table, and what it refuses."""

import json
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_gpu  # noqa: E402
import bench_scale  # noqa: E402
from gpu_rows import ROWS, SHAPES, select_rows  # noqa: E402
from scale_model import Fit, Machine, work  # noqa: E402

MACHINE = Machine(link_gbs=380, copy_us=2, add_gbs=1500)


def figures(ms):
    return {"ms": ms, "tokens_per_s": 1e5 / ms, "taken_gib": 40.0}


class Measure:
    """Stands for bench_gpu.py: a row takes 100 ms and one more for each GPU."""

    def __init__(self, missing=()):
        self.asked, self.missing = [], missing

    def __call__(self, arguments):
        bench_gpu.parse_arguments(arguments)  # it knows them
        options = dict(zip(arguments[::2], arguments[1::2], strict=True))
        self.asked.append(options)
        rows = {name.removeprefix("="): figures(100.0 + int(options["--gpus"])) for name in options["--rows"].split(",")}
        rows |= {name: {"error": "no room"} for name in self.missing}
        shapes = {shape: rows for shape in options["--shapes"].split(",")}
        with open(options["--out"], "w") as file:
            json.dump({"shapes": shapes}, file)
        return 1 if self.missing else 0


def run(tmp_path, *arguments, measure=None, there=8):
    return bench_scale.main(["--out", str(tmp_path / "scale.json"), *arguments], measure or Measure(), lambda: there)


@pytest.mark.parametrize(("there", "expected"), [(2, [2]), (5, [2, 4]), (8, [2, 4, 8])])
def test_as_many_as_there_are(tmp_path, there, expected):
    measure = Measure()
    assert run(tmp_path, measure=measure, there=there) == 0
    assert [int(options["--gpus"]) for options in measure.asked] == expected
    written = json.loads((tmp_path / "scale.json").read_text())
    assert set(written) == {"4.54b-1", "8.03b"} and set(written["8.03b"]) == {str(count) for count in expected}


def test_replicas_only_where_they_can_be(tmp_path):
    measure = Measure()
    run(tmp_path, measure=measure)
    asked = [options["--rows"] for options in measure.asked]
    assert "hybrid" not in asked[0] and "hybrid" in asked[1] and asked[1] == asked[2]
    for rows in asked:  # each once, without its row with AdamW
        assert select_rows(rows.split(",")) == [row for row in ROWS if "=" + row in rows.split(",")]


@pytest.mark.parametrize("arguments", [["--gpus", "1"], ["--gpus", "16"], ["--gpus", "two"]])
def test_what_it_refuses(tmp_path, arguments, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, *arguments)
    assert "--gpus" in capsys.readouterr().err


def test_a_machine_of_one(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, there=1)
    assert "this machine has 1" in capsys.readouterr().err


def test_the_table(tmp_path, capsys):
    run(tmp_path, "--gpus", "2,8", "--shapes", "4.54b-1")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("ours ")]
    assert [line[:4] for line in lines] == [["ours", "2", "102.0", "1.000"], ["ours", "8", "108.0", "0.944"]]


def test_predictions_stand_beside_ours():
    shape, fitted = SHAPES["4.54b-1"], Fit(0.4, 0.6, 2.0)
    said = fitted.step_ms(190.0, work(shape, 4), MACHINE)
    rows = {"ours": figures(1.1 * said), "floor-fp32": figures(190.0)}
    cells = {line[0]: line for line in bench_scale.lines_of(shape, {4: rows}, fitted, MACHINE)}
    assert cells["ours"][-2:] == [f"{said:.1f}", "1.100"] and cells["floor-fp32"][-2:] == ["", ""]


def test_a_row_that_fails_is_left_out_and_told(tmp_path, capsys):
    assert run(tmp_path, "--gpus", "2", measure=Measure(missing=["ours"])) == 1
    printed = capsys.readouterr().out
    assert "ours+adamw" in printed and not any(line.startswith("ours ") for line in printed.splitlines())
