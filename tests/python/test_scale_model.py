"""The model of a step on more GPUs and hosts: what it counts, what it fits, what it prints."""

import dataclasses
import json
import math
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import scale_measure  # noqa: E402
import scale_model  # noqa: E402
import scale_report  # noqa: E402
from gpu_rows import SHAPES  # noqa: E402
from scale_model import MODES, Fit, Machine, Measured, Mode, fit, taken_gib, unit_sizes, work  # noqa: E402

SHAPE = SHAPES["4.54b-1"]
MACHINE = Machine(link_gbs=380, copy_us=2, add_gbs=1500)


def measured(fitted, floors=None):
    """What a machine would have measured that does just what `fitted` says."""
    floors = floors or {"4.54b-1": 190.0}
    rows = {}
    for name, floor in floors.items():
        rows[name] = {"floor-fp32": {"ms": floor, "taken_gib": 40.0}}
        for row, mode in MODES.items():
            rows[name][row] = {"ms": fitted.step_ms(floor, work(SHAPES[name], 2, mode), MACHINE), "taken_gib": 50.0}
        rows[name]["ours+adamw"] = {"ms": 220.0, "taken_gib": 50.0}
    return Measured("abc", "2 GPUs", "bench_gpu.py", MACHINE, "beside compute, from traces", rows)


def test_units_are_all_weights_but_the_embedding():
    units = unit_sizes(SHAPE)
    assert len(units) == SHAPE.layers + 2  # the first block in halves
    assert units[0] + units[1] == units[2]
    assert sum(units) == SHAPE.parameters() - SHAPE.vocabulary * SHAPE.dim


def test_two_gpus_copy_half_of_what_there_is():
    job = work(SHAPE, 2)
    rows = SHAPE.tokens() * SHAPE.dim
    assert job.gathered_gb == pytest.approx((sum(unit_sizes(SHAPE)) + rows) * 2 / 2 / 1e9)
    assert job.reduced_gb == pytest.approx(2 * job.gathered_gb)
    assert job.added_gb == 0  # the GEMM adds the own slice onto the peer's
    assert job.own_gb == 0  # a shard lies in its place
    # What a trace of such a step counted: 18 gathers, and for each unit a norm's reduce and a matrix's.
    assert (job.gather_copies, job.reduce_copies) == (18, 36)
    narrow = work(SHAPE, 2, MODES["ours-bf16"])
    assert narrow.reduced_gb == pytest.approx(job.reduced_gb / 2)
    assert narrow.added_gb == pytest.approx(sum(unit_sizes(SHAPE)) / 2 * 6 / 1e9)  # into fp32
    assert work(SHAPE, 2, MODES["ours-slots"]).added_gb == pytest.approx(sum(unit_sizes(SHAPE)) / 2 * 12 / 1e9)


def test_what_is_given_back_is_gathered_again():
    once, twice = work(SHAPE, 2), work(SHAPE, 2, Mode(gathers=2))
    again = sum(unit_sizes(SHAPE)[:-1])  # the head's weights stay
    assert twice.gathered_gb - once.gathered_gb == pytest.approx(again * 2 / 2 / 1e9)
    assert twice.own_gb == pytest.approx((again + sum(unit_sizes(SHAPE))) * 2 / 2 / 1e9)
    assert twice.reduced_gb == once.reduced_gb


def test_more_ranks_copy_more_in_more_pieces_and_add():
    jobs = [work(SHAPE, ranks) for ranks in (1, 2, 4, 8)]
    assert jobs[0].copied_gb == 0 and jobs[0].gather_copies == jobs[0].reduce_copies == 0
    assert [job.gather_copies / jobs[1].gather_copies for job in jobs] == [0, 1, 3, 7]
    assert jobs[3].reduce_copies > 7 * jobs[1].reduce_copies  # large slices come in pieces
    assert jobs[3].copied_gb / jobs[1].copied_gb == pytest.approx((7 / 8) / (1 / 2))
    assert jobs[2].added_gb == pytest.approx(jobs[3].added_gb) and jobs[2].added_gb > 0  # peers' slices and their sum


def test_several_microbatches_are_refused():
    with pytest.raises(ValueError, match="4 microbatches"):
        work(dataclasses.replace(SHAPE, microbatches=4), 2)


@pytest.mark.parametrize("truth", [Fit(0.4, 0.6, 2.0), Fit(0.0, 0.5, 1.0), Fit(0.3, 0.0, 0.0)])
def test_the_fit_finds_what_made_the_times(truth):
    found = fit([observation[2:] for observation in measured(truth).observations()], MACHINE)
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(truth), abs=1e-6)


def test_no_fitted_number_is_below_zero():
    faster = measured(Fit(0.4, 0.6, 2.0))
    for row in faster.rows["4.54b-1"].values():
        row["ms"] = min(row["ms"], 185.0)  # than the floor
    found = fit([observation[2:] for observation in faster.observations()], MACHINE)
    assert min(dataclasses.astuple(found)) >= 0


def test_a_slow_link_shows_once_compute_has_no_room_for_it():
    job = work(SHAPE, 8)
    room = Fit(0, 0, 0).step_ms(190.0, job, MACHINE)
    assert room == pytest.approx(190.0 + MACHINE.link_ms(job.ends_gb))
    slow = dataclasses.replace(MACHINE, link_gbs=38)
    assert Fit(0, 0, 0).step_ms(190.0, job, slow) > 1e3 * job.copied_gb / 38


def test_floors_of_other_shapes_go_by_their_operations():
    known = measured(Fit(0.4, 0.6, 2.0))
    assert known.floor_ms("4.54b-1") == 190.0
    ratio = SHAPES["8.03b"].flops_per_token() / SHAPE.flops_per_token()
    assert known.floor_ms("8.03b") == pytest.approx(190.0 * ratio)


def test_memory_is_that_of_two_with_other_shards():
    assert taken_gib(SHAPE, 2, 50.0) == 50.0
    embedding = SHAPE.vocabulary * SHAPE.dim
    freed = (16 * SHAPE.parameters() + 2 * embedding) * (1 / 2 - 1 / 8) / 2**30
    assert taken_gib(SHAPE, 8, 50.0) == pytest.approx(50.0 - freed + 6 * 32 / 1024)


def ms_between(way, hosts, machine=MACHINE, shape=SHAPE, per_gb=0.0):
    return scale_model.between_hosts_ms(shape, 8, hosts, way, 190.0, machine, Fit(per_gb, 0, 0))


def test_between_hosts_latency_grows_by_the_logarithm_or_by_the_ring():
    wide = dataclasses.replace(MACHINE, nic_gbs=1e9)  # nothing but hops
    quick = dataclasses.replace(wide, hop_us=0, peer_hop_us=0)
    assert ms_between("hybrid", 64, quick) == pytest.approx(0, abs=1e-3)
    assert ms_between("hybrid", 1024, wide) / ms_between("hybrid", 32, wide) == pytest.approx(2)
    assert ms_between("flat", 1024, wide) > 10 * ms_between("hybrid", 1024, wide)


def test_between_hosts_what_backward_hides_costs_nothing_but_its_ends():
    gradient_ms = 1e3 * 4 * sum(unit_sizes(SHAPE)) / 8 / 1e9 / MACHINE.nic_gbs
    assert gradient_ms < 2 / 3 * 190  # it has room
    assert ms_between("parted", 16) < 0.2 * gradient_ms
    assert ms_between("parted", 16, per_gb=0.4) - ms_between("parted", 16) == pytest.approx(
        0.4 * 6 * sum(unit_sizes(SHAPE)) / 8 / 1e9 * 15 / 16)  # fp32 there, bf16 back
    narrow = dataclasses.replace(MACHINE, nic_gbs=MACHINE.nic_gbs / 8)
    assert ms_between("parted", 16, narrow) > gradient_ms
    assert ms_between("parted", 16, narrow) < ms_between("hybrid", 16, narrow)  # bf16 weights come back, not fp32 sums


def test_large_copies_are_the_rate_and_small_ones_what_each_takes():
    copies = [(size, 3.0 + size / 380e3) for size in (40_000_000, 200_000_000)]
    assert scale_measure.link([(8192, 3.0), *copies, (1_000_000, 99.0)]) == pytest.approx((380, 3.0))
    with pytest.raises(ValueError, match="0 copies up to 65536 bytes and 2 from 16777216"):
        scale_measure.link(copies)


def test_copies_are_read_from_a_trace(tmp_path):
    event = {"cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "dur": 5.0, "args": {"bytes": 7}}
    other = event | {"name": "Memcpy DtoD (Device -> Device)"}
    (tmp_path / "trace").write_text(json.dumps({"traceEvents": [event, other, {"name": "x"}]}))
    assert scale_measure.copies_from_peers(tmp_path / "trace") == [(7, 5.0)]


def test_the_report_has_every_table():
    text = scale_report.report(measured(Fit(0.4, 0.6, 2.0)))
    for words in ("## What two GPUs were measured to do", "`ours-slots`", "## One host", "| 8.03b | 8 |", "### 4.54b-1: 18 units",
                  "| 1024 | 8192 |", "## Assumptions"):
        assert words in text
    assert "nan" not in text and max(map(len, text.splitlines())) < 200
    assert all(math.isfinite(float(cell)) for line in text.splitlines() if line.startswith("| 1024") for cell in line.split("|")[1:-1])


def test_the_range_holds_what_is_said_and_grows_with_the_noise(monkeypatch):
    known = measured(Fit(0.4, 0.6, 2.0))
    job = work(SHAPE, 8)
    said = Fit(0.4, 0.6, 2.0).step_ms(190.0, job, MACHINE)
    lowest, highest = scale_report.spread(known, 190.0, job)
    assert lowest < said < highest
    monkeypatch.setattr(scale_report, "NOISE", 0.02)
    assert scale_report.spread(known, 190.0, job)[1] > highest


def test_what_the_bound_held_at_0_is_said():
    assert "No cost of sums shows in these rows" in scale_report.report(measured(Fit(0.4, 0.0, 2.0)))
    assert "No cost of" not in scale_report.report(measured(Fit(0.4, 0.6, 2.0)))


def test_the_page_is_what_the_command_prints():
    """No page without a measurement, and no other than that of the measurement."""
    page = scale_report.report(Measured.read()) if scale_model.MEASURED.exists() else None
    assert page == (scale_model.REPORT.read_text() if scale_model.REPORT.exists() else None)


def test_without_a_measurement_it_says_what_to_run(tmp_path):
    with pytest.raises(SystemExit, match="expected what scale_measure.py writes: run it on a machine with two GPUs"):
        Measured.read(tmp_path / "scale_measured.json")
