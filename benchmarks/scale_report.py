"""benchmarks/scale.md, from what was measured and the model."""

from gpu_rows import SHAPES
from scale_model import Fit, between_hosts_ms, fit, taken_gib, unit_sizes, work

SHAPE = "4.54b-1"
LARGE = "8.03b"
GPUS = (2, 4, 8)
HOSTS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
NOISE = 0.01  # of a measured row
WAYS = {"hybrid": "replicas, sums between hosts", "parted": "the optimizer sharded over hosts too", "flat": "all sharded over all"}


def table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def measured_part(measured, fitted):
    rows = []
    for name, row, floor_ms, job, ms in measured.observations():
        said = fitted.step_ms(floor_ms, job, measured.machine)
        rows.append([f"{name}, `{row}`", f"{job.copied_gb:.2f}", f"{job.added_gb:.2f}", f"{floor_ms:.1f}", f"{ms:.1f}",
                     f"{said:.1f}", f"{100 * (said / ms - 1):+.1f} %"])
    head = ["two GPUs", "GB copied", "GB added", "floor ms", "measured ms", "fitted ms", "apart"]
    machine = measured.machine
    return f"""## What two GPUs were measured to do

{measured.gpu}, commit {measured.commit}:

```sh
{measured.command}
```

Copies from a peer bring in {machine.link_gbs:.0f} GB/s, each takes {machine.copy_us:.1f} us beside its bytes, and the
sum of ranks moves {machine.add_gbs:.0f} GB/s ({measured.machine_from}).

Fitted: compute loses {fitted.per_gb:.3f} ms per GB copied beside it and {fitted.per_added_gb:.3f} ms per GB that the sum moves; a step has
{fitted.constant:.2f} ms besides. {unseen(fitted)}

{table(head, rows)}"""


def unseen(fitted):
    """Of what is fitted, what did not show: the bound at 0 held it."""
    names = {"copies": fitted.per_gb, "sums": fitted.per_added_gb, "a constant": fitted.constant}
    zero = [name for name, value in names.items() if value == 0]
    return f"No cost of {' and '.join(zero)} shows in these rows: with more GPUs it may." if zero else ""


def spread(measured, floor_ms, job):
    """The lowest and the highest ms predicted for `job`, were one of the measured rows NOISE slower or faster."""
    observations = [observation[2:] for observation in measured.observations()]
    found = []
    for changed in range(len(observations)):
        for factor in (1 - NOISE, 1 + NOISE):
            rows = [(floor, what, ms * factor if at == changed else ms) for at, (floor, what, ms) in enumerate(observations)]
            found.append(fit(rows, measured.machine).step_ms(floor_ms, job, measured.machine))
    return min(found), max(found)


def host_part(measured, fitted: Fit):
    rows = []
    for name in (SHAPE, LARGE):
        shape, floor = SHAPES[name], measured.floor_ms(name)
        taken = measured.rows.get(name, {}).get("ours+adamw", {}).get("taken_gib")
        for gpus in GPUS:
            job = work(shape, gpus)
            ms = fitted.step_ms(floor, job, measured.machine)
            lowest, highest = spread(measured, floor, job)
            memory = "" if taken is None else f"{taken_gib(shape, gpus, taken):.1f}"
            rows.append([name, gpus, f"{job.copied_gb:.2f}", gpus - 1, job.reduce_copies, f"{job.added_gb:.2f}", f"{floor:.1f}", f"{ms:.1f}",
                         f"{lowest:.0f} to {highest:.0f}", f"{ms / floor:.3f}", f"{gpus * shape.tokens() / ms * 1e3:,.0f}", memory])
    head = ["shape", "GPUs", "GB copied", "copies per gather", "copies of all reduces", "GB added", "floor ms", "ms", "range", "to floor", "tokens/s",
            "GiB per GPU, AdamW"]
    return f"""## One host

`optim_grads_params`, full weights kept until the next step's, without the optimizer's time. The floor is the fp32 one, measured
for {", ".join(name for name in measured.rows if "floor-fp32" in measured.rows[name])}, else by its operations. *Range*: what would be said were one of the {len(list(measured.observations()))} measured rows {100 * NOISE:.0f} % slower or
faster, which calls differ by and more; {sum(value > 0 for value in (fitted.per_gb, fitted.per_added_gb, fitted.constant))} numbers are fitted to them.

{table(head, rows)}"""


def hosts_part(measured, fitted, name):
    shape, floor, gpus = SHAPES[name], measured.floor_ms(name), GPUS[-1]
    inside = fitted.step_ms(floor, work(shape, gpus), measured.machine)
    rows = []
    for hosts in HOSTS:
        line = [hosts, hosts * gpus]
        for way in WAYS:
            more = 0.0 if hosts == 1 else between_hosts_ms(shape, gpus, hosts, way, floor, measured.machine, fitted)
            line += [f"{inside + more:.1f}", f"{(inside / (inside + more)):.3f}"]
        rows.append(line)
    head = ["hosts", "GPUs", *(cell for way in WAYS for cell in (f"{way}: ms", "to one host"))]
    return f"### {name}: {len(unit_sizes(shape))} units, {shape.tokens()} tokens per GPU and step\n\n" + table(head, rows)


def report(measured):
    fitted = fit([observation[2:] for observation in measured.observations()], measured.machine)
    machine = measured.machine
    ways = "\n".join(f"- *{way}*: {what}." for way, what in WAYS.items())
    return f"""# More GPUs and more hosts than were measured: a model of the step

Printed by `.venv/bin/python benchmarks/scale_model.py --write`; the formulas are in that file, a test holds this page to them. Not
measured but the first table: kept to be compared with larger machines.

{measured_part(measured, fitted)}
{host_part(measured, fitted)}
## Many hosts of {GPUS[-1]} GPUs, NCCL between them

{ways}

{"".join(hosts_part(measured, fitted, name) + chr(10) for name in (SHAPE, LARGE))}## Assumptions

- All peers of a host together bring into a GPU what one brings in ({machine.link_gbs:.0f} GB/s): its links are the bound, not the peers'.
- Copies and sums cost compute in proportion to their bytes, whatever their number, and what comes over the network as much as what
  comes from a peer; gathers have the forward to hide in, reduces
  the backward ({measured.floor_ms(SHAPE) / 3:.0f} and {2 * measured.floor_ms(SHAPE) / 3:.0f} ms of {SHAPE}).
- GPUs keep the clock that they had as two; hosts do not wait for a slower one, and no other traffic is on the network.
- {machine.nic_gbs:.0f} GB/s of network per GPU (400 Gb/s, nine tenths of which arrive), {machine.hop_us:.0f} us per hop over it and {machine.peer_hop_us:.1f} us over
  NVLink, about what NCCL's own model has (`src/graph/tuning.cc`, protocol Simple). Among one rank per host reduce-scatters and
  gathers take log2(hosts) hops (NCCL's PAT), among all ranks of all hosts a ring's.
- Sums between hosts are a reduce-scatter and, but where the optimizer is sharded over hosts, a gather, in fp32; new weights go
  between hosts in bf16.
"""
