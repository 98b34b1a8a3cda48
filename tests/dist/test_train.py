"""`fsdpp train` on a tiny text: it learns, the same over any number of ranks, and its files say what it did."""

import json
import math
import re
import socket

import pytest

from train_program import PROGRAM, TINY, TORCHRUN, events, options, run, write_text

STEP_KEYS = {"event", "step", "loss", "gradient_norm", "learning_rate", "tokens_per_s", "memory_bytes", "seconds"}
RESULT_KEYS = {"val_loss", "train_s", "ranks", "tokens_per_s", "steps", "tokens", "held_bytes", "one_rank_alone_bytes",
               "resident_bytes", "peak_resident_bytes", "own_bytes", "proportional_bytes", "sample"}


class Trained:
    """One finished run, with what it printed and wrote."""

    def __init__(self, folder, values, ranks, launcher=()):
        self.metrics = folder / "metrics.jsonl"
        self.results = folder / "results" / "train.json"
        places = {"data.cache": folder / "tokens", "output.metrics": self.metrics, "output.results": self.results}
        arguments = ["train", *options(values | places)]
        if launcher:
            self.result = run([*launcher[1:], PROGRAM, *arguments], program=launcher[0], timeout=120)
        else:
            self.result = run([*arguments, "--ranks", str(ranks)], timeout=120)
        assert self.result.code == 0, self.result
        self.out = self.result.out.decode()  # fails unless it is UTF-8
        self.events = events(self.metrics)
        self.figures = json.loads(self.results.read_text())

    def of(self, event):
        return [e for e in self.events if e["event"] == event]

    def losses(self):
        return [e["loss"] for e in self.of("step")]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """Runs by (ranks, extra values), each made once."""
    made = {}

    def get(ranks, **extra):
        key = (ranks, tuple(sorted(extra.items())))
        if key not in made:
            values = TINY | {"data.text": text} | {name.replace("__", "."): value for name, value in extra.items()}
            made[key] = Trained(tmp_path_factory.mktemp("run"), values, ranks)
        return made[key]

    return get


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_learns_and_says_so(trained, ranks):
    run = trained(ranks)
    losses = run.losses()
    assert [e["step"] for e in run.of("step")] == list(range(1, TINY["train.steps"] + 1))
    assert abs(losses[0] - math.log(257)) < 0.5  # knows nothing at first
    assert losses[-1] < losses[0] - 2 and run.figures["val_loss"] < losses[0] - 2
    assert all(set(e) == STEP_KEYS for e in run.of("step"))
    assert all(e["gradient_norm"] > 0 and e["tokens_per_s"] > 0 for e in run.of("step"))

    assert [e["step"] for e in run.of("validation")] == [20, 40]
    assert set(run.figures) == RESULT_KEYS
    assert run.figures["ranks"] == ranks and run.figures["steps"] == 40
    assert run.figures["tokens"] == 40 * TINY["train.batch"] * TINY["model.sequence"]
    assert run.figures["val_loss"] == run.of("validation")[-1]["loss"]
    assert 0 < run.figures["train_s"] < run.result.seconds
    for name in ("resident_bytes", "peak_resident_bytes", "own_bytes", "proportional_bytes"):
        assert len(run.figures[name]) == ranks and min(run.figures[name]) > 1 << 20
    assert len(run.figures["sample"]) >= TINY["sample.bytes"]  # escaped bytes are longer


@pytest.mark.parametrize("ranks", [1, 4])
def test_reports(trained, ranks):
    run = trained(ranks)
    assert run.result.err == b""
    for part in ("parameters", "layers.1", "total", "padding", "memory plan", "tokens to learn", "step 1/40", "step 40/40",
                 "validation loss", "sample", "one rank alone would hold", f"rank {ranks - 1}"):
        assert part in run.out, part
    assert f"rank {ranks} " not in run.out
    assert run.out.count("one rank alone would hold") == 1  # said by one rank
    assert "\x1b" not in run.out and "\r" not in run.out  # no terminal


def test_parameters_in_the_table_add_up(trained):
    rows = re.findall(r"^  (\S+) +([\d,]+) +([\d,]+) +([\d,]+)$", trained(4).out, re.MULTILINE)
    rows = [(name, *(int(cell.replace(",", "")) for cell in cells)) for name, *cells in rows]
    units, total = rows[:-1], rows[-1]
    names = [unit[0] for unit in units]
    assert total[0] == "total" and len(set(names)) == len(names) and {"root", "embedding"} < set(names)
    assert [sum(unit[i] for unit in units) for i in (1, 2, 3)] == list(total[1:])
    d, f, kv = TINY["model.dim"], TINY["model.ffn"], TINY["model.dim"] // TINY["model.heads"]
    layer = 2 * d * d + 2 * d * kv + 3 * d * f + 2 * d
    assert total[1] == 257 * d + d + TINY["model.layers"] * layer
    assert total[2] == 4 * total[1] + total[3]


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_gives_the_same_losses(trained, ranks):
    alone, together = trained(1), trained(ranks)
    for step, (a, b) in enumerate(zip(alone.losses(), together.losses(), strict=True), 1):
        assert b == pytest.approx(a, rel=1e-6 if step <= 5 else 1e-4), step  # fp32 sums differ in their order
    assert together.figures["val_loss"] == pytest.approx(alone.figures["val_loss"], rel=1e-4)


@pytest.mark.parametrize(
    "extra",
    [
        {"train__microbatches": 2},
        {"sharding__strategy": "no_shard"},
        {"sharding__strategy": "optim", "train__microbatches": 2},
        {"sharding__mesh": "2x2"},
        {"sharding__mesh": "2x2", "sharding__optimizer_over_replicas": True, "train__microbatches": 2},
        {"sharding__mesh": "1x2"},
        {"sharding__mesh": "2x4", "sharding__reshard_after_forward": "2"},
        {"sharding__mesh": "4x2", "sharding__optimizer_over_replicas": True},
        {"model__recompute": "reentrant"},
        {"sharding__offload": True, "train__microbatches": 2},
        {"sharding__reshard_after_forward": "2"},
        {"sharding__reshard_after_forward": "false"},
        {"model__recompute": "non_reentrant", "sharding__delay_wgrad": True, "train__microbatches": 2},
        {"sharding__delay_wgrad": True, "sharding__strategy": "optim", "train__microbatches": 2},
        {"sharding__strategy": "optim_grads", "train__microbatches": 2},
        {"sharding__fused": False},
        {"model__tied": False},
    ],
    ids=lambda extra: "-".join(f"{k}={v}" for k, v in extra.items()),
)
def test_variants_learn_the_same(trained, extra):
    run = trained(math.prod(map(int, extra.get("sharding__mesh", "2").split("x"))), **extra)
    reference = trained(1, **({"model__tied": False} if "model__tied" in extra else {}))
    assert run.losses()[:5] == pytest.approx(reference.losses()[:5], rel=1e-6)
    assert run.figures["val_loss"] == pytest.approx(reference.figures["val_loss"], rel=1e-4)


@pytest.mark.parametrize("mesh", ["flat", "1x2"])
def test_sums_in_bf16_where_there_are_no_replicas(trained, mesh):
    run = trained(2, sharding__accumulation_dtype="bf16", sharding__main_weights="model_dtype", sharding__mesh=mesh)
    assert run.losses() == pytest.approx(trained(1).losses(), rel=0.05)


def test_short_names_of_one_section_alone(trained, text, tmp_path):
    arguments = ["train", *options(TINY | {"data.text": text, "output.results": tmp_path / "out.json"}), "--ranks", "4"]
    short = ["--strategy", "optim", "--mesh", "2x2", "--microbatches", "2", "--recompute", "reentrant"]
    assert run([*arguments, *short, "--delay-wgrad", "true"], timeout=120).code == 0
    loss = json.loads((tmp_path / "out.json").read_text())["val_loss"]
    assert loss == pytest.approx(trained(1).figures["val_loss"], rel=1e-4)
    result = run(["train", "--seed", "1"])  # two sections have one
    assert result.code == 2 and b"--seed is not an option" in result.err


def test_the_same_command_gives_the_same_bits(trained, text, tmp_path):
    again = Trained(tmp_path, TINY | {"data.text": text}, 4)
    assert again.losses() == trained(4).losses()
    assert again.figures["sample"] == trained(4).figures["sample"]


def test_sharding_holds_less_than_one_rank_alone(trained):
    few_steps_of_many_layers = {"model__layers": 16, "train__steps": 2, "train__warmup_steps": 0}
    sharded = trained(4, **few_steps_of_many_layers).figures
    whole = trained(2, sharding__strategy="no_shard", **few_steps_of_many_layers).figures
    assert sharded["one_rank_alone_bytes"] == whole["one_rank_alone_bytes"]
    assert sharded["held_bytes"] < 0.6 * sharded["one_rank_alone_bytes"]
    assert sharded["held_bytes"] < 0.6 * whole["held_bytes"]


def test_bytes_that_are_not_utf8(text, tmp_path):
    prompt = b"\xff\xfe na\xefve"
    values = TINY | {"data.text": text, "train.steps": 5, "train.warmup_steps": 0, "sample.prompt": prompt}
    places = {"data.cache": tmp_path / "tokens", "output.results": tmp_path / "train.json"}
    arguments = ["train", *options(values | places)]
    arguments[arguments.index(str(prompt))] = prompt
    result = run(arguments)
    assert result.code == 0, result
    assert "\\xff\\xfe na\\xefve" in result.out.decode()
    assert json.loads((tmp_path / "train.json").read_text())["sample"].startswith("\\xff\\xfe na\\xefve")


def test_a_greedy_sample_continues_the_text(trained):
    sample = trained(1, sample__temperature=0, sample__prompt="the sharded ").figures["sample"]
    assert sample.startswith("the sharded ")
    assert sample == trained(2, sample__temperature=0, sample__prompt="the sharded ").figures["sample"]


def test_no_files_where_none_are_wanted(text, tmp_path):
    values = TINY | {"data.text": text, "train.steps": 2, "train.warmup_steps": 0, "sample.bytes": 0}
    result = run(["train", *options(values | {"data.cache": tmp_path / "tokens", "output.results": ""})])
    assert result.code == 0, result
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_configuration_file_and_command_line(text, tmp_path):
    config = tmp_path / "tiny.toml"
    config.write_text(
        "[model]\ndim = 16\nlayers = 1\nheads = 2\nkv_heads = 1\nffn = 32\nsequence = 16\n"
        "[train]\nsteps = 7\nwarmup_steps = 0\nbatch = 4\nlog_every = 1\nlearning_rate = 1\n"
        f'[data]\ntext = "{text}"\ncache = "{tmp_path / "tokens"}"\n[sample]\nbytes = 0\n'
        f'[output]\nmetrics = "{tmp_path / "m.jsonl"}"\nresults = "{tmp_path / "r.json"}"\n'
    )
    result = run(["train", "--config", config, "--train.learning_rate", "0.001", "--ranks", "2", "--device", "cpu"])
    assert result.code == 0, result
    steps = [e for e in events(tmp_path / "m.jsonl") if e["event"] == "step"]
    assert len(steps) == 7 and steps[0]["learning_rate"] == pytest.approx(0.001)


def test_under_torchrun(trained, text, tmp_path):
    launcher = [TORCHRUN, "--nproc-per-node", "2", "--no-python"]
    run = Trained(tmp_path, TINY | {"data.text": text}, 2, launcher)
    assert run.figures["ranks"] == 2
    assert run.losses() == trained(2).losses()
    assert run.out.count("one rank alone would hold") == 1


@pytest.mark.parametrize(
    "rank, world",
    [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")],
)
def test_under_other_launchers(trained, text, tmp_path, rank, world):
    """mpirun and srun give rank and world under names of their own; a shell stands for them here."""
    script = (
        f'for r in 0 1; do {rank}=$r {world}=2 "$@" & pids="$pids $!"; done; for p in $pids; do wait $p || exit 1; done'
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["/usr/bin/env", f"MASTER_PORT={port}", "MASTER_ADDR=127.0.0.1", "bash", "-c", script, "launcher"]
    run = Trained(tmp_path, TINY | {"data.text": text}, 2, launcher)
    assert run.figures["ranks"] == 2
    assert run.losses() == trained(2).losses()
