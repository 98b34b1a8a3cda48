"""Runs one row of bench_gpu.py: a process per GPU, each of which prints a line of JSON."""

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

ERROR_LINES = 12
LINE_KEYS = {"ms", "host_ms", "allocated_gib", "reserved_gib", "taken_gib", "loss", "parameters", "tokens"}
# NVLink multicast stays off: a program that uses it can put the GPUs of a shared host out of service.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "4",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
# What would change a row from outside.
NOT_INHERITED = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "TORCH_LOGS", "NCCL_DEBUG")


class RowFailed(Exception):
    """Says which rank failed how, with the last lines that it printed."""


def library_path():
    """LD_LIBRARY_PATH with the libraries of this Python's torch in front: our program was built beside another one."""
    spec = importlib.util.find_spec("torch")  # finds it without importing it
    folders = []
    if spec is not None and spec.submodule_search_locations:
        torch = pathlib.Path(next(iter(spec.submodule_search_locations)))
        folders = [torch / "lib", *sorted((torch.parent / "nvidia").glob("*/lib"))]
    inherited = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
    return ":".join([*map(str, folders), *inherited])


def child_environment(more=()):
    """For the processes of a row, without the variables of the rank."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    return {**inherited, **ENVIRONMENT, **dict(more)}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def last_lines(*paths):
    lines = [line for path in paths for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-ERROR_LINES:])


def end_group(process):
    """Ends a process that leads a group of its own, with everything it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_for_all(processes, timeout_s):
    """{rank: exit code} of those seen to fail first; empty when all ended well. Throws RowFailed after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed or all(code == 0 for code in codes):
            return failed
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise RowFailed(f"rank {running} still ran after {timeout_s:g} s")
        time.sleep(0.05)


def failure(rank, code, outputs):
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"rank {rank}: {how}\n{last_lines(*outputs)}"


@contextlib.contextmanager
def started_ranks(command, ranks, environment, outputs):
    """The processes, one per rank, inside of `with`; all of them have ended after it. `outputs`: stdout, stderr."""
    common = environment | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    try:
        for rank, (out, err) in enumerate(outputs):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with out.open("w") as stdout, err.open("w") as stderr:
                processes.append(subprocess.Popen(list(map(str, command)), env=common | own, stdout=stdout,
                                                  stderr=stderr, start_new_session=True))
        yield processes
    finally:
        for process in processes:
            end_group(process)


def run_ranks(command, ranks, environment, log, timeout_s):
    """Runs `command` once per rank, its output into files named after `log`; the ranks' lines, in rank order.

    Throws RowFailed when a rank fails, prints no line, or the row takes longer than `timeout_s`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    outputs = [[log.with_name(f"{log.name}.{rank}.{stream}") for stream in ("out", "err")] for rank in range(ranks)]
    try:
        with started_ranks(command, ranks, environment, outputs) as processes:
            failed = wait_for_all(processes, timeout_s)
            if failed:
                raise RowFailed("\n".join(failure(rank, code, outputs[rank]) for rank, code in failed.items()))
    except OSError as error:
        raise RowFailed(f"{command[0]} does not start: {error.strerror}") from error
    return [parse_line(rank, out, err) for rank, (out, err) in enumerate(outputs)]


def parse_line(rank, out, err):
    """The one line of JSON among what a rank printed."""
    lines = [line for line in out.read_text(errors="replace").splitlines() if line.startswith("{")]
    try:
        line = json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise RowFailed(f"rank {rank} printed no line of JSON\n{last_lines(out, err)}") from error
    if line.get("rank") != rank:
        raise RowFailed(f"rank {rank} says that it is rank {line.get('rank')}")
    return line


def check_line(line, shape, steps):
    """Throws RowFailed unless a rank measured this shape, this often, and computed something."""

    def expect(name, value, expected):
        if value != expected:
            raise RowFailed(f"rank {line['rank']}: {name} = {value}, expected {expected}")

    expect("missing keys", sorted(LINE_KEYS - line.keys()), [])
    expect("parameters", line["parameters"], shape.parameters())
    expect("tokens", line["tokens"], shape.tokens())
    for name in ("ms", "host_ms"):
        expect(f"number of {name}", len(line[name]), steps)
        if not all(value > 0 for value in line[name]):
            raise RowFailed(f"rank {line['rank']}: {name} = {line[name]}, expected times above 0")
    if line["loss"] is None or not math.isfinite(line["loss"]):
        raise RowFailed(f"rank {line['rank']}: loss = {line['loss']}: its step computes nothing that can be compared")


def run_row(row, shape, programs, options, log):
    """One run of a row: its ranks' checked lines. `programs`: program name -> the begin of its command.

    `options` has gpus, steps, warm_seconds and row_timeout_s. Throws RowFailed.
    """
    command = [*programs[row.program], *row.command_arguments(), *shape.arguments(),
               "--warm-seconds", options.warm_seconds, "--steps", options.steps]
    environment = child_environment(row.environment)
    if row.program == "ours":
        environment["LD_LIBRARY_PATH"] = library_path()
    lines = run_ranks(command, options.gpus, environment, log, options.row_timeout_s)
    for line in lines:
        check_line(line, shape, options.steps)
    return lines


def default_programs(root, preset):
    return {
        "ours": [root / "build" / preset / "benchmarks" / "bench_gpu"],
        "peer": [sys.executable, root / "benchmarks" / "peers" / "fsdp2_gpu.py"],
    }
