"""Bad input to `fsdpp train`: one clear line, exit code 2, before any rank is started."""

import gzip
import os
import signal
import subprocess

import pytest

from train_program import ROOT, TINY, job, options, run, wait_for, write_text

QUICK_S = 20  # far below any timeout of ranks, far above what it takes


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def base(text, tmp_path):
    """Options of a good tiny run, to which a test adds what is wrong."""
    values = TINY | {"data.text": text, "data.cache": tmp_path / "tokens", "output.results": tmp_path / "train.json"}
    return ["train", *options(values)]


def assert_one_line(result, *parts):
    assert result.code == 2, result
    assert result.out == b""
    lines = result.lines()
    assert len(lines) == 1 and lines[0].startswith("fsdpp: "), lines
    for part in parts:
        assert part in lines[0], lines[0]
    assert result.seconds < QUICK_S


COMMAND_LINES = {
    "unknown option": (["--train.step", "5"], ["--train.step is not an option", "did you mean --train.steps?"]),
    "unknown option =": (["--modl.dim=5"], ["--modl.dim is not an option", "did you mean --model.dim?"]),
    "nothing near": (["--zzzzzzzz", "5"], ["--zzzzzzzz is not an option", "--help"]),
    "stray word": (["configs/small.toml"], ['"configs/small.toml" is not expected', "--"]),
    "no value": (["--train.steps"], ["--train.steps", "required", "--help"]),
    "text for a whole number": (["--train.steps", "many"], ["--train.steps", '"many"', "a whole number from 1"]),
    "fraction": (["--model.layers", "1.5"], ["--model.layers", '"1.5"', "a whole number", "--model.layers 4"]),
    "empty": (["--model.layers", ""], ["--model.layers", '""', "a whole number"]),
    "too small": (["--train.steps", "0"], ["--train.steps 0", "from 1"]),
    "negative": (["--train.learning_rate", "-1"], ["--train.learning_rate -1", "above 0", "0.003"]),
    "not finite": (["--train.clip_norm", "nan"], ["--train.clip_norm", "nan", "a number above 0"]),
    "overflow": (["--train.learning_rate", "1e999"], ["--train.learning_rate", "1e999", "a number"]),
    "beta of one": (["--train.beta2", "1"], ["--train.beta2 1", "below 1"]),
    "not true or false": (["--model.tied", "yes"], ["--model.tied", '"yes"', "true or false"]),
    "no such strategy": (
        ["--sharding.strategy", "zero"],
        ["--sharding.strategy", '"zero"', "one of optim_grads_params, optim_grads, optim, no_shard"],
    ),
    "a wire without a way": (
        ["--sharding.strategy", "no_shard", "--sharding.wire_dtype", "bf16"],
        ['sharding.wire_dtype = "bf16"', 'sharding.strategy = "no_shard"', "expected fp32"],
    ),
    "a mesh of other ranks": (["--mesh", "3x1"], ['sharding.mesh = "3x1"', "4 ranks", "R * S = 4", "2x2"]),
    "no mesh": (["--mesh", "2x2x"], ['sharding.mesh = "2x2x"', "expected flat, or RxS"]),
    "offload of nothing": (
        ["--offload", "true", "--strategy", "no_shard"],
        ["sharding.offload = true", '"no_shard"', "set sharding.strategy"],
    ),
    "neighbours that do not fit": (
        ["--reshard-after-forward", "3"],
        ["sharding.reshard_after_forward = 3", "does not divide the 4 ranks"],
    ),
    "no neighbours": (
        ["--reshard-after-forward", "some"],
        ['sharding.reshard_after_forward = "some"', "expected true, false, or a number"],
    ),
    "neighbours of weights that stay": (
        ["--reshard-after-forward", "2", "--strategy", "optim"],
        ["sharding.reshard_after_forward = 2", '"optim"', "weights stay"],
    ),
    "sums over replicas in bf16": (
        ["--accumulation-dtype", "bf16", "--mesh", "2x2"],
        ['sharding.accumulation_dtype = "bf16"', 'sharding.mesh = "2x2"', "fp32"],
    ),
    "offload in bf16": (
        ["--main-weights", "model_dtype", "--offload", "true"],
        ["sharding.offload = true", 'sharding.main_weights = "model_dtype"', "set both to fp32"],
    ),
    "no such recompute": (["--recompute", "all"], ["--model.recompute", '"all"', "one of none, reentrant"]),
    "no replicas": (
        ["--sharding.optimizer_over_replicas", "true"],
        ["sharding.optimizer_over_replicas = true", 'sharding.mesh = "flat"', "set sharding.mesh"],
    ),
    "nothing to shard over replicas": (
        ["--sharding.mesh", "2x2", "--sharding.optimizer_over_replicas", "true", "--sharding.strategy", "no_shard"],
        ["sharding.optimizer_over_replicas = true", '"no_shard"', "set sharding.strategy"],
    ),
    "heads": (["--model.heads", "3"], ["model.heads = 3", "model.dim = 32", "does not divide", "set model"]),
    "kv heads": (
        ["--model.heads", "4", "--model.kv_heads", "3"],
        ["model.kv_heads = 3", "model.heads = 4", "set model.kv_heads"],
    ),
    "odd heads": (["--model.dim", "34"], ["model.dim = 34", "odd size 17", "for example to 36"]),
    "batch": (["--train.batch", "6"], ["train.batch = 6", "4 * 1 = 4", "for example to 8"]),
    "microbatches": (["--train.microbatches", "3"], ["train.batch = 8", "4 * 3 = 12", "for example to 12"]),
    "warm-up": (["--train.warmup_steps", "41"], ["train.warmup_steps = 41", "train.steps = 40"]),
    "no text": (["--data.text", ""], ["data.text is not set", "--data.text PATH"]),
    "missing text": (["--data.text", "/no/such/text"], ['data.text = "/no/such/text"', "No such file", "correct"]),
    "text is no file": (["--data.text", "/dev/null"], ['data.text = "/dev/null"', "no file or folder"]),
    "sequence": (["--model.sequence", "50000"], ["model.sequence = 50000", "data.text", "longer than the text"]),
    "sequence and validation": (
        ["--model.sequence", "5000"],
        ["model.sequence = 5000", "data.validation_fraction = 0.1", "raise"],
    ),
    "no cache": (["--data.cache", "/dev/null/tokens"], ["data.cache", "/dev/null/tokens"]),
    "results in no folder": (["--output.results", "/dev/null/a.json"], ["output.results", "/dev/null/a.json"]),
    "metrics is a folder": (["--output.metrics", "/tmp"], ['output.metrics = "/tmp"', "directory"]),
    "missing file": (["--config", "/no/such.toml"], ["--config", "/no/such.toml", "No such file"]),
    "folder as file": (["--config", "/tmp"], ["--config", "/tmp", "directory"]),
    "ranks": (["--ranks", "0"], ["--ranks", '"0"', "a whole number from 1"]),
    "ranks text": (["--ranks", "four"], ["--ranks", '"four"', "--ranks 4"]),
}


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_command_line(base, name):
    wrong, parts = COMMAND_LINES[name]
    assert_one_line(run([*base, "--ranks", "4", *wrong]), *parts)


FILES = {
    "unknown key": ("[train]\nlerning_rate = 1", [":2:", "train.lerning_rate", "did you mean train.learning_rate?"]),
    "unknown section": ("[modle]\ndim = 4", [":1:", "[modle]", "did you mean model?"]),
    "key without section": ("dim = 4", [":1:", "dim is not a key", "did you mean model.dim?"]),
    "section as key": ("model = 4", [":1:", "model is a section", "[model]"]),
    "text for a number": ('[model]\n\ndim = "wide"', [":3:", "model.dim", '"wide"', "a whole number", "dim = 128"]),
    "number for a text": ("[data]\ntext = 5", [":2:", "data.text = 5", "a text"]),
    "number for a truth": ("[model]\ntied = 1", [":2:", "model.tied = 1", "true or false"]),
    "list": ("[model]\nheads = [1, 2]", [":2:", "model.heads is a list", "heads = 4"]),
    "date": ("[train]\nsteps = 1979-05-27", [":2:", "train.steps", "date", "a whole number"]),
    "out of range": ("[train]\nmin_lr_ratio = 2", [":2:", "train.min_lr_ratio = 2", "from 0 to 1"]),
    "line break in a value": ('[sharding]\nstrategy = "a\\nb"', [":2:", "sharding.strategy", '"a\\nb"', "one of"]),
    "no value": ("[train]\nsteps =", [":2:", "not TOML"]),
    "given twice": ("[train]\nsteps = 1\nsteps = 2", [":3:", "not TOML", "steps"]),
    "not text": (b"\xff\xfe\x00", [":1:", "not TOML", "utf-8"]),
}


@pytest.mark.parametrize("name", FILES)
def test_file(tmp_path, text, name):
    content, parts = FILES[name]
    path = tmp_path / "wrong.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run(["train", "--config", path, "--ranks", "4", "--data.cache", tmp_path / "tokens"])
    assert_one_line(result, f"{path}{parts[0]}", *parts[1:])


def test_damaged_text(base, tmp_path, text):
    damaged = tmp_path / "damaged.gz"
    damaged.write_bytes(gzip.compress(text.read_bytes())[:1000])
    assert_one_line(run([*base, "--ranks", "4", "--data.text", damaged]), "data.text", str(damaged))
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert_one_line(run([*base, "--ranks", "4", "--data.text", empty]), "data.text", str(empty))


def test_without_a_command():
    assert_one_line(run([]), "no command", "train", "--help")
    assert_one_line(run(["trian"]), '"trian"', "train", "--help")
    assert_one_line(run(["--verson"]), "--verson", "did you mean --version?")


def test_help_and_version():
    version = run(["--version"])
    assert version.code == 0 and version.out.startswith(b"fsdpp 0.") and version.err == b""
    help_text = run(["--help"])
    assert help_text.code == 0 and b"train" in help_text.out and b"--version" in help_text.out
    train = run(["train", "--help"])
    assert train.code == 0
    for key in ["--config", "--ranks", *(f"--{key}" for key in TINY)]:
        assert key.encode() in train.out, key


def test_example_configurations_are_valid():
    """Each file in configs/ passes every check: what stops it is the text that it is not given."""
    files = sorted((ROOT / "configs").glob("*.toml"))
    assert files
    for path in files:
        assert_one_line(run(["train", "--config", path, "--ranks", "4"]), "data.text is not set")


@pytest.mark.parametrize("wrong", [["--model.heads", "3"], ["--data.text", "/no/such/text"], ["--train.step", "1"]])
def test_under_a_launcher_rank_0_alone_speaks(base, wrong):
    """As under torchrun or mpirun: every process checks before it meets the others, and all exit with 2."""
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    results = [run([*base, *wrong], launched | {"RANK": str(rank)}) for rank in range(2)]
    assert_one_line(results[0])
    assert results[1].code == 2 and results[1].out == b"" and results[1].err == b""


def test_ranks_against_a_launcher(base):
    launched = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert_one_line(run([*base, "--ranks", "4"], launched), "--ranks 4", "2", "leave --ranks out")


def test_the_last_of_several_counts(base):
    """A script's own options can be overridden at the end of its command line."""
    assert_one_line(run([*base, "--model.heads", "3", "--model.heads", "5"]), "model.heads = 5")


def test_interrupt_while_the_text_is_prepared(base, tmp_path):
    cache = tmp_path / "held"
    options_here = [*base, "--data.cache", cache]
    assert run([*options_here, "--model.sequence", "50000"]).code == 2  # makes the tokens, and the lock file beside
    (lock,) = cache.glob(".*.lock")
    for tokens in cache.glob("*.tokens"):
        tokens.unlink()
    # A lock that another process holds stands for a text that takes long.
    with subprocess.Popen(["flock", lock, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdin.write(b"held\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"held\n"
        with job([*options_here, "--ranks", "4"]) as running:
            wait_for(lambda: os.path.realpath(lock) in open_files(running.process.pid), "the program at the lock")
            running.process.send_signal(signal.SIGINT)
            result = running.end()
            assert result.code == 130, result
            assert result.seconds < 2
            running.assert_nothing_left()
        holder.stdin.close()


def open_files(pid):
    try:
        return {os.path.realpath(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return set()
