#!/usr/bin/env python3
"""Our step on GPUs beside the compute floor, FSDP2 and plain PyTorch: one Llama, the same shapes and maths.

    make bench-gpu                                       every shape and row: about an hour
    .venv/bin/python benchmarks/bench_gpu.py --shapes 4.54b-1 --rows floor-bf16,floor-fp32,ours,fsdp2

Every row is one new process per GPU (ours: build/PRESET/benchmarks/bench_gpu; PyTorch's: peers/fsdp2_gpu.py) that warms
up for some seconds and times its steps with CUDA events. A round runs every row once; rows of all rounds are
interleaved, so ratios compare what ran under the same conditions. A step's time is its slowest rank's; figures are
medians over all steps of all rounds; memory is the largest seen.

to floor    ms over the faster of floor-bf16 and floor-fp32 (dtype of the weight gradients): no sharding, no
            communication, one process per GPU so that both draw power. Rows with AdamW are held against it too.
over FSDP2  FSDP2's ms over the row's: fp32 reduce, eager, both with or both without AdamW
taken GiB   all memory of the device in use as the driver says (total - free): context, communicator, allocator
torch GiB   the most that torch's allocator had handed out
TFLOP/s     of one GPU: (6 * weights in products + 6 * layers * sequence * dim) * tokens / time; MFU: over 989

Prints the table and writes build/results/bench-gpu.json, also after every round. The exit code is 1 when a row failed.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import gpu_figures
import gpu_run
from gpu_rows import ROWS, SHAPES, select_rows, select_shapes

ROOT = pathlib.Path(__file__).resolve().parent.parent
IDLE_MIB = 1024  # more than this in use before the first row: somebody else is on the device


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def names(text):
        return [name for name in text.split(",") if name]

    parser.add_argument("--preset", default="release")
    parser.add_argument("--shapes", type=names, default=[], help=f"of 4.54b,{','.join(SHAPES)}; default: all")
    parser.add_argument("--rows", type=names, default=[], help=f"of {','.join(ROWS)}; =NAME: without its row with AdamW; default: all but those asked for by name")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--with-optimizer", dest="optimizer", action="store_true", default=None,
                      help="of rows that exist with and without AdamW only those with")
    only.add_argument("--without-optimizer", dest="optimizer", action="store_false", help="only those without")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a row in a round")
    parser.add_argument("--warm-seconds", type=float, default=3.0)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="no row is started that would end later")
    parser.add_argument("--row-timeout-s", type=float, default=300.0)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "results" / "bench-gpu.json")
    parser.add_argument("--merge", action="store_true", help="keep shapes of --out that this run does not measure")
    parser.add_argument("--commit", help="what was measured, where this is no git checkout")
    parsed = parser.parse_args(arguments)
    try:
        parsed.shapes = select_shapes(parsed.shapes)
        parsed.rows = select_rows(parsed.rows, parsed.optimizer)
    except ValueError as error:
        parser.error(str(error))
    for name in ("rounds", "steps", "gpus"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name} {getattr(parsed, name)}: at least 1")
    return parsed


@dataclasses.dataclass
class Measurements:
    """What the rounds brought. Keys are (shape, row)."""

    rounds: dict = dataclasses.field(default_factory=dict)  # -> per round the lines of the ranks
    errors: dict = dataclasses.field(default_factory=dict)  # -> why it failed; then it is not started again
    left_out: list = dataclasses.field(default_factory=list)  # (round, shape, row) for which no time was left
    seconds: dict = dataclasses.field(default_factory=dict)  # -> of its last run


def run_rounds(measurements, options, run_row, after_round, clock=time.monotonic):
    """Runs every row of every shape once per round. `run_row(shape, row)` returns lines or throws RowFailed."""
    begin = clock()
    for number in range(1, options.rounds + 1):
        for shape in options.shapes:
            for row in options.rows:
                key = (shape, row)
                if key in measurements.errors:
                    continue
                used = clock() - begin
                if used >= options.budget_s or used + measurements.seconds.get(key, 0) > options.budget_s:
                    measurements.left_out.append((number, shape, row))
                    continue
                started = clock()
                try:
                    lines = run_row(shape, row)
                    measurements.rounds.setdefault(key, []).append(lines)
                    median = gpu_figures.row_figures([lines], SHAPES[shape])["ms"]
                    outcome = f"{median:10.2f} ms"
                except gpu_run.RowFailed as error:
                    measurements.errors[key] = str(error)
                    outcome = f"failed: {error}"
                measurements.seconds[key] = clock() - started
                took = f"({measurements.seconds[key]:.0f} s)"
                print(f"round {number}  {shape:8}  {row:24}{outcome}   {took}", flush=True)
        after_round(number)


def shape_rows(measurements, shape, names):
    """Figures with ratios of one shape's rows, those that failed with their error; in the order of `names`."""
    rows = {}
    for name in names:
        key = (shape, name)
        row = {}
        if key in measurements.rounds:
            row |= gpu_figures.row_figures(measurements.rounds[key], SHAPES[shape])
        if key in measurements.errors:
            row["error"] = measurements.errors[key]
        if row:
            rows[name] = row
    return gpu_figures.add_ratios(rows)


def ask(command):
    """Standard output of a command, "" when it cannot be had."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine():
    """The GPUs before the first row."""
    listing = ask(["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used",
                   "--format=csv,noheader,nounits"])
    gpus = [dict(zip(("name", "driver", "total_mib", "idle_used_mib"), line.split(", "), strict=True))
            for line in listing.splitlines()]
    for index, gpu in enumerate(gpus):
        if gpu["idle_used_mib"].isdigit() and int(gpu["idle_used_mib"]) > IDLE_MIB:
            print(f"bench-gpu: {gpu['idle_used_mib']} MiB of GPU {index} are in use already: its memory figures "
                  "include them and its times are disturbed", file=sys.stderr)
    return {"gpus": gpus, "cores": os.cpu_count()}


def describe(options):
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    commit = options.commit or ask(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]) or None
    return {"machine": machine(), "commit": commit, "torch": torch}


def results(measurements, options, description, finished_rounds):
    """What is written: shapes of this run and, with --merge, what the file held for others."""
    earlier = json.loads(options.out.read_text()) if options.merge and options.out.exists() else {}
    shapes = {shape: rows for shape in options.shapes if (rows := shape_rows(measurements, shape, options.rows))}
    run = description | {
        "finished_rounds": finished_rounds, "rounds": options.rounds, "steps": options.steps,
        "warm_seconds": options.warm_seconds, "gpus": options.gpus,
    }
    runs = {shape: run | {"left_out": [[number, row] for number, of, row in measurements.left_out if of == shape]}
            for shape in shapes}
    return description | {"shapes": earlier.get("shapes", {}) | shapes, "runs": earlier.get("runs", {}) | runs}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(content, indent=2) + "\n")
    beside.replace(path)


def left_out_lines(left_out):
    """One line per round and shape that the budget cut short."""
    groups = {}
    for number, shape, row in left_out:
        groups.setdefault((number, shape), []).append(row)
    return [f"left out, no time: round {number}, {shape}: {', '.join(rows)}"
            for (number, shape), rows in groups.items()]


def print_all(measurements, options):
    for shape in options.shapes:
        rows = shape_rows(measurements, shape, options.rows)
        if not rows:
            continue
        print(f"\n{shape}, {SHAPES[shape].parameters() / 1e9:.2f}B parameters, {SHAPES[shape].batch} x "
              f"{SHAPES[shape].sequence} tokens per GPU, {options.gpus} GPUs")
        print("\n".join(gpu_figures.table(rows)))
        print("\n".join(f"  {sentence}" for sentence in gpu_figures.sentences(rows)))
    for (shape, row), error in measurements.errors.items():
        print(f"\nfailed: {row} of {shape}: {error}")
    print("\n".join(left_out_lines(measurements.left_out)), flush=True)


def main(arguments=None, programs=None):
    options = parse_arguments(arguments)
    programs = programs or gpu_run.default_programs(ROOT, options.preset)
    logs = options.out.parent / "bench-gpu"
    description = describe(options)
    measurements = Measurements()
    finished = 0

    def run_row(shape, row):
        return gpu_run.run_row(ROWS[row], SHAPES[shape], programs, options, logs / f"{shape}-{row}")

    def after_round(number):
        nonlocal finished
        finished = number
        write(options.out, results(measurements, options, description, finished))

    try:
        run_rounds(measurements, options, run_row, after_round)
    finally:
        write(options.out, results(measurements, options, description, finished))
        print_all(measurements, options)
    return 1 if measurements.errors or not measurements.rounds else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the `finally`s: rows end, results are kept
    sys.exit(main())
