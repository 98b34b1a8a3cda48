"""bench_gpu.py: its figures, its choice of rows, and that a row which fails is reported and stops nothing else."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import types

import pytest
from project import ROOT


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules by name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        names = ("bench_gpu", "gpu_figures", "gpu_rows", "gpu_run")
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def line(rank, ms, **more):
    figures = {"host_ms": ms, "allocated_gib": 1.0, "reserved_gib": 2.0, "taken_gib": 3.0, "loss": 1.0,
               "parameters": 0, "tokens": 0}
    return {"row": "ours", "rank": rank, "ms": ms, **figures, **more}


# Figures


def test_parameters_and_flops_of_the_large_shape(bench):
    shape = bench.gpu_rows.SHAPES["4.54b-1"]
    block = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336
    assert shape.matmul_parameters() == 16 * block + 128256 * 4096 == 4_014_997_504
    assert shape.parameters() == 4_014_997_504 + 128256 * 4096 + 33 * 4096 == 4_540_469_248
    assert shape.flops_per_token() == 6 * 4_014_997_504 + 6 * 16 * 4096 * 4096
    assert bench.gpu_rows.SHAPES["4.54b-2"].tokens() == 2 * shape.tokens() == 8192


def test_a_step_lasts_as_long_as_its_slowest_rank(bench):
    shape = bench.gpu_rows.SHAPES["4.54b-1"]
    first = [line(0, [100.0, 1.0]), line(1, [1.0, 300.0], taken_gib=4.5)]
    rounds = [first, [line(0, [200.0, 900.0]), line(1, [2.0, 2.0])]]
    figures = bench.gpu_figures.row_figures(rounds, shape)
    assert figures["ms"] == 250.0  # the middle of 100, 300, 200 and 900
    assert figures["taken_gib"] == 4.5
    assert figures["peak_gib"] == 1.0
    assert (figures["rounds"], figures["steps"]) == (2, 4)
    assert figures["tokens_per_s"] == pytest.approx(2 * 4096 / 0.25)
    assert figures["tflops_per_gpu"] == pytest.approx(105.26964842496 / 0.25)
    assert figures["utilisation"] == pytest.approx(105.26964842496 / 0.25 / 989)


def test_memory_that_one_rank_does_not_know_is_unknown(bench):
    rounds = [[line(0, [1.0], taken_gib=None), line(1, [1.0])]]
    assert bench.gpu_figures.row_figures(rounds, bench.gpu_rows.SHAPES["small"])["taken_gib"] is None


def test_plan_and_profile_are_passed_through(bench):
    rounds = [[line(0, [1.0], plan_gib=2.5, profile={"adds": 5.0}), line(1, [1.0], plan_gib=2.5)]]
    rows = {"ours": bench.gpu_figures.row_figures(rounds, bench.gpu_rows.SHAPES["small"])}
    bench.gpu_figures.add_ratios(rows)
    assert rows["ours"]["profile"] == {"adds": 5.0}
    assert rows["ours"]["taken_to_plan"] == pytest.approx(3.0 / 2.5)
    assert any("adds 5.0" in sentence for sentence in bench.gpu_figures.sentences(rows))


def measured(ms, host=10.0, taken=40.0):
    return {"ms": ms, "host_ms": host, "taken_gib": taken}


def test_ratios_are_to_the_faster_floor_and_the_fastest_fsdp2(bench):
    rows = {
        "floor-bf16": measured(200.0), "floor-fp32": measured(190.0), "plain": measured(195.0),
        "ours": measured(209.0, host=20.0, taken=30.0), "ours-copy": measured(220.0),
        "fsdp2": measured(260.0, host=80.0, taken=60.0), "fsdp2-prefetch1": measured(250.8),
        "fsdp2-bf16": measured(100.0),  # reduces other bytes: never the reference
        "ours+adamw": measured(228.0, taken=50.0), "fsdp2+adamw": measured(285.0, taken=100.0),
        "ours-nccl": {"error": "rank 1: exit code 1"},
    }
    bench.gpu_figures.add_ratios(rows)
    assert rows["ours"]["to_floor"] == pytest.approx(1.1)
    assert rows["ours"]["over_fsdp2"] == pytest.approx(1.2)
    assert rows["ours"]["host_to_fsdp2"] == pytest.approx(0.25)
    assert rows["ours"]["taken_to_fsdp2"] == pytest.approx(0.5)
    assert rows["ours+adamw"]["to_floor"] == pytest.approx(1.2)
    assert rows["ours+adamw"]["over_fsdp2"] == pytest.approx(1.25)
    assert rows["ours+adamw"]["taken_to_fsdp2"] == pytest.approx(0.5)
    assert rows["floor-fp32"]["to_floor"] == 1.0
    assert rows["floor-fp32"]["to_plain"] == pytest.approx(190 / 195)
    assert rows["ours-nccl"] == {"error": "rank 1: exit code 1"}
    said = "\n".join(bench.gpu_figures.sentences(rows))
    assert "saves 11.00 ms, 5.0%" in said
    assert "floor-fp32, 0.974 of plain" in said
    assert "fsdp2-prefetch1 was the fastest" in said


def test_ratios_to_what_was_not_measured_are_none(bench):
    rows = {"ours": measured(209.0), "floor-bf16": measured(1.0), "fsdp2+adamw": measured(1.0)}
    bench.gpu_figures.add_ratios(rows)
    assert rows["ours"]["over_fsdp2"] is None
    assert rows["ours"]["host_to_fsdp2"] is None
    assert rows["floor-bf16"]["to_plain"] is None
    assert "-" in bench.gpu_figures.table(rows)[1]


# Choice of rows


def test_a_rows_name_stands_for_both_of_its_variants(bench):
    select = bench.gpu_rows.select_rows
    assert select(["ours", "fsdp2+adamw"]) == ["ours", "ours+adamw", "fsdp2+adamw"]
    assert select(["ours", "plain"], optimizer=True) == ["plain", "ours+adamw"]
    assert select(["ours", "plain"], optimizer=False) == ["plain", "ours"]
    assert [name for name in select([], optimizer=False) if "prefetch" in name] == ["fsdp2-prefetch1"]
    with pytest.raises(ValueError, match="row theirs: not one of floor-bf16"):
        select(["theirs"])


def test_the_large_shape_stands_for_both_batches(bench):
    assert bench.gpu_rows.select_shapes(["4.54b"]) == ["4.54b-1", "4.54b-2"]
    with pytest.raises(ValueError, match="shape 8b"):
        bench.gpu_rows.select_shapes(["8b"])


def test_children_get_no_multicast_and_only_their_own_allocator_settings(bench, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    environment = bench.gpu_run.child_environment()
    assert "PYTORCH_ALLOC_CONF" not in environment
    assert (environment["NCCL_NVLS_ENABLE"], environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
    expandable = bench.gpu_run.child_environment(bench.gpu_rows.ROWS["fsdp2-expandable"].environment)
    assert expandable["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


# Rounds


def rounds_of(bench, rows, rounds, seconds_of, budget_s=float("inf"), failing=()):
    """Runs rounds against a clock that each row moves on; (measurements, rows that were started)."""
    now, started = [0.0], []

    def run_row(shape, row):
        started.append(row)
        now[0] += seconds_of(row)
        if row in failing:
            raise bench.gpu_run.RowFailed("rank 1: exit code 3\nno such thing")
        return [line(0, [1.0]), line(1, [2.0])]

    measurements, written = bench.bench_gpu.Measurements(), []
    options = types.SimpleNamespace(rounds=rounds, shapes=["small"], rows=rows, budget_s=budget_s)
    bench.bench_gpu.run_rounds(measurements, options, run_row, written.append, clock=lambda: now[0])
    assert written == list(range(1, rounds + 1))
    return measurements, started


def test_rounds_are_interleaved(bench):
    measurements, started = rounds_of(bench, ["ours", "fsdp2"], 2, lambda row: 1)
    assert started == ["ours", "fsdp2", "ours", "fsdp2"]
    assert len(measurements.rounds["small", "ours"]) == 2
    assert measurements.left_out == []


def test_a_row_that_would_end_after_the_budget_is_left_out_and_named(bench):
    measurements, started = rounds_of(
        bench, ["ours", "fsdp2", "plain"], 2, lambda row: 40 if row == "fsdp2" else 10, budget_s=85
    )
    # 60 s are used after the first round. In the second one there is no time for fsdp2, but for plain.
    assert started == ["ours", "fsdp2", "plain", "ours", "plain"]
    assert measurements.left_out == [(2, "small", "fsdp2")]
    assert bench.bench_gpu.left_out_lines(measurements.left_out) == ["left out, no time: round 2, small: fsdp2"]


def test_nothing_starts_when_the_budget_is_used_up(bench):
    measurements, started = rounds_of(bench, ["ours", "fsdp2"], 2, lambda row: 50, budget_s=50)
    assert started == ["ours"]
    assert [entry[0::2] for entry in measurements.left_out] == [(1, "fsdp2"), (2, "ours"), (2, "fsdp2")]


def test_a_failed_row_is_not_started_again(bench):
    measurements, started = rounds_of(bench, ["ours", "fsdp2"], 2, lambda row: 1, failing=["ours"])
    assert started == ["ours", "fsdp2", "fsdp2"]
    assert "no such thing" in measurements.errors["small", "ours"]


# Whole runs, with a script instead of the programs

FAKE = """
import json, os, sys, time
argument = lambda name: sys.argv[sys.argv.index("--" + name) + 1]
row, rank, steps = argument("row"), int(os.environ["RANK"]), int(argument("steps"))
if row == "ours-copy" and rank == 1:
    sys.exit("no peer access\\nbetween these devices")
if row == "ours-copy":
    time.sleep(600)
if row == "ours-graph":
    print("nothing to say")
    sys.exit(0)
ms = {"floor": 10.0, "ours": 11.0, "plain": 10.0, "fsdp2": 13.2}.get(row, 12.0) + rank
parameters = 336118784 if row != "ours-nccl" else 5
print("a library prints what it likes")
print(json.dumps({"row": row, "rank": rank, "ms": [ms] * steps, "host_ms": [ms / 2] * steps, "allocated_gib": 1.0,
    "reserved_gib": 1.5, "taken_gib": 2.0, "loss": 10.4, "parameters": parameters,
    "tokens": int(argument("batch")) * int(argument("sequence"))}))
"""


@pytest.fixture
def fake_programs(tmp_path):
    script = tmp_path / "row.py"
    script.write_text(textwrap.dedent(FAKE))
    return {"ours": [sys.executable, script], "peer": [sys.executable, script]}


def run_main(bench, tmp_path, programs, *arguments):
    """(exit code, what was written)"""
    out = tmp_path / "results" / "bench-gpu.json"
    code = bench.bench_gpu.main(["--steps", "2", "--out", str(out), "--commit", "abc", *arguments], programs)
    return code, json.loads(out.read_text())


def test_rows_are_measured_and_compared(bench, tmp_path, fake_programs, capsys):
    code, written = run_main(bench, tmp_path, fake_programs, "--shapes", "small", "--without-optimizer",
                             "--rows", "floor-bf16,plain,ours,fsdp2", "--rounds", "2")
    assert code == 0
    assert written["commit"] == "abc"
    rows = written["shapes"]["small"]
    assert list(rows) == ["floor-bf16", "plain", "ours", "fsdp2"]
    assert rows["ours"]["ms"] == 12.0  # of rank 1, the slower one
    assert rows["ours"]["to_floor"] == pytest.approx(12 / 11)
    assert rows["ours"]["over_fsdp2"] == pytest.approx(14.2 / 12)
    assert (rows["ours"]["rounds"], rows["ours"]["steps"]) == (2, 4)
    assert written["runs"]["small"]["finished_rounds"] == 2
    assert "floor: floor-bf16, 1.000 of plain PyTorch's ms" in capsys.readouterr().out


def test_rows_that_fail_are_reported_and_stop_no_other(bench, tmp_path, fake_programs, capsys):
    code, written = run_main(bench, tmp_path, fake_programs, "--shapes", "small", "--without-optimizer",
                             "--rows", "ours-copy,ours-nccl,ours-graph,fsdp2", "--rounds", "1")
    rows = written["shapes"]["small"]
    assert code == 1
    assert rows["fsdp2"]["ms"] == pytest.approx(14.2)
    assert "rank 1: exit code 1" in rows["ours-copy"]["error"]
    assert rows["ours-copy"]["error"].endswith("no peer access\nbetween these devices")
    assert rows["ours-nccl"]["error"] == "rank 0: parameters = 5, expected 336118784"
    assert rows["ours-graph"]["error"] == "rank 0 printed no line of JSON\nnothing to say"
    assert "between these devices" in capsys.readouterr().out


def test_a_program_that_is_not_built_is_a_failed_row(bench, tmp_path, fake_programs):
    programs = fake_programs | {"ours": [tmp_path / "bench_gpu"]}
    code, written = run_main(bench, tmp_path, programs, "--shapes", "small", "--rows", "ours,plain", "--rounds", "1")
    assert code == 1
    assert "does not start: No such file" in written["shapes"]["small"]["ours"]["error"]
    assert written["shapes"]["small"]["plain"]["ms"] == 11.0


def test_a_row_that_hangs_is_ended(bench, tmp_path, fake_programs, monkeypatch):
    """Both of its processes: each would go on to hold its GPU."""
    started = []

    class Recorded(subprocess.Popen):
        def __init__(self, command, *arguments, **options):
            super().__init__(command, *arguments, **options)
            started.append((command, self.pid))

    monkeypatch.setattr(bench.gpu_run.subprocess, "Popen", Recorded)
    script = pathlib.Path(fake_programs["ours"][1])
    script.write_text("import time\ntime.sleep(600)\n")
    code, written = run_main(bench, tmp_path, fake_programs, "--shapes", "small", "--rows", "plain",
                             "--row-timeout-s", "0.3")
    assert code == 1
    assert written["shapes"]["small"]["plain"]["error"] == "rank [0, 1] still ran after 0.3 s"
    ranks = [pid for command, pid in started if str(script) in command]
    assert len(ranks) == 2
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_merging_keeps_the_shapes_of_earlier_runs(bench, tmp_path, fake_programs):
    out = tmp_path / "results" / "bench-gpu.json"
    out.parent.mkdir()
    out.write_text(json.dumps({"shapes": {"4.54b-1": {"ours": {"ms": 1.0}}, "small": {}}, "runs": {"4.54b-1": {}}}))
    _, written = run_main(bench, tmp_path, fake_programs, "--shapes", "small", "--rows", "plain", "--rounds", "1",
                          "--merge")
    assert written["shapes"]["4.54b-1"] == {"ours": {"ms": 1.0}}
    assert written["shapes"]["small"]["plain"]["ms"] == 11.0
    assert set(written["runs"]) == {"4.54b-1", "small"}


@pytest.mark.parametrize("row", ["plain", "fsdp2+adamw"])
def test_the_peer_trains_on_cpu_ranks(bench, tmp_path, row):
    """The real script keeps to the line's contract; gloo in place of NCCL, a model of a few thousand weights."""
    shape = bench.gpu_rows.Shape(layers=2, dim=32, ffn=48, heads=4, kv_heads=2, vocabulary=64, sequence=16, batch=2)
    peer = [*bench.gpu_run.default_programs(ROOT, "release")["peer"], "--device", "cpu"]
    options = types.SimpleNamespace(gpus=2, steps=2, warm_seconds=0.05, row_timeout_s=120)
    lines = bench.gpu_run.run_row(bench.gpu_rows.ROWS[row], shape, {"peer": peer}, options, tmp_path / row)
    assert [line["rank"] for line in lines] == [0, 1]
    assert lines[0]["loss"] != lines[1]["loss"]  # each rank has tokens of its own
    assert all(0 < line["loss"] < 4.5 for line in lines)  # ln 64 = 4.16 at the start
