"""`fsdpp train` when ranks are killed, stopped, fail or are interrupted: who is named, how fast all end, what is left."""

import contextlib
import errno
import fcntl
import os
import pty
import re
import signal
import subprocess
import termios
import time

import pytest

from train_program import (
    TINY,
    TORCHRUN,
    PROGRAM,
    events,
    job,
    options,
    state,
    wait_for,
    write_text,
)

RANKS = 4
TIMEOUT_S = 5
# Far more steps, and a far longer sample, than any test waits for.
ENDLESS = TINY | {"train.steps": 1_000_000, "train.eval_every": 0, "sharding.timeout_s": TIMEOUT_S}
ENDLESS_SAMPLE = TINY | {"train.steps": 2, "train.warmup_steps": 0, "sample.bytes": 1_000_000} | {
    "sharding.timeout_s": TIMEOUT_S
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def arguments(text, tmp_path, metrics):
    def make(values, *more):
        places = {
            "data.text": text,
            "data.cache": tmp_path / "tokens",
            "output.results": tmp_path / "train.json",
            "output.metrics": metrics,
        }
        return ["train", *options(values | places), *more]

    return make


def at_start(running, metrics):
    """The ranks exist; where they are on their way to each other is open."""
    return running.wait_for_ranks(RANKS)


def in_steps(running, metrics):
    wait_for(lambda: len([e for e in events(metrics) if e["event"] == "step"]) >= 3, "three steps")
    return running.wait_for_ranks(RANKS)


def in_sample(running, metrics):
    wait_for(lambda: any(e["event"] == "validation" for e in events(metrics)), "the validation before the sample")
    return running.wait_for_ranks(RANKS)


POINTS = {"at_start": (at_start, ENDLESS), "in_steps": (in_steps, ENDLESS), "in_sample": (in_sample, ENDLESS_SAMPLE)}


def until_resting(pids):
    """Until no process of `pids` computes any more: all wait for someone. Gives up where they never rest."""

    def resting():
        before = [state(pid) for pid in pids]
        time.sleep(0.3)  # a rank that waits wakes up now and then, for less than a tick
        after = [state(pid) for pid in pids]
        return all(a[1] - b[1] <= 3 for a, b in zip(after, before, strict=True))

    wait_for(resting, "ranks that wait")


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_killed_rank(arguments, metrics, point, victim):
    reach, values = POINTS[point]
    with job(arguments(values, "--ranks", str(RANKS))) as running:
        ranks = reach(running, metrics)
        os.kill(ranks[victim], signal.SIGKILL)
        result = running.end()
        assert result.code == 128 + signal.SIGKILL, result
        assert result.seconds < 2 * TIMEOUT_S
        named = [line for line in result.lines() if line.startswith(f"fsdpp: rank {victim} failed first")]
        assert len(named) == 1 and "SIGKILL" in named[0], result.lines()
        running.assert_nothing_left()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_stopped_rank(arguments, metrics, point, victim):
    """Who reads what the stopped rank has published does not need it: the others end their sample, and wait then."""
    reach, values = POINTS[point]
    if point == "in_sample":
        values = values | {"sample.bytes": 4000}
    with job(arguments(values, "--ranks", str(RANKS))) as running:
        ranks = reach(running, metrics)
        os.kill(ranks[victim], signal.SIGSTOP)
        result = running.end()
        assert result.code > 0, result
        assert result.seconds < 2 * TIMEOUT_S
        assert any(re.search(rf"rank {victim}\b", line) for line in result.lines()), result.lines()
        running.assert_nothing_left()


def test_failing_rank_is_named_and_its_code_returned(arguments, metrics):
    metrics.symlink_to("/dev/full")  # rank 0 cannot write: an error of the environment, with exit code 1
    with job(arguments(ENDLESS, "--ranks", str(RANKS))) as running:
        result = running.end()
        assert result.code == 1, result
        lines = result.lines()
        assert any(line.startswith("[rank 0] fsdpp: cannot write") and str(metrics) in line for line in lines), lines
        assert [line for line in lines if line.startswith("fsdpp:")] == [
            "fsdpp: rank 0 failed first, with exit code 1; stopping the other ranks"
        ]
        running.assert_nothing_left()


def test_ranks_told_to_stop_say_what_they_waited_for(arguments, metrics):
    values = ENDLESS | {"sharding.timeout_s": 600}
    with job(arguments(values, "--ranks", str(RANKS))) as running:
        ranks = in_steps(running, metrics)
        os.kill(ranks[1], signal.SIGSTOP)
        others = [pid for rank, pid in ranks.items() if rank != 1]
        until_resting(others)
        running.process.send_signal(signal.SIGTERM)
        result = running.end()
        assert result.code == 128 + signal.SIGTERM, result
        assert result.seconds < 2
        for rank in (0, 2, 3):
            said = [line for line in result.lines() if line.startswith(f"[rank {rank}] ")]
            assert len(said) == 1 and re.search(r"wait\w* for rank \d", said[0]), result.lines()
        assert any("rank 1" in line for line in result.lines() if not line.startswith("[rank 1]")), result.lines()
        running.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("point", POINTS)
def test_interrupt(arguments, metrics, point, number):
    reach, values = POINTS[point]
    with job(arguments(values, "--ranks", str(RANKS))) as running:
        reach(running, metrics)
        running.process.send_signal(number)
        result = running.end()
        assert result.code == 128 + number, result
        assert result.seconds < 2
        assert result.lines()[-1] == f"fsdpp: stopped by {number.name}"
        assert not any("failed" in line or "gone" in line for line in result.lines()), result.lines()
        running.assert_nothing_left()


def test_interrupt_of_one_rank_alone(arguments, metrics):
    with job(arguments(ENDLESS, "--ranks", "1")) as running:
        wait_for(lambda: len(events(metrics)) > 3, "three steps")
        running.process.send_signal(signal.SIGINT)
        result = running.end()
        assert result.code == 130 and result.seconds < 2, result
        assert len(result.lines()) == 1, result.lines()


def test_several_interrupts(arguments, metrics):
    with job(arguments(ENDLESS, "--ranks", str(RANKS))) as running:
        in_steps(running, metrics)
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            running.process.send_signal(number)
        result = running.end()
        assert result.code == 130 and result.seconds < 2, result
        running.assert_nothing_left()


@pytest.mark.parametrize("point", ["at_start", "in_steps"])
def test_killed_launcher_leaves_no_rank(arguments, metrics, point):
    reach, values = POINTS[point]
    with job(arguments(values, "--ranks", str(RANKS))) as running:
        reach(running, metrics)
        running.process.kill()
        running.assert_nothing_left()


def test_ctrl_c_on_a_terminal(arguments, metrics):
    """The terminal's own SIGINT, to the foreground group, with the progress bar on it."""
    control, terminal = pty.openpty()

    def own_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal, "preexec_fn": own_terminal}
    with job(arguments(ENDLESS, "--ranks", str(RANKS)), {"TERM": "xterm"}, **streams) as running:
        os.close(terminal)
        screen = Screen(control)
        wait_for(lambda: b"\r\x1b[K[" in screen.read() and b"/1000000" in screen.seen, "the progress bar")
        begin = time.monotonic()
        os.write(control, b"\x03")
        wait_for(lambda: screen.read() is not None and running.process.poll() is not None, "the end")
        assert time.monotonic() - begin < 2
        assert running.process.returncode == 130
        screen.read()
        assert b"fsdpp: stopped by SIGINT" in screen.seen
        running.assert_nothing_left()
    os.close(control)


def test_ctrl_z_and_on(arguments, metrics):
    """Ctrl-Z stops the ranks with the launcher, and they go on with it, as if no time had passed."""
    with job(arguments(ENDLESS, "--ranks", str(RANKS))) as running:
        ranks = in_steps(running, metrics)
        running.process.send_signal(signal.SIGTSTP)
        for pid in [running.process.pid, *ranks.values()]:
            wait_for(lambda pid=pid: state(pid)[0] == "T", "a stopped process")
        time.sleep(TIMEOUT_S + 1)  # nobody may blame another for this time
        steps = len(events(metrics))
        running.process.send_signal(signal.SIGCONT)
        wait_for(lambda: len(events(metrics)) > steps + 3, "more steps")
        running.process.send_signal(signal.SIGINT)
        assert running.end().code == 130
        running.assert_nothing_left()


class Screen:
    """What a program wrote to its terminal."""

    def __init__(self, control):
        self.control = control
        self.seen = b""
        os.set_blocking(control, False)

    def read(self):
        with contextlib.suppress(BlockingIOError):
            try:
                while data := os.read(self.control, 65536):
                    self.seen += data
            except OSError as error:
                if error.errno not in (errno.EIO, errno.EAGAIN):  # EIO: all of the program is gone
                    raise
        return self.seen


def torchrun_job(arguments):
    command = ["--nproc-per-node", str(RANKS), "--no-python", PROGRAM, *arguments]
    return job(command, program=TORCHRUN, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_torchrun_interrupt(arguments, metrics):
    with torchrun_job(arguments(ENDLESS)) as running:
        in_steps(running, metrics)
        running.process.send_signal(signal.SIGINT)
        wait_for(lambda: not running.ranks(), "the end of all ranks", timeout=2)
        result = running.end()
        assert result.code != 0, result
        running.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_torchrun_lost_rank(arguments, metrics, number):
    with torchrun_job(arguments(ENDLESS)) as running:
        ranks = in_steps(running, metrics)
        os.kill(ranks[2], number)
        others = {pid for rank, pid in ranks.items() if rank != 2}
        wait_for(lambda: not others & set(running.pids()), "the end of the other ranks", timeout=2 * TIMEOUT_S)
        result = running.end()
        assert result.code != 0
        assert any(re.search(r"rank\W+2\b", line) for line in result.lines()), result.lines()
        running.assert_nothing_left()


def test_lines_of_ranks_come_whole(arguments, metrics):
    """Every line on stderr begins with its rank or with the program's name, however the ranks' writes interleave."""
    with job(arguments(ENDLESS, "--ranks", "4")) as running:
        ranks = in_steps(running, metrics)
        os.kill(ranks[3], signal.SIGKILL)
        result = running.end()
        assert result.err.endswith(b"\n")
        for line in result.lines():
            assert re.match(r"\[rank [0-3]\] fsdpp: .|fsdpp: .", line), result.lines()
        assert not re.search(rb"[^\n]\[rank ", result.err), result.err
        assert b"[rank" not in result.out  # rank 0 alone has stdout
