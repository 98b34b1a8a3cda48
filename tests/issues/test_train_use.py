"""What went wrong when `fsdpp train` was used in ways that nobody had tried."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "dist"))
from train_program import PATIENCE_S, PROGRAM, TINY, environment, events, options, run, write_text  # noqa: E402

CONFIG = "[model]\ndim = 16\nlayers = 1\nheads = 2\nkv_heads = 1\nffn = 32\nsequence = 16\nreshard_after_forward = 2\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "book.txt")


@pytest.fixture
def base(text, tmp_path):
    values = TINY | {"data.text": text, "data.cache": tmp_path / "tokens", "output.results": tmp_path / "train.json"}
    values |= {"train.steps": 3, "train.warmup_steps": 0, "sample.bytes": 10}
    return ["train", *options(values)]


def assert_refused(result, *parts):
    lines = result.lines()
    assert result.code == 2 and len(lines) == 1, result
    for part in parts:
        assert part in lines[0], lines[0]


def test_results_go_through_links_and_into_devices(base, tmp_path):
    """They replaced them: a link by a file, and (for root) /dev/null."""
    target = tmp_path / "target.json"
    link = tmp_path / "link.json"
    link.symlink_to(target.name)
    for there_before in (False, True):
        assert target.exists() == there_before
        assert run([*base, "--results", link]).code == 0
        assert link.is_symlink() and json.loads(target.read_text())["steps"] == 3
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        assert run([*base, "--results", pipe]).code == 0
        assert json.loads(reader.communicate()[0])["steps"] == 3
    assert pipe.is_fifo()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"tokens", "link.json", "target.json", "pipe"}


def test_results_that_do_not_fit_leave_nothing(base, tmp_path):
    (tmp_path / "train.json.new").symlink_to("/dev/full")
    result = run(base)
    assert result.code == 1 and "No space left" in result.lines()[-1], result
    assert not (tmp_path / "train.json.new").is_symlink() and not (tmp_path / "train.json").exists()


def test_a_configuration_that_can_be_read_once_reaches_all_ranks(text, tmp_path):
    """Ranks read it again, found nothing and trained the default model."""
    metrics = tmp_path / "metrics.jsonl"
    values = {"data.text": text, "data.cache": tmp_path / "tokens", "output.metrics": metrics, "output.results": ""}
    values |= {"device": "cpu", "train.steps": 2, "train.batch": 4, "train.warmup_steps": 0, "sample.bytes": 0}
    config = CONFIG.replace("reshard", "[sharding]\nreshard")  # whose number was refused in a file
    done = subprocess.run(
        [PROGRAM, "train", "--config", "/dev/stdin", "--ranks", "2", *options(values)],
        env=environment(),
        input=config.encode(),
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done
    assert b"1 layers of width 16" in done.stdout, done.stdout
    assert events(metrics)[0]["tokens_per_step"] == 4 * 16


def test_a_training_that_diverged_says_so(base, tmp_path):
    """It went on to the end, where a message of libtorch's about probabilities was all."""
    wild = ["--learning-rate", "100", "--weight-decay", "100", "--steps", "60", "--eval-every", "0"]
    result = run([*base, *wild])
    assert result.code == 1, result
    assert "training has diverged; lower train.learning_rate (100)" in result.lines()[-1], result.lines()
    assert not (tmp_path / "train.json").exists()


def test_the_smallest_temperature_takes_the_likeliest_byte(base, tmp_path):
    samples = []
    for temperature in ("0", "5e-324"):
        assert run([*base, "--temperature", temperature]).code == 0
        samples.append(json.loads((tmp_path / "train.json").read_text())["sample"])
    assert samples[0] == samples[1]


@pytest.mark.parametrize("words", [["--", "--steps", "9"], ["--", "x"]])
def test_words_behind_a_double_hyphen_are_not_dropped(base, words):
    assert_refused(run([*base, *words]), words[1])


def test_nothing_behind_an_equals_sign_is_an_empty_value(base, tmp_path):
    """It took the next word for its value."""
    assert run([*base, "--results=", "--steps", "2"]).code == 0
    assert not (tmp_path / "train.json").exists()
    assert_refused(run([*base, "--steps=", "--results", ""]), '--train.steps ""', "a whole number")


def test_a_path_that_cannot_be_looked_at_is_named_with_its_key(base):
    assert_refused(run([*base, "--results", "/tmp/" + "x" * 300]), "output.results", "File name too long", "correct")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_text_without_permission_says_so(base, tmp_path):
    secret = write_text(tmp_path / "secret.txt")
    secret.chmod(0)
    assert_refused(run([*base, "--data.text", secret]), "data.text", "Permission denied")


@pytest.mark.parametrize("key", ["output.results", "output.metrics"])
def test_outputs_do_not_overwrite_inputs(base, text, tmp_path, key):
    before = text.read_bytes()
    assert_refused(run([*base, f"--{key}", text]), key, "is data.text too")
    link = tmp_path / "link"
    link.symlink_to(text)
    assert_refused(run([*base, f"--{key}", link]), key, "is data.text too")
    assert text.read_bytes() == before
    config = tmp_path / "config.toml"
    config.write_text("[train]\nsteps = 2\n")
    assert_refused(run([*base, "--config", config, f"--{key}", config]), key, "is --config too")
    same = tmp_path / "same.json"
    assert_refused(run([*base, "--metrics", same, "--results", same]), "output.results", "is output.metrics too")


def test_a_closed_standard_output_is_not_another_file(base, tmp_path):
    """The metrics file got its number, and with it what was meant for the user."""
    metrics = tmp_path / "metrics.jsonl"
    command = [str(PROGRAM), *map(str, base), "--ranks", "2", "--metrics", str(metrics)]
    done = subprocess.run(
        ["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *command], env=environment(), timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0
    assert {event["event"] for event in events(metrics)} == {"start", "step", "validation", "end"}


def test_a_full_standard_output_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "--help"], env=environment(), stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1 and b"cannot write to standard output: No space left" in done.stderr


def test_what_libtorch_lacks_memory_for_has_a_remedy(base):
    result = run([*base, "--model.dim", "1048576", "--model.ffn", "4194304"])
    assert result.code == 1, result
    assert "use more ranks, a smaller model or batch" in result.lines()[-1], result.lines()


@pytest.mark.parametrize("heads, dim", [("3", "36"), ("64", "128")])
def test_the_width_that_is_named_is_taken(base, heads, dim):
    few = ["--model.heads", heads, "--model.kv_heads", "1"]
    assert_refused(run([*base, *few]), f"for example model.dim = {dim}")
    assert run([*base, *few, "--model.dim", dim]).code == 0


def test_damaged_tokens_are_named(base, tmp_path):
    assert run(base).code == 0
    (tokens,) = (tmp_path / "tokens").glob("*.tokens")
    content = bytearray(tokens.read_bytes())
    content[len(content) // 8 :] = b"\xff" * (len(content) - len(content) // 8)
    when = tokens.stat()
    tokens.write_bytes(content)
    os.utime(tokens, ns=(when.st_atime_ns, when.st_mtime_ns))
    result = run(base)
    assert result.code == 1 and "are damaged; remove data.cache" in result.lines()[-1], result.lines()
