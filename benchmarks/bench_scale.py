#!/usr/bin/env python3
"""Our step as GPUs of one host grow, beside the floor, FSDP2 and what scale_model.py predicts.

    make bench-scale                                              on 2, 4 and 8 GPUs, as far as this machine has them
    .venv/bin/python benchmarks/bench_scale.py --gpus 2,4 --shapes 4.54b-1

Every GPU gets the same tokens (weak scaling). Runs bench_gpu.py once per number of GPUs; rows of one number are interleaved.

kept        ms on the fewest GPUs over ms on so many: 1 when a step takes as long on more
predicted   of `ours`: the model fitted to two GPUs (scale_measured.json), on the floor that these GPUs had; apart: measured over it
taken GiB   all memory of one GPU in use

Prints a table per shape and writes build/results/bench-scale.json. The exit code is 1 when a row failed.
"""

import argparse
import json
import pathlib
import sys

import bench_gpu
from gpu_rows import ADAMW, SHAPES
from scale_model import MEASURED, Measured, fit, work

ROOT = pathlib.Path(__file__).resolve().parent.parent
COUNTS = (2, 4, 8)
FLOOR = "floor-fp32"
PREDICTED = "ours"
ROWS = ("floor-bf16", FLOOR, "ours", "fsdp2-prefetch1", "ours" + ADAMW, "fsdp2-prefetch1" + ADAMW)
HYBRID = ("ours-hybrid", "ours-hybrid-parted", "fsdp2-hybrid")  # two replicas, from so many GPUs on:
HYBRID_FROM = 4


def rows_on(gpus):
    return [*ROWS, *(HYBRID if gpus >= HYBRID_FROM else ())]


def lines_of(shape, by_count, fitted=None, machine=None):
    """Cells of the table's lines. `by_count`: GPUs -> row -> figures of bench_gpu.py."""
    lines = []
    for row in rows_on(max(by_count)):
        fewest = None
        for gpus, rows in sorted(by_count.items()):
            if "ms" not in rows.get(row, {}):
                continue
            figures = rows[row]
            fewest = fewest or figures["ms"]
            cells = [row, gpus, f"{figures['ms']:.1f}", f"{fewest / figures['ms']:.3f}", f"{figures['tokens_per_s']:,.0f}",
                     "" if figures["taken_gib"] is None else f"{figures['taken_gib']:.1f}", "", ""]
            if row == PREDICTED and fitted and "ms" in rows.get(FLOOR, {}):
                said = fitted.step_ms(rows[FLOOR]["ms"], work(shape, gpus), machine)
                cells[-2:] = [f"{said:.1f}", f"{figures['ms'] / said:.3f}"]
            lines.append(cells)
    return lines


def table(lines):
    head = ["row", "GPUs", "ms", "kept", "tokens/s", "taken GiB", "predicted", "apart"]
    texts = [head, *(list(map(str, line)) for line in lines)]
    widths = [max(len(text[i]) for text in texts) for i in range(len(head))]
    return [text[0].ljust(widths[0]) + "".join(cell.rjust(width + 3) for cell, width in zip(text[1:], widths[1:], strict=True))
            for text in texts]


def counts(text):
    chosen = sorted({int(part) for part in text.split(",")})
    if chosen[0] < 2:
        raise ValueError
    return chosen


def main(arguments=None, measure=bench_gpu.main, available=lambda: len(bench_gpu.machine()["gpus"])):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=counts, help="numbers of them, 2 or more [those of 2, 4, 8 that there are]")
    parser.add_argument("--shapes", default="4.54b-1,8.03b", help=f"of {','.join(SHAPES)} [%(default)s]")
    parser.add_argument("--preset", default="release")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-seconds", type=float, default=2.0)
    parser.add_argument("--commit", help="what is measured, where this is no git checkout")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "results" / "bench-scale.json")
    options = parser.parse_args(arguments)
    there = available()
    chosen = options.gpus or [count for count in COUNTS if count <= there]
    if not chosen or max(chosen) > there:
        parser.error(f"--gpus {','.join(map(str, chosen or COUNTS))}: this machine has {there}")
    known = Measured.read() if MEASURED.exists() else None
    fitted = known and fit([observation[2:] for observation in known.observations()], known.machine)

    by_shape, failed = {}, False
    for gpus in chosen:
        out = options.out.with_name(f"{options.out.stem}-{gpus}.json")
        asked = ["--gpus", gpus, "--shapes", options.shapes, "--rows", ",".join("=" + row for row in rows_on(gpus)), "--preset", options.preset,
                 "--rounds", options.rounds, "--steps", options.steps, "--warm-seconds", options.warm_seconds, "--out", out]
        asked += ["--commit", options.commit] if options.commit else []
        failed |= measure(list(map(str, asked))) != 0
        for shape, rows in json.loads(out.read_text())["shapes"].items():
            by_shape.setdefault(shape, {})[gpus] = {name: rows[name] for name in rows_on(gpus) if name in rows}
    bench_gpu.write(options.out, by_shape)
    for shape, by_count in by_shape.items():
        print(f"\n{shape}, {SHAPES[shape].parameters() / 1e9:.2f}B parameters, {SHAPES[shape].tokens()} tokens per GPU")
        print("\n".join(table(lines_of(SHAPES[shape], by_count, fitted, known and known.machine))))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
