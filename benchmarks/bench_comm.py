#!/usr/bin/env python3
"""Gather and reduce of 64 MiB fp32 over 4 process ranks: our shared memory beside torch.distributed's gloo.

Both sets of ranks live at once and take turns, several rounds; who does not run sleeps. A collective's time is that of
its slowest rank; ours includes a closing barrier, gloo's ends when each rank has its result. Reported are medians over
all rounds, the table, and build/results/bench-comm.json. Exit code 1 when a result is wrong.
"""

import argparse
import ctypes
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BYTES = 64 << 20
OURS = ("gather", "reduce")
GLOO = ("all_gather", "reduce_scatter", "all_reduce")


def serve_gloo():
    """One gloo rank: the commands of bench_comm.cpp, on the same values."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    full = BYTES // 4
    part = full // ranks
    index = torch.arange(full)
    values = [0.1 * ((index * 7 + r * 13) % 1009).float() + 0.01 for r in range(ranks)]
    mine, total = values[rank], sum(values[1:], values[0])
    gathered = torch.cat([v[:part] for v in values])
    out, out_part, out_full = torch.empty(full), torch.empty(part), torch.empty(full)

    def all_reduce_setup():  # it works in place: the input is put back outside the measured time
        out_full.copy_(mine)

    calls = {
        "all_gather": (None, lambda: dist.all_gather_into_tensor(out, mine[:part])),
        "reduce_scatter": (None, lambda: dist.reduce_scatter_tensor(out_part, mine)),
        "all_reduce": (all_reduce_setup, lambda: dist.all_reduce(out_full)),
    }

    def measure(name, count):
        prepare, call = calls[name]
        ms = []
        for _ in range(count):
            if prepare:
                prepare()
            dist.barrier()
            start = time.perf_counter()
            call()
            ms.append((time.perf_counter() - start) * 1e3)
        return ms

    def check():  # gloo's order of additions is its own: equal up to rounding
        for name in calls:
            measure(name, 1)
        assert torch.equal(out, gathered), "wrong all_gather"
        torch.testing.assert_close(out_part, total[part * rank : part * (rank + 1)], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out_full, total, rtol=1e-5, atol=1e-5)

    for line in sys.stdin:
        command, *count = line.split()
        if command == "quit":
            break
        ms = []
        if command == "check":
            check()
        else:
            ms = measure(command, int(count[0]))
        print(json.dumps({"ms": ms}), flush=True)
    dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Ranks:
    """One process per rank, obeying one command at a time."""

    def __init__(self, name, command, ranks):
        self.name = name
        port = free_port()
        libc = ctypes.CDLL(None)
        self.processes = []
        for rank in range(ranks):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(port), OMP_NUM_THREADS="1")
            env.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            self.processes.append(subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                preexec_fn=lambda: libc.prctl(1, signal.SIGKILL)))  # PR_SET_PDEATHSIG: none outlives this script

    def do(self, command):
        """The slowest rank's milliseconds of each repetition."""
        for process in self.processes:
            process.stdin.write(command + "\n")
            process.stdin.flush()
        times = []
        for rank, process in enumerate(self.processes):
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"bench_comm: rank {rank} of {self.name} failed during `{command}` (its message is above)")
            times.append(json.loads(line)["ms"])
        return [max(each) for each in zip(*times)]

    def end(self):
        for process in self.processes:
            try:
                process.stdin.write("quit\n")
                process.stdin.close()
            except BrokenPipeError:
                pass
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="release", help="the build whose bench_comm is run")
    parser.add_argument("--program", help="path of bench_comm, instead of the preset's")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeat", type=int, default=5, help="collectives per round")
    parser.add_argument("--gloo-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks < 1 or BYTES % (4 * arguments.ranks):
        parser.error(f"--ranks {arguments.ranks}: 64 MiB must divide evenly, take 1, 2, 4 or 8")
    return arguments


def find_program(arguments):
    if arguments.program:
        return arguments.program
    program = ROOT / "build" / arguments.preset / "benchmarks" / "bench_comm"
    if not program.exists():
        raise SystemExit(f"bench_comm: {program} does not exist: run tools/build.sh {arguments.preset} bench_comm")
    return str(program)


def print_table(ms, result, arguments):
    print(f"{BYTES >> 20} MiB fp32 over {arguments.ranks} processes, medians of "
          f"{arguments.rounds} x {arguments.repeat}, ms (lowest - highest)")
    rows = [("gather", "gather", ("all_gather",), "gather_ratio"),
            ("reduce", "reduce", ("reduce_scatter", "all_reduce"), "reduce_ratio")]
    for title, ours, gloo, key in rows:
        print(f"  {title:<7} ours                {statistics.median(ms[ours]):8.1f}   "
              f"({min(ms[ours]):.1f} - {max(ms[ours]):.1f})")
        for name in gloo:
            print(f"          gloo {name:<14} {statistics.median(ms[name]):8.1f}   "
                  f"({min(ms[name]):.1f} - {max(ms[name]):.1f})")
        print(f"          gloo / ours         {result[key]:8.1f}x")


def main():
    arguments = parse_arguments()
    if arguments.gloo_rank:
        return serve_gloo()
    ours = Ranks("ours", [find_program(arguments)], arguments.ranks)
    gloo = Ranks("gloo", [sys.executable, __file__, "--gloo-rank"], arguments.ranks)
    ms = {name: [] for name in OURS + GLOO}
    try:
        for ranks, names in ((ours, OURS), (gloo, GLOO)):
            ranks.do("check")
            for name in names:
                ranks.do(f"{name} 2")  # warm-up
        for _ in range(arguments.rounds):
            for ranks, names in ((ours, OURS), (gloo, GLOO)):
                for name in names:
                    ms[name] += ranks.do(f"{name} {arguments.repeat}")
    finally:
        ours.end()
        gloo.end()
    median = {name: statistics.median(times) for name, times in ms.items()}
    result = {
        "gather_ratio": round(median["all_gather"] / median["gather"], 2),
        "reduce_ratio": round(min(median["reduce_scatter"], median["all_reduce"]) / median["reduce"], 2),
        "bytes": BYTES,
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "repeat": arguments.repeat,
        "median_ms": {"ours": {name: round(median[name], 3) for name in OURS},
                      "gloo": {name: round(median[name], 3) for name in GLOO}},
        "ms": {"ours": {name: ms[name] for name in OURS}, "gloo": {name: ms[name] for name in GLOO}},
    }
    print_table(ms, result, arguments)
    path = ROOT / "build" / "results" / "bench-comm.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
