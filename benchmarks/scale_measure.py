#!/usr/bin/env python3
"""Measures on two GPUs what scale_model.py needs, into benchmarks/scale_measured.json.

    .venv/bin/python benchmarks/scale_measure.py --rounds 4 --commit $(git rev-parse --short HEAD)

Runs bench_gpu.py for the rows of which the model knows what they copy and add, then two of them once more with a trace: the rate
of copies from the peer is that of the trace's large ones, and what a copy takes beside its bytes is the time of a small one; the
rate of the sum of ranks is its bytes over its kernels' time.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import gpu_profile
import gpu_run
from gpu_rows import ADAMW, ROWS, SHAPES
from scale_model import MEASURED, MODES, work

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPE = "4.54b-1"
WITH_STATE = "ours" + ADAMW  # for its memory
GPUS = 2
SMALL, LARGE = 1 << 16, 1 << 24  # bytes: of a few norms, and of a matrix


def copies_from_peers(path):
    """(bytes, microseconds) of each copy between devices in a trace."""
    events = json.loads(pathlib.Path(path).read_text())["traceEvents"]
    return [(e["args"]["bytes"], e["dur"]) for e in events if e.get("cat") == "gpu_memcpy" and "PtoP" in e["name"]]


def link(copies):
    """(GB/s of large copies beside what each takes, microseconds of a small one). Throws ValueError without both."""
    small = [us for size, us in copies if size <= SMALL]
    large = [(size, us) for size, us in copies if size >= LARGE]
    if not small or not large:
        raise ValueError(f"{len(small)} copies up to {SMALL} bytes and {len(large)} from {LARGE}; expected some of both")
    start = statistics.median(small)
    return sum(size for size, _ in large) / sum(us - start for _, us in large) / 1e3, start


def traced(row, options, folder):
    """The path of rank 0's trace of `row`."""
    shape, path = SHAPES[SHAPE], folder / f"{row}.trace"
    command = [*gpu_run.default_programs(ROOT, options.preset)["ours"], *ROWS[row].command_arguments(), *shape.arguments(),
               "--warm-seconds", "1", "--steps", "2", "--trace", path]
    environment = gpu_run.child_environment() | {"LD_LIBRARY_PATH": gpu_run.library_path()}
    gpu_run.run_ranks(command, GPUS, environment, folder / row, timeout_s=120)
    return f"{path}.0"


def measure(asked, options, out):
    """What bench_gpu.py writes into `out`. Throws CalledProcessError when a row failed."""
    command = [sys.executable, ROOT / "benchmarks" / "bench_gpu.py", "--preset", options.preset, "--commit", options.commit, "--out", out, *asked]
    subprocess.run(list(map(str, command)), check=True)
    return json.loads(out.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="release")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-seconds", type=float, default=1.0)
    parser.add_argument("--commit", required=True, help="what is measured")
    parser.add_argument("--out", type=pathlib.Path, default=MEASURED)
    options = parser.parse_args()
    folder = ROOT / "build" / "results" / "scale"
    folder.mkdir(parents=True, exist_ok=True)
    asked = ["--gpus", GPUS, "--steps", options.steps, "--warm-seconds", options.warm_seconds, "--shapes", SHAPE]
    rows = ["floor-fp32", *MODES]
    asked_of_rows = [*asked, "--rounds", options.rounds, "--rows", ",".join("=" + row for row in rows)]
    found = measure(asked_of_rows, options, folder / "bench-gpu.json")
    found_with_state = measure([*asked, "--rounds", 1, "--rows", "=" + WITH_STATE], options, folder / "bench-gpu-adamw.json")
    measured = found["shapes"][SHAPE] | found_with_state["shapes"][SHAPE]
    gbs, copy_us = link(copies_from_peers(traced("ours", options, folder)))
    sums_ms = gpu_profile.figures(traced("ours-slots", options, folder))["other lanes: sum of ranks"]
    rows = {name: {figure: round(row[figure], 3) for figure in ("ms", "taken_gib")} for name, row in measured.items()}
    content = {
        "commit": options.commit,
        "gpu": f"{GPUS} {found['machine']['gpus'][0]['name']}",
        "command": "bench_gpu.py " + " ".join(map(str, asked_of_rows)),
        "machine": {
            "link_gbs": round(gbs, 1),
            "copy_us": round(copy_us, 2),
            "add_gbs": round(1e3 * work(SHAPES[SHAPE], GPUS, MODES["ours-slots"]).added_gb / sums_ms, 1),
        },
        "machine_from": "beside compute, from traces",
        "rows": {SHAPE: rows},
    }
    options.out.write_text(json.dumps(content, indent=2) + "\n")
    print(options.out.read_text())


if __name__ == "__main__":
    main()
