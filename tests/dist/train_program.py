"""Starts `fsdpp train` and looks at its processes, for the tests of this folder."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = pathlib.Path(
    os.environ.get("FSDPP_PROGRAM", ROOT / "build" / os.environ.get("FSDPP_PRESET", "release") / "apps/fsdpp/fsdpp")
)
PROGRAM_NAMES = {PROGRAM.name, "fsdpp-cuda"}
TORCHRUN = pathlib.Path(sys.executable).parent / "torchrun"
MARKER = "FSDPP_TEST_RUN"  # in the environment of everything a run starts, so that all of it can be found
PATIENCE_S = 60  # for what should take a second: the machine may be busy

# What these tests look at is the same on any machine: also where there are GPUs.
TINY = {
    "device": "cpu",
    "model.dim": 32,
    "model.layers": 2,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn": 64,
    "model.sequence": 32,
    "train.batch": 8,
    "train.steps": 40,
    "train.warmup_steps": 5,
    "train.learning_rate": 0.01,
    "train.log_every": 1,
    "train.eval_every": 20,
    "train.eval_batches": 2,
    "data.validation_fraction": 0.1,
    "sample.bytes": 40,
}


def write_text(path, size=40_000):
    """A text that is easy to learn, with bytes that are not UTF-8."""
    words = [b"the", b"sharded", b"llama", b"reads", b"na\xefve", b"gradients", b"\xff\xfe", b"and", b"sleeps"]
    pick = random.Random(1)
    text = b""
    while len(text) < size:
        text += b" ".join(pick.choice(words) for _ in range(8)) + b".\n"
    path.write_bytes(text)
    return path


def options(values):
    """A dict as command line options."""
    out = []
    for key, value in values.items():
        out += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return out


def environment(extra=None):
    """The environment without any launcher's variables, plus `extra`."""
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC", "OMPI_", "PMI_", "PMIX_", "SLURM_", "OMP_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return base | {"OMP_NUM_THREADS": "1", MARKER: uuid.uuid4().hex} | (extra or {})


@dataclasses.dataclass
class Result:
    code: int
    out: bytes
    err: bytes
    seconds: float

    def lines(self):
        return self.err.decode(errors="replace").splitlines()


def run(arguments, extra=None, timeout=PATIENCE_S, program=PROGRAM):
    """Runs the program to its end."""
    begin = time.monotonic()
    done = subprocess.run(
        [program, *arguments], env=environment(extra), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout
    )
    return Result(done.returncode, done.stdout, done.stderr, time.monotonic() - begin)


def wait_for(condition, what, timeout=PATIENCE_S):
    """Polls until `condition()` is true, and returns what it gave."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"did not come within {timeout} s: {what}")


def read_proc(pid, name):
    try:
        return pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def variables(pid):
    pairs = (entry.partition(b"=") for entry in read_proc(pid, "environ").split(b"\0"))
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def state(pid):
    """(state letter, CPU ticks used) of a process; ("", 0) when there is none."""
    fields = read_proc(pid, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), int(fields[11]) + int(fields[12])) if fields else ("", 0)


def shared_files():
    """What lies in /dev/shm under a name that could be ours or torch's."""
    return {path.name for path in pathlib.Path("/dev/shm").glob("*") if "fsdpp" in path.name or "torch" in path.name}


class Job:
    """A running program with everything below it."""

    def __init__(self, arguments, extra=None, program=PROGRAM, **popen):
        self.environment = environment(extra)
        self.shared_before = shared_files()
        self.process = subprocess.Popen(
            [program, *arguments],
            env=self.environment,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | popen,
        )

    def pids(self):
        """All living processes of the run, whoever is their parent."""
        marker = self.environment[MARKER]
        numbers = [int(path.name) for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in numbers if variables(pid).get(MARKER) == marker and state(pid)[0] not in ("", "Z")]

    def ranks(self):
        """{rank: pid} of the living processes that are ranks of the program."""
        found = {}
        for pid in self.pids():
            rank = variables(pid).get("RANK")
            program = pathlib.Path(os.fsdecode(read_proc(pid, "cmdline").split(b"\0")[0]))
            if rank is not None and program.name in PROGRAM_NAMES:
                found[int(rank)] = pid
        return found

    def wait_for_ranks(self, count):
        return wait_for(lambda: (r := self.ranks()) and len(r) == count and r, f"{count} ranks")

    def end(self, timeout=PATIENCE_S):
        """Waits for the end; returns its Result, the seconds counted from this call."""
        begin = time.monotonic()
        out, err = self.process.communicate(timeout=timeout)
        return Result(self.process.returncode, out, err, time.monotonic() - begin)

    def assert_nothing_left(self):
        wait_for(lambda: not self.pids(), "the end of all processes", timeout=2)
        assert shared_files() <= self.shared_before

    def kill_all(self):
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=5)


@contextlib.contextmanager
def job(arguments, extra=None, program=PROGRAM, **popen):
    running = Job(arguments, extra, program, **popen)
    try:
        yield running
    finally:
        running.kill_all()


def events(path):
    """The whole lines of a metrics file, as dicts."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
