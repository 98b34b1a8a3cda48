"""From the lines that the ranks of bench_gpu.py's rows printed to medians, ratios and the table."""

import statistics

from gpu_rows import ADAMW, FLOORS, FSDP2_EAGER, PEAK_TFLOPS

PASSED_THROUGH = ("plan_gib", "profile")  # of our rows: the printed memory plan, and ms by cause


def slowest_rank(lines, name):
    """Per step, the largest value over the ranks' lists called `name`: a step ends when its last rank does."""
    return [max(values) for values in zip(*(line[name] for line in lines), strict=True)]


def largest(rounds, name):
    """The largest value over rounds and ranks; None where it was not measured."""
    values = [line[name] for lines in rounds for line in lines]
    return None if None in values else max(values)


def row_figures(rounds, shape):
    """One row's figures. `rounds`: for every round the lines of its ranks."""
    ms = [value for lines in rounds for value in slowest_rank(lines, "ms")]
    middle = statistics.median(ms)
    tokens_per_s = shape.tokens() / middle * 1e3  # of one GPU
    tflops = tokens_per_s * shape.flops_per_token() / 1e12
    quartiles = statistics.quantiles(ms, n=4) if len(ms) > 1 else [middle] * 3
    figures = {
        "ms": middle,
        "ms_quartiles": [quartiles[0], quartiles[2]],
        "host_ms": statistics.median(value for lines in rounds for value in slowest_rank(lines, "host_ms")),
        "tokens_per_s": tokens_per_s * len(rounds[0]),
        "tflops_per_gpu": tflops,
        "utilisation": tflops / PEAK_TFLOPS,
        "taken_gib": largest(rounds, "taken_gib"),
        "peak_gib": largest(rounds, "allocated_gib"),
        "reserved_gib": largest(rounds, "reserved_gib"),
        "loss": statistics.mean(line["loss"] for line in rounds[-1]),
        "rounds": len(rounds),
        "steps": len(ms),
    }
    return figures | {name: rounds[-1][0][name] for name in PASSED_THROUGH if name in rounds[-1][0]}


def fastest(rows, names):
    """The name, among `names`, of the row with the least ms; None when none was measured."""
    measured = [name for name in names if "ms" in rows.get(name, {})]
    return min(measured, key=lambda name: rows[name]["ms"], default=None)


def ratio(over, under):
    return over / under if over is not None and under else None


def add_ratios(rows):
    """Adds to every measured row of one shape, in place; None where the other row was not measured:

    to_floor        ms over the faster floor's. Also for rows with the optimizer: the floor never has one.
    over_fsdp2      FSDP2's ms (fp32 reduce, eager, its best prefetch depth measured, the same optimizer) over the row's
    host_to_fsdp2, taken_to_fsdp2   host ms and memory over those of the row fsdp2, at its defaults
    to_plain        floors only: ms over that of plain PyTorch
    taken_to_plan   rows that have a plan: memory taken over it
    """
    floor = fastest(rows, FLOORS)
    for name, row in rows.items():
        if "ms" not in row:
            continue
        ending = ADAMW if name.endswith(ADAMW) else ""
        best = fastest(rows, [eager + ending for eager in FSDP2_EAGER])
        default = rows.get("fsdp2" + ending, {})
        row["to_floor"] = ratio(row["ms"], rows[floor]["ms"]) if floor else None
        row["over_fsdp2"] = ratio(rows[best]["ms"], row["ms"]) if best else None
        row["host_to_fsdp2"] = ratio(row["host_ms"], default.get("host_ms"))
        row["taken_to_fsdp2"] = ratio(row["taken_gib"], default.get("taken_gib"))
        if name in FLOORS:
            row["to_plain"] = ratio(row["ms"], rows.get("plain", {}).get("ms"))
        if "plan_gib" in row:
            row["taken_to_plan"] = ratio(row["taken_gib"], row["plan_gib"])
    return rows


COLUMNS = [
    ("ms", "ms", ".2f"), ("host ms", "host_ms", ".2f"), ("to floor", "to_floor", ".3f"),
    ("over FSDP2", "over_fsdp2", ".3f"), ("tokens/s", "tokens_per_s", ",.0f"), ("TFLOP/s", "tflops_per_gpu", ".1f"),
    ("MFU", "utilisation", ".1%"), ("taken GiB", "taken_gib", ".2f"), ("torch GiB", "peak_gib", ".2f"),
]


def table(rows):
    """Lines of the table of one shape."""

    def cell(value, form):
        return "-" if value is None else format(value, form)

    lines = [f"{'':24}" + "".join(f"{title:>12}" for title, _, _ in COLUMNS)]
    for name, row in rows.items():
        if "ms" in row:
            lines.append(f"{name:24}" + "".join(f"{cell(row.get(key), form):>12}" for _, key, form in COLUMNS))
        if "error" in row:
            lines.append(f"{name:24}    failed: {row['error'].splitlines()[0]}")
    return lines


def sentences(rows):
    """Comparisons of one shape that the table does not show: those whose rows were measured."""

    def ms(name):
        return rows.get(name, {}).get("ms")

    said = []
    floor = fastest(rows, FLOORS)
    if floor and ms("plain"):
        said.append(f"floor: {floor}, {ms(floor) / ms('plain'):.3f} of plain PyTorch's ms")
    for ending in ("", ADAMW):
        ours, copy = "ours" + ending, "ours-copy" + ending
        if ms(ours) and ms(copy):
            more = ms(copy) - ms(ours)
            said.append(f"{ours}: fused wgrad saves {more:.2f} ms, {more / ms(copy):.1%} of the copy path's step")
        best = fastest(rows, [eager + ending for eager in FSDP2_EAGER])
        if best and best != "fsdp2" + ending:
            said.append(f"over FSDP2: {best} was the fastest depth of prefetch, and is what is compared with")
        keep = "fsdp2-keep" + ending
        if ms(ours) and ms(keep):
            more = rows[keep]["taken_gib"] - rows[ours]["taken_gib"] if rows[keep]["taken_gib"] else 0
            said.append(f"{ours}: {ms(keep) / ms(ours):.3f} over {keep}, which takes {more:.1f} GiB more")
        if rows.get(ours, {}).get("host_to_fsdp2"):
            said.append(f"{ours}: host time {rows[ours]['host_to_fsdp2']:.3f} of FSDP2's")
        if rows.get(ours, {}).get("taken_to_fsdp2"):
            plan = rows[ours].get("taken_to_plan")
            beside = f", {plan:.3f} of its plan" if plan else ""
            said.append(f"{ours}: memory taken {rows[ours]['taken_to_fsdp2']:.3f} of FSDP2's{beside}")
        profile = rows.get(ours, {}).get("profile") or {}
        if profile:
            said.append(f"{ours}: ms by cause: " + ", ".join(f"{cause} {value}" for cause, value in profile.items()))
    return said
