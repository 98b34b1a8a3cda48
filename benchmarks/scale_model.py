#!/usr/bin/env python3
"""Predicts our step on 4 and 8 GPUs of a host, and on many hosts, from what two GPUs were measured to do.

    .venv/bin/python benchmarks/scale_model.py                 prints benchmarks/scale.md
    .venv/bin/python benchmarks/scale_model.py --write         writes it

Reads benchmarks/scale_measured.json, which scale_measure.py writes on a machine with two GPUs, or which holds rows that were measured
before it was there (machine_from says where its rates come from). A step takes

    floor  +  per_gb * GB copied  +  per_added_gb * GB added  +  both ends  +  what finds no room beside compute

with GB = 1e9 bytes. What is copied and added follows from the design (`work`): a rank pulls what it lacks of each weight once or
twice, and the slices of its shard's gradient from every peer. What two GPUs pull in fp32 needs no sum where the GEMM adds its own
rows onto it; slices of more peers, or of another dtype, are added by a kernel first. The embedding is exchanged by rows. The two
ends are the first unit's gather and the last unit's reduce, which nothing hides, and a constant. per_gb, per_added_gb and the
constant are fitted to the measured rows; none of them is below 0.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys

from gpu_rows import SHAPES, Shape

HERE = pathlib.Path(__file__).resolve().parent
MEASURED = HERE / "scale_measured.json"
REPORT = HERE / "scale.md"
WEIGHT_BYTES = 2  # of a gathered weight
GRADIENT_BYTES = 4  # of a reduced gradient
STATE_BYTES = 4 + 4 + 8  # per weight of a shard: main weight, gradient, AdamW's moments; new weights lie in the full ones
PIECE_BYTES = 32 * 2**20  # of a peer's slice that is pulled at a time where slices are summed (runtime/peers.cpp)
FORWARD = 1 / 3  # of the floor; the rest is the backward
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a row of bench_gpu.py trains."""

    gathers: int = 1  # of a unit's weights per step: 2 when they are given back behind the forward
    gradient_bytes: int = GRADIENT_BYTES  # on the wire
    slots: bool = False  # every gradient through the slots: the own one is added by the kernel as well


MODES = {
    "ours": Mode(),
    "ours-reshard": Mode(gathers=2),
    "ours-bf16": Mode(gradient_bytes=2),
    "ours-slots": Mode(slots=True),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one GPU's lanes do in a step. GB are 1e9 bytes: those that copies bring to a place, or that the sum of ranks moves."""

    gathered_gb: float  # from peers
    reduced_gb: float  # from peers
    own_gb: float  # of own shards into full weights that are gathered anew
    added_gb: float
    gather_copies: int  # from peers
    reduce_copies: int
    ends_gb: float  # of the first gather and the last reduce

    @property
    def copied_gb(self):
        return self.gathered_gb + self.reduced_gb + self.own_gb


def unit_sizes(shape):
    """Weights of each unit but the embedding, in the order of Llama::units(): the first block's halves, blocks, norm and head."""
    block = (shape.parameters() - 2 * shape.vocabulary * shape.dim - shape.dim) // shape.layers
    attention = 2 * shape.dim * shape.dim + 2 * shape.dim * shape.dim * shape.kv_heads // shape.heads + shape.dim
    return [attention, block - attention] + [block] * (shape.layers - 1) + [shape.vocabulary * shape.dim + shape.dim]


def reduce_copies(size, ranks, summed):
    """From each peer: a norm's run and a matrix's, which comes in pieces where it is summed from near."""
    pieces = math.ceil(size * GRADIENT_BYTES / ranks / PIECE_BYTES) if summed else 1
    return (ranks - 1) * (1 + pieces)


def work(shape, ranks, mode=Mode()):
    """Of ZeRO-3 over `ranks` peers that read each other's memory. Throws ValueError for more than one microbatch."""
    if shape.microbatches != 1:
        raise ValueError(f"{shape.microbatches} microbatches: the model is of steps of one")
    units = unit_sizes(shape)
    lacked = (ranks - 1) / ranks
    rows = shape.tokens() * shape.dim  # of the embedding, for the own tokens
    gathers = [mode.gathers] * (len(units) - 1) + [1]  # the head's weights stay from forward to backward
    gathered = sum(size * count for size, count in zip(units, gathers, strict=True))
    slices = ranks if mode.slots else ranks - 1  # that a kernel reads
    summed = slices > 1 or (slices == 1 and mode.gradient_bytes != GRADIENT_BYTES)
    added = sum(units) / ranks * (slices * mode.gradient_bytes + GRADIENT_BYTES) if summed else 0
    return Work(
        gathered_gb=WEIGHT_BYTES * (gathered + rows) * lacked / 1e9,
        reduced_gb=mode.gradient_bytes * (sum(units) + rows) * lacked / 1e9,
        own_gb=WEIGHT_BYTES * gathered / ranks / 1e9 if mode.gathers > 1 else 0.0,  # else a shard lies in its place
        added_gb=added / 1e9,
        gather_copies=(ranks - 1) * sum(gathers),
        reduce_copies=sum(reduce_copies(size, ranks, summed and ranks > 2) for size in units),
        ends_gb=units[0] * (WEIGHT_BYTES + mode.gradient_bytes) * lacked / 1e9,
    )


@dataclasses.dataclass(frozen=True)
class Machine:
    """Of one GPU. Measured as Measured.machine_from says, but for the network."""

    link_gbs: float  # GB/s that copies from peers bring in
    copy_us: float  # that a copy takes beside its bytes
    add_gbs: float  # GB/s that the sum of ranks moves
    nic_gbs: float = 45.0  # assumed: 400 Gb/s per GPU, nine tenths of which arrive
    hop_us: float = 14.0  # assumed of a hop over the network, about what NCCL's own model of its protocol Simple has
    peer_hop_us: float = 3.4  # and over NVLink (NCCL's src/graph/tuning.cc)

    def link_ms(self, gigabytes, copies=0):
        return 1e3 * gigabytes / self.link_gbs + copies * self.copy_us / 1e3


@dataclasses.dataclass(frozen=True)
class Fit:
    per_gb: float  # ms that compute loses per GB copied beside it
    per_added_gb: float  # and per GB that the sum of ranks moves
    constant: float  # ms of a step

    def step_ms(self, floor_ms, job, machine):
        ends = machine.link_ms(job.ends_gb)
        return floor_ms + self.beside(job) + ends + self.constant + exposed_ms(floor_ms, job, machine)

    def beside(self, job):
        return self.per_gb * job.copied_gb + self.per_added_gb * job.added_gb


def exposed_ms(floor_ms, job, machine):
    """Of gathers that the forward has no room for, and reduces that the backward has none for."""
    gathers = machine.link_ms(job.gathered_gb, job.gather_copies) - FORWARD * floor_ms
    sums = 1e3 * job.added_gb / machine.add_gbs
    reduces = machine.link_ms(job.reduced_gb, job.reduce_copies) + sums - (1 - FORWARD) * floor_ms
    return max(0.0, gathers) + max(0.0, reduces)


def fit(observations, machine):
    """The Fit with the least squares of relative errors. `observations`: (floor ms, Work, measured ms) of two GPUs."""
    import numpy  # here: what measures has no need of it

    lines, over = [], []
    for floor_ms, job, ms in observations:
        lines.append([job.copied_gb / ms, job.added_gb / ms, 1 / ms])
        over.append((ms - floor_ms - machine.link_ms(job.ends_gb) - exposed_ms(floor_ms, job, machine)) / ms)
    best = None
    for kept in itertools.product([False, True], repeat=3):  # with bounds at 0: the best of all choices of what is 0
        columns = [i for i in range(3) if kept[i]]
        found = numpy.zeros(3)
        if columns:
            found[columns] = numpy.linalg.lstsq(numpy.array(lines)[:, columns], numpy.array(over), rcond=None)[0]
        error = float(numpy.sum((numpy.array(lines) @ found - numpy.array(over)) ** 2))
        if (found >= 0).all() and (best is None or error < best[0]):
            best = (error, found)
    return Fit(*map(float, best[1]))


@dataclasses.dataclass(frozen=True)
class Measured:
    """benchmarks/scale_measured.json."""

    commit: str
    gpu: str
    command: str
    machine: Machine
    machine_from: str  # how its figures were found
    rows: dict  # shape -> row -> {"ms", "taken_gib"}

    @staticmethod
    def read(path=MEASURED):
        if not path.exists():
            sys.exit(f"{path}: not there; expected what scale_measure.py writes: run it on a machine with two GPUs")
        content = json.loads(path.read_text())
        return Measured(content["commit"], content["gpu"], content["command"], Machine(**content["machine"]), content["machine_from"], content["rows"])

    def floor_ms(self, name):
        """Of fp32 weight gradients: measured, or that of the largest measured shape by the number of operations."""
        rows = self.rows.get(name, {})
        if "floor-fp32" in rows:
            return rows["floor-fp32"]["ms"]
        known = max((known for known in self.rows if "floor-fp32" in self.rows[known]), key=lambda known: operations(SHAPES[known]))
        return self.rows[known]["floor-fp32"]["ms"] * operations(SHAPES[name]) / operations(SHAPES[known])

    def observations(self):
        """(shape's name, row, floor ms, Work, measured ms)."""
        return [
            (name, row, self.floor_ms(name), work(SHAPES[name], 2, MODES[row]), figures["ms"])
            for name, rows in self.rows.items() if "floor-fp32" in rows
            for row, figures in rows.items() if row in MODES
        ]


def operations(shape: Shape):
    return shape.tokens() * shape.flops_per_token()


def taken_gib(shape, ranks, on_two_gib):
    """With AdamW, full weights kept: what two GPUs took, with shards of another size and room for more peers' slices."""
    embedding = shape.vocabulary * shape.dim
    sharded = STATE_BYTES * shape.parameters() + WEIGHT_BYTES * embedding  # whose new weights lie by themselves
    return on_two_gib + (sharded * (1 / ranks - 1 / 2) + (ranks - 2) * PIECE_BYTES) / GIB


# Between hosts. Each host's ranks shard; `hosts` of them hold the same shards, or shards of a shard, or all ranks shard.


def one_way_ms(gigabytes, hosts, calls, machine):
    """A reduce-scatter or a gather among one rank per host: NCCL's PAT goes in log2(hosts) hops."""
    return 1e3 * gigabytes * (hosts - 1) / hosts / machine.nic_gbs + calls * math.ceil(math.log2(hosts)) * machine.hop_us / 1e3


def ring_ms(gigabytes, ranks, hosts, calls, machine):
    """The same among all ranks of all hosts, whose network cards share what comes into a host."""
    hops = hosts * machine.hop_us + hosts * (ranks - 1) * machine.peer_hop_us
    return 1e3 * gigabytes / ranks * (hosts - 1) / hosts / machine.nic_gbs + calls * hops / 1e3


def between_hosts_ms(shape, ranks, hosts, way, floor_ms, machine, fitted):
    """ms that a step takes longer than on one host of `ranks`, by way (see WAYS of scale_report.py)."""
    sizes = unit_sizes(shape)
    weights, gradients = (size * sum(sizes) / 1e9 for size in (WEIGHT_BYTES, GRADIENT_BYTES))
    first = sizes[0] / sum(sizes)  # of all, in the unit that nothing hides
    forward, backward = FORWARD * floor_ms, (1 - FORWARD) * floor_ms
    if way == "flat":
        moved = (weights + gradients) / ranks
        after = ring_ms(gradients, ranks, hosts, len(sizes), machine)
        before = ring_ms(weights, ranks, hosts, len(sizes), machine)
        ends = ring_ms(first * (weights + gradients), ranks, hosts, 2, machine)
    else:  # what comes back are sums, or new weights
        back = gradients if way == "hybrid" else weights
        moved = (gradients + back) / ranks
        after = one_way_ms(gradients / ranks, hosts, len(sizes), machine)
        before = one_way_ms(back / ranks, hosts, len(sizes), machine)
        ends = one_way_ms(first * moved, hosts, 2, machine)
        if way == "hybrid":  # both follow the backward
            after, before = after + before, 0.0
    beside = fitted.per_gb * moved * (hosts - 1) / hosts
    return max(0.0, before - forward) + max(0.0, after - backward) + beside + ends


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.name} instead of printing it")
    arguments = parser.parse_args()
    from scale_report import report

    text = report(Measured.read())
    if arguments.write:
        REPORT.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
