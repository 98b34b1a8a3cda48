"""`fsdpp train --device`: which program goes on, and what is said where no GPU can be used. No GPU is needed here."""

import os
import pathlib
import shutil
import subprocess

import pytest

from train_program import PROGRAM, TINY, events, options, run, write_text

GPU_PROGRAM = PROGRAM.with_name("fsdpp-cuda")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FEW = TINY | {"train.steps": 4, "train.warmup_steps": 0, "train.eval_every": 0, "sample.bytes": 8}


def shows_gpu():
    """What the program looks at before it asks a driver."""
    return pathlib.Path("/dev/nvidia0").exists() or any(pathlib.Path("/proc/driver/nvidia/gpus").glob("*"))


def loads(program):
    """Whether the libraries that `program` names are on this machine."""
    listing = subprocess.run(["ldd", program], capture_output=True, text=True)
    return listing.returncode == 0 and "not found" not in listing.stdout


needs_gpu_program = pytest.mark.skipif(
    not GPU_PROGRAM.exists() or not loads(GPU_PROGRAM), reason="no fsdpp-cuda: no CUDA toolkit where this was built"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def command(text, tmp_path):
    """Arguments of a short run with `device` (None: not given)."""

    def make(device, **extra):
        values = FEW | {"data.text": text, "data.cache": tmp_path / "tokens", "output.results": tmp_path / "train.json",
                        "output.metrics": tmp_path / "metrics.jsonl"}
        values |= {name.replace("__", "."): value for name, value in extra.items()} | {"device": device}
        return ["train", *options({key: value for key, value in values.items() if value is not None})]

    return make


@pytest.fixture
def folder_of_programs(tmp_path):
    """A folder with `fsdpp` alone: the tests put what they like beside it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy2(PROGRAM, folder / "fsdpp")
    return folder


def one_line(result):
    assert result.code == 2 and result.out == b"", result
    (line,) = result.lines()
    assert line.startswith("fsdpp: "), line
    return line


@pytest.mark.parametrize("name", ["gpu", "CUDA", "cuda:0", ""])
def test_a_device_that_is_none(command, name):
    line = one_line(run(command(name)))
    assert f'--device "{name}"' in line and "one of auto, cpu, cuda, cuda-shared" in line


def test_a_misspelled_option_is_named(command):
    line = one_line(run([*command(None), "--devise", "cuda"]))
    assert "--devise is not an option" in line and "did you mean --device?" in line


@pytest.mark.parametrize("device", ["cuda", "cuda-shared"])
def test_cuda_without_a_program_for_gpus(command, folder_of_programs, device):
    line = one_line(run(command(device), program=folder_of_programs / "fsdpp"))
    assert f"--device {device}: this program computes on CPUs alone, and there is no {folder_of_programs}/fsdpp-cuda" in line
    assert ("nor does this machine show an NVIDIA GPU" in line) == (not shows_gpu())
    assert "--device cpu" in line and "CUDA toolkit" in line


def test_wrong_values_are_found_before_another_program_goes_on(command, folder_of_programs):
    line = one_line(run(command("cuda", model__heads=3), program=folder_of_programs / "fsdpp"))
    assert "model.heads = 3" in line


def test_cuda_hands_over_to_the_program_for_gpus(command, folder_of_programs):
    """Same process, same arguments, found beside the program wherever it is called from and under whatever name."""
    other = folder_of_programs / "fsdpp-cuda"
    other.write_text('#!/bin/sh\necho "$$"\nprintf "%s\\n" "$@"\nexit 7\n')
    other.chmod(0o755)
    link = folder_of_programs.parent / "link"
    link.symlink_to(folder_of_programs / "fsdpp")
    arguments = list(map(str, [*command("cuda"), "--ranks", "2", "--sample.prompt", " two words "]))
    started = subprocess.Popen([link, *arguments], cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 7 and err == ""
    assert out.split("\n") == [str(started.pid), *arguments, ""]


def test_a_program_for_gpus_that_cannot_be_started(command, folder_of_programs):
    other = folder_of_programs / "fsdpp-cuda"
    other.write_bytes(b"\x7fELF, but not really")
    other.chmod(0o755)
    result = run(command("cuda"), program=folder_of_programs / "fsdpp")
    assert result.code == 1, result
    assert f"cannot start {other}" in result.lines()[0] and "--device cpu" in result.lines()[0]


def test_cpu_needs_no_program_for_gpus_and_starts_none(command, folder_of_programs, tmp_path):
    other = folder_of_programs / "fsdpp-cuda"
    other.write_text("#!/bin/sh\nexit 7\n")
    other.chmod(0o755)
    result = run([*command("cpu"), "--ranks", "2"], program=folder_of_programs / "fsdpp")
    assert result.code == 0, result
    assert "device  CPU, fp32, lanes through shared memory\n" in result.out.decode()
    assert events(tmp_path / "metrics.jsonl")[0]["device"] == "cpu"


@pytest.mark.skipif(shows_gpu(), reason="this machine has a GPU")
@pytest.mark.parametrize("device", ["auto", None])
def test_auto_stays_on_cpus_where_there_is_no_gpu(command, device):
    result = run([*command(device), "--ranks", "2"])
    assert result.code == 0 and result.err == b"", result
    assert "device  CPU, fp32, lanes through shared memory\n" in result.out.decode()


@needs_gpu_program
@pytest.mark.parametrize("device", ["cuda", "cuda-shared"])
def test_the_program_for_gpus_without_a_gpu(command, device):
    line = one_line(run(command(device), NO_GPU, program=GPU_PROGRAM))
    assert f"--device {device}: there is no GPU that this process can use" in line
    assert "nvidia-smi" in line and "CUDA_VISIBLE_DEVICES" in line and "--device cpu" in line


@needs_gpu_program
def test_the_whole_way_to_the_program_for_gpus(command):
    line = one_line(run(command("cuda"), NO_GPU))
    assert "--device cuda: there is no GPU that this process can use" in line


@needs_gpu_program
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_program_for_gpus_trains_on_cpus_and_says_why(command, tmp_path, ranks):
    """The same bits as the program for CPUs, and no word of it with --device cpu."""
    losses = {}
    for device, program in (("auto", GPU_PROGRAM), ("cpu", GPU_PROGRAM), ("cpu", PROGRAM)):
        result = run([*command(device), "--ranks", str(ranks)], NO_GPU, program=program)
        assert result.code == 0, result
        said = "; on CPUs since there is no GPU that this process can use" in result.out.decode()
        assert said == (device == "auto")
        steps = [event for event in events(tmp_path / "metrics.jsonl") if event["event"] == "step"]
        losses[device, program.name] = [(event["loss"], event["gradient_norm"]) for event in steps]
    first, *others = losses.values()
    assert len(first) == FEW["train.steps"] and all(other == first for other in others)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_on_cpus_learns_too(command, tmp_path, ranks):
    values = {"train__steps": 40, "train__warmup_steps": 5}
    runs = {}
    for dtype in ("auto", "fp32", "bf16", "bf16, all of it"):
        extra = {"sharding__main_weights": "model_dtype", "sharding__accumulation_dtype": "bf16"} if "all" in dtype else {}
        result = run([*command("cpu", sharding__model_dtype=dtype.split(",")[0], **extra, **values), "--ranks", str(ranks)])
        assert result.code == 0, result
        assert ("CPU, bf16 with fp32 main weights" in result.out.decode()) == (dtype == "bf16")
        assert ("CPU, bf16, main weights too" in result.out.decode()) == ("all" in dtype)
        runs[dtype] = [event["loss"] for event in events(tmp_path / "metrics.jsonl") if event["event"] == "step"]
    assert runs["auto"] == runs["fp32"] != runs["bf16"]
    assert runs["bf16"][0] == pytest.approx(runs["fp32"][0], rel=1e-2)
    assert runs["bf16"][-1] == pytest.approx(runs["fp32"][-1], rel=0.1)
    assert runs["bf16, all of it"][0] == pytest.approx(runs["fp32"][0], rel=1e-2)
    assert runs["bf16, all of it"][-1] < runs["fp32"][0] - 1  # it learns, if less: small updates are rounded away
