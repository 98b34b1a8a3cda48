"""`fsdpp train` on this machine's GPUs: learns what CPUs learn, the same on 1 rank and on 2, and names a rank that is stuck.
Where there are fewer GPUs than ranks, these share them.

Skipped where there is no GPU or no fsdpp-cuda, which may have been built on another machine. FSDPP_TEST_TEXT: a text
to learn; else the project's own sources.
"""

import functools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "dist"), str(ROOT / "tools")]

from test_gpu import library_path  # noqa: E402
from train_program import TINY, environment, events, job, options, run, wait_for, write_text  # noqa: E402

FOLDER = ROOT / "build" / os.environ.get("FSDPP_PRESET", "release") / "apps" / "fsdpp"
GPU_PROGRAM = FOLDER / "fsdpp-cuda"
CONFIG = ROOT / "configs" / "small.toml"
STEPS = 300
LEARNING_RATE = 1e-3  # with the configuration's 4e-3 roundings grow from step to step, to some percent of the loss
PATIENCE_S = 120  # the start of CUDA and of NCCL's threads included
TIMEOUT_S = 8
LOST = 3  # apps/fsdpp/exit_code.h
OF_SEVERAL_RANKS = ("sharding__mesh", "sharding__optimizer_over_replicas")
VARIANTS = [
    {"train__microbatches": 2},
    {"sharding__strategy": "no_shard"},
    {"sharding__strategy": "optim", "train__microbatches": 2},
    {"sharding__mesh": "2x1"},
    {"sharding__optimizer_over_replicas": True, "sharding__mesh": "2x1", "train__microbatches": 2},
    {"model__recompute": "reentrant", "sharding__delay_wgrad": True},
    {"sharding__delay_wgrad": True, "model__recompute": "non_reentrant", "train__microbatches": 2},
    {"sharding__offload": True},
    {"model__tied": False},
    {"sharding__fused": False},
]
MESHES = [
    {"sharding__mesh": "2x{half}"},
    {"sharding__mesh": "2x{half}", "sharding__optimizer_over_replicas": True},
    {"sharding__reshard_after_forward": "2"},  # over neighbours
]
SOURCES = (".h", ".cpp", ".cu", ".md", ".py", ".sh")


@functools.cache
def libraries():
    return {"LD_LIBRARY_PATH": library_path()}


@functools.cache
def gpus():
    """GPUs that torch sees; asked only where a driver shows itself, since torch is slow to start."""
    if shutil.which("nvidia-smi") is None and not pathlib.Path("/proc/driver/nvidia").exists():
        return 0
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    answer = subprocess.run(ask, capture_output=True, text=True)
    return int(answer.stdout) if answer.returncode == 0 else 0


def need(ranks):
    """Skips the test that calls it unless there are GPUs for `ranks` ranks, which may share them as tests/gpu/gpu_ranks.h says,
    and the program."""
    if not GPU_PROGRAM.exists():
        pytest.skip(f"no {GPU_PROGRAM.relative_to(ROOT)}: built only where there is a CUDA toolkit")
    shared = int(os.environ.get("FSDPP_TEST_SHARED_RANKS", 2))
    if gpus() < 1 or ranks > max(gpus(), shared):
        pytest.skip(f"needs {ranks} GPUs, there are {gpus()}; FSDPP_TEST_SHARED_RANKS={ranks} shares them, where there are some")


def device(ranks):
    return "cuda" if ranks <= gpus() else "cuda-shared"


def on_device(ranks):
    return ["--device", device(ranks), "--ranks", ranks]


def device_line(ranks):
    return "a GPU per rank" if ranks <= gpus() else "GPUs that ranks share"


def own_sources(path):
    """A text of the project's own files, the same wherever it is made; one kind of file as good as any other."""
    names = [name for top in ("apps", "benchmarks", "docs", "fsdpp", "tests", "tools") for name in (ROOT / top).rglob("*")]
    chosen = sorted((name.name, name) for name in names if name.suffix in SOURCES and name.is_file())
    path.write_bytes(b"\n".join(name.read_bytes() for _, name in chosen))
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    given = os.environ.get("FSDPP_TEST_TEXT")
    return pathlib.Path(given) if given else own_sources(tmp_path_factory.mktemp("text") / "sources.txt")


class Trained:
    """One finished run of the small configuration."""

    def __init__(self, folder, text, arguments, program=GPU_PROGRAM, launcher=(), **values):
        metrics, results = folder / "metrics.jsonl", folder / "train.json"
        values = {"data.text": text, "data.cache": folder / "tokens", "data.validation_fraction": 0.05,
                  "train.steps": STEPS, "train.learning_rate": LEARNING_RATE, "train.log_every": 1, "train.eval_every": 100, "output.metrics": metrics,
                  "output.results": results} | {name.replace("__", "."): value for name, value in values.items()}
        command = [*map(str, [*launcher, program, "train", "--config", CONFIG, *options(values), *arguments])]
        self.result = run(command[1:], libraries(), timeout=600, program=command[0])
        assert self.result.code == 0, self.result
        self.out = self.result.out.decode()
        self.events = events(metrics)
        self.figures = json.loads(results.read_text())
        self.losses = [event["loss"] for event in self.events if event["event"] == "step"]
        self.norms = [event["gradient_norm"] for event in self.events if event["event"] == "step"]
        self.validations = [event["loss"] for event in self.events if event["event"] == "validation"]
        print(f"{' '.join(map(str, arguments))}: first loss {self.losses[0]:.4f}, validation {self.validations}, "
              f"{self.figures['tokens_per_s']:.0f} tokens/s")


@pytest.fixture(scope="module")
def on_cpus(text, tmp_path_factory):
    """What the same steps give on CPUs in fp32."""
    need(1)
    ranks = max(count for count in (1, 2, 4, 8) if count <= (os.cpu_count() or 1))
    return Trained(tmp_path_factory.mktemp("cpu"), text, ["--device", "cpu", "--ranks", ranks])


@pytest.fixture(scope="module")
def on_gpus(text, tmp_path_factory):
    """Runs by number of ranks, each made once."""
    made = {}

    def get(count):
        need(count)
        if count not in made:
            folder = tmp_path_factory.mktemp("gpu")
            made[count] = Trained(folder, text, on_device(count))
        return made[count]

    return get


@pytest.mark.parametrize("count", [1, 2])
def test_learns_what_cpus_learn(on_gpus, on_cpus, count):
    trained = on_gpus(count)
    assert f"{device_line(count)}, bf16 with fp32 main weights, lanes through " in trained.out
    assert trained.events[0]["device"] == "cuda" and on_cpus.events[0]["device"] == "cpu"
    assert len(trained.losses) == STEPS and len(trained.validations) == STEPS // 100
    assert abs(trained.losses[0] - math.log(257)) < 0.5  # knows nothing at first
    assert trained.losses[:10] == pytest.approx(on_cpus.losses[:10], rel=5e-3)  # bf16 against fp32
    assert trained.norms[0] == pytest.approx(on_cpus.norms[0], rel=5e-3)
    assert trained.figures["val_loss"] < trained.losses[0] - 2.5
    assert trained.validations == pytest.approx(on_cpus.validations, rel=0.015)
    assert trained.figures["val_loss"] == pytest.approx(on_cpus.figures["val_loss"], rel=0.015)


def test_two_ranks_learn_the_same_as_one(on_gpus):
    one, two = on_gpus(1), on_gpus(2)
    assert two.losses[0] == pytest.approx(one.losses[0], rel=1e-3)  # the same weights, rounded and summed otherwise
    assert two.losses[:10] == pytest.approx(one.losses[:10], rel=2e-3)
    assert two.validations == pytest.approx(one.validations, rel=0.015)


def test_in_fp32_the_losses_are_those_of_cpus(on_cpus, text, tmp_path):
    need(1)
    trained = Trained(tmp_path, text, ["--device", "cuda"], sharding__model_dtype="fp32")
    assert "a GPU per rank, fp32, lanes through " in trained.out
    assert trained.losses[:10] == pytest.approx(on_cpus.losses[:10], rel=2e-4)
    assert trained.losses == pytest.approx(on_cpus.losses, rel=2e-3)  # to the last step
    assert trained.validations == pytest.approx(on_cpus.validations, rel=1e-3)


def test_the_same_command_gives_the_same_bits(text, tmp_path):
    need(2)
    again = Trained(tmp_path, text, on_device(2), train__steps=20, train__warmup_steps=10)
    other = Trained(tmp_path, text, on_device(2), train__steps=20, train__warmup_steps=10)
    assert again.losses == other.losses and again.norms == other.norms
    assert again.figures["sample"] == other.figures["sample"]


@pytest.mark.parametrize("extra", VARIANTS, ids=lambda extra: next(iter(extra)))
def test_variants_begin_the_same(text, tmp_path, extra):
    need(2)
    values = {"train__steps": 20, "train__warmup_steps": 10, "sample__bytes": 20} | extra
    alone = {name: value for name, value in values.items() if name not in OF_SEVERAL_RANKS}
    one = Trained(tmp_path, text, ["--device", "cuda"], **alone)
    two = Trained(tmp_path, text, on_device(2), **values)
    assert two.losses[:8] == pytest.approx(one.losses[:8], rel=1e-2)  # then roundings have grown


@pytest.mark.parametrize("extra", MESHES, ids=lambda extra: list(extra)[-1])
@pytest.mark.parametrize("count", [4, 8])
def test_meshes_of_more_ranks_begin_the_same(text, tmp_path, count, extra):
    need(count)
    few = {"train__steps": 20, "train__warmup_steps": 10, "sample__bytes": 20}
    one = Trained(tmp_path, text, ["--device", "cuda"], **few)
    extra = {name: value.format(half=count // 2) if isinstance(value, str) else value for name, value in extra.items()}
    many = Trained(tmp_path, text, on_device(count), **few, **extra)
    assert many.losses[:8] == pytest.approx(one.losses[:8], rel=1e-2)


def test_gpus_are_found_by_themselves(text, tmp_path):
    """Also from the program for CPUs, which the one for GPUs takes the place of."""
    need(1)
    few = {"train__steps": 4, "train__warmup_steps": 0, "sample__bytes": 10}
    for program in (FOLDER / "fsdpp", GPU_PROGRAM):
        if program.exists():
            trained = Trained(tmp_path, text, [], program=program, **few)
            assert "a GPU per rank, bf16" in trained.out
            taken = trained.figures["gpu_bytes"]
            assert len(taken) == 1 and taken[0] > 64 << 20 and "GPU, by all" in trained.out


def test_under_torchrun(text, tmp_path):
    need(2)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    few = {"train__steps": 20, "train__warmup_steps": 10}
    launched = Trained(tmp_path, text, ["--device", device(2)], launcher=launcher, **few)
    ours = Trained(tmp_path, text, on_device(2), **few)
    assert launched.losses == ours.losses


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_more_ranks_than_gpus(text, tmp_path, name):
    need(1)
    ranks = gpus() + 1
    values = TINY | {"data.text": text, "data.cache": tmp_path / "tokens", "train.batch": 2 * ranks, "device": name}
    result = run(["train", *options(values), "--ranks", str(ranks)], libraries(), program=GPU_PROGRAM)
    assert result.code == 2 and len(result.lines()) == 1, result
    assert f"--ranks {ranks}: this process can use {gpus()} GPU" in result.lines()[0]
    assert f"give --ranks {gpus()}, or --device cpu, or --device cuda-shared" in result.lines()[0]


# Faults. Where every step is shown the ranks meet on the hosts too; where none is, only on the GPUs.


@pytest.fixture
def endless(tmp_path):
    """An endless run of two ranks, caught in its steps: (job, {rank: pid})."""
    need(2)
    metrics = tmp_path / "metrics.jsonl"

    def start(log_every):
        values = TINY | {"device": device(2), "train.steps": 1_000_000, "train.eval_every": 0, "train.log_every": log_every,
                         "sharding.timeout_s": TIMEOUT_S, "data.text": write_text(tmp_path / "text.txt"),
                         "data.cache": tmp_path / "tokens", "output.metrics": metrics,
                         "output.results": tmp_path / "train.json"}
        return job(["train", *options(values), "--ranks", "2"], libraries(), program=GPU_PROGRAM)

    def in_steps(running, log_every):
        shown = 3 if log_every == 1 else 1  # the first step always is
        wait_for(lambda: sum(event["event"] == "step" for event in events(metrics)) >= shown, "steps", PATIENCE_S)
        return running.wait_for_ranks(2)

    return start, in_steps


@pytest.mark.parametrize("log_every", [1, 1_000_000])
@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_is_named_and_ends_the_job(endless, victim, log_every):
    start, in_steps = endless
    with start(log_every) as running:
        os.kill(in_steps(running, log_every)[victim], signal.SIGSTOP)
        result = running.end()
        assert result.code == LOST, result
        assert result.seconds < 2 * TIMEOUT_S
        other = 1 - victim
        said = [line for line in result.lines() if line.startswith(f"[rank {other}] ")]
        assert any(re.search(rf"rank {victim}\b", line.split("]", 1)[1]) for line in said), result.lines()
        assert any(line.startswith(f"fsdpp: rank {other} failed first, with exit code {LOST}") for line in result.lines())
        running.assert_nothing_left()


@pytest.mark.parametrize("log_every", [1, 1_000_000])
def test_killed_rank_is_named_and_ends_the_job(endless, log_every):
    start, in_steps = endless
    with start(log_every) as running:
        os.kill(in_steps(running, log_every)[1], signal.SIGKILL)
        result = running.end()
        assert result.code == 128 + signal.SIGKILL, result
        assert result.seconds < 2 * TIMEOUT_S
        assert any(line.startswith("fsdpp: rank 1 failed first, ended by signal 9") for line in result.lines())
        running.assert_nothing_left()


@pytest.mark.parametrize("log_every", [1, 1_000_000])
def test_interrupt(endless, log_every):
    start, in_steps = endless
    with start(log_every) as running:
        in_steps(running, log_every)
        running.process.send_signal(signal.SIGINT)
        result = running.end()
        assert result.code == 128 + signal.SIGINT, result
        assert result.seconds < TIMEOUT_S / 2
        assert result.lines()[-1] == "fsdpp: stopped by SIGINT"
        assert not any("failed" in line or "lost" in line for line in result.lines()), result.lines()
        running.assert_nothing_left()


def test_multicast_is_off_in_ranks_unless_asked_for(endless):
    """It is unsafe on a host that others use too: see apps/fsdpp/place_cuda.cpp."""
    start, in_steps = endless
    names = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE")
    if any(name in environment() for name in names):
        pytest.skip("set from outside")
    with start(1) as running:
        for pid in in_steps(running, 1).values():
            listing = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert b"TORCH_SYMM_MEM_DISABLE_MULTICAST=1" in listing and b"NCCL_NVLS_ENABLE=0" in listing
