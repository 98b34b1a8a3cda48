#!/usr/bin/env python3
"""Where a step's time goes: reads the traces that `bench_gpu --trace` writes.

    python3 benchmarks/gpu_profile.py TRACE.0 [FLOOR_TRACE.0]

Per step (mean of the trace's two): ms in which the compute lane works, by kind of kernel; its gaps, by what ran on the other
lanes while it stood still; what the copies and the kernels of the other lanes take; last, how many kernels of the compute lane
copy or add elements: a gradient that is copied or added there is one more than a floor has. With a floor's trace beside it the
difference of each line.
"""

import collections
import json
import sys

STEPS = 2
KINDS = [  # the first pattern that a kernel's name holds
    ("GEMM", ("gemm", "nvjet", "cutlass", "xmma")),
    ("attention", ("flash", "fmha", "attention")),
    ("AdamW", ("adamw", "adam")),
    ("sum of ranks", ("sum_kernel", "sum_in_rank", "sum_vectors")),
    ("rows", ("gather_kernel", "rare", "frequent", "rows")),
    ("signals", ("signal", "wait_kernel")),
    ("norm", ("rms", "norm")),
    ("loss", ("softmax", "nll", "loss")),
    ("fill, cast, elementwise", ("elementwise", "fill", "copy", "cat", "silu", "vectorized")),
]


def kind_of(name):
    lower = name.lower()
    return next((kind for kind, patterns in KINDS if any(p in lower for p in patterns)), "other: " + name[:40])


def read(path):
    """Device events of a trace: (stream, begin, end, name, category), microseconds, in order of their begin."""
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    found = [
        (e["args"].get("stream", 0), e["ts"], e["ts"] + e["dur"], e["name"], e["cat"])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in e
    ]
    return sorted(found, key=lambda e: e[1])


def lanes_of(events):
    """Events by stream, and which stream is the compute lane: the one with the GEMMs."""
    by_stream = collections.defaultdict(list)
    for event in events:
        by_stream[event[0]].append(event)
    gemm_time = {s: sum(e[2] - e[1] for e in es if kind_of(e[3]) == "GEMM") for s, es in by_stream.items()}
    return by_stream, max(gemm_time, key=gemm_time.get)


def moves(path):
    """{"copies" or "adds": kernels and copies on the device of the compute lane per step}."""
    by_stream, compute = lanes_of(read(path))
    result = collections.Counter(copies=0, adds=0)
    for *_, name, category in by_stream[compute]:
        lower = name.lower()
        if category == "kernel" and "elementwise" in lower and "add" in lower:
            result["adds"] += 1
        elif (category == "kernel" and "copy" in lower) or (category == "gpu_memcpy" and "dtod" in lower):
            result["copies"] += 1
    return {kind: count // STEPS for kind, count in result.items()}


def figures(path):
    """{line: ms per step}."""
    events = read(path)
    by_stream, compute = lanes_of(events)
    result = collections.Counter()
    lane = by_stream[compute]
    result["whole"] = max(e[2] for e in lane) - lane[0][1]
    reached = lane[0][1]
    others = [e for e in events if e[0] != compute]
    for event in lane:
        if event[1] > reached:
            gap = event[1] - reached
            beside = [e for e in others if e[1] < event[1] and e[2] > reached and e[4] == "kernel"]
            cause = kind_of(beside[0][3]) if beside else ("nothing" if gap < 3 else "nothing, over 3 us")
            result["gap beside " + cause] += gap
        result["busy"] += max(0, event[2] - max(event[1], reached))
        result["compute: " + (kind_of(event[3]) if event[4] == "kernel" else event[4])] += event[2] - event[1]
        reached = max(reached, event[2])
    for event in others:
        result["other lanes: " + (kind_of(event[3]) if event[4] == "kernel" else event[4] + " " + event[3][:24])] += event[2] - event[1]
    return {line: value / 1e3 / STEPS for line, value in result.items()}


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    ours = figures(sys.argv[1])
    floor = figures(sys.argv[2]) if len(sys.argv) == 3 else {}
    for line in sorted(set(ours) | set(floor), key=lambda name: -max(ours.get(name, 0), floor.get(name, 0))):
        own, other = ours.get(line, 0), floor.get(line, 0)
        if max(own, other) < 0.05:
            continue
        print(f"{own:9.2f}" + (f"{other:9.2f}{own - other:+9.2f}" if floor else "") + f"  {line}")
    for path in sys.argv[1:]:
        print(f"compute lane, kernels per step: {moves(path)}  {path}")


if __name__ == "__main__":
    main()
