#!/usr/bin/env python3
"""Our trainer beside PyTorch's FSDP2 over gloo: the same small Llama, the same text, 4 ranks, one thread each.

    .venv/bin/python benchmarks/bench_cpu.py --preset release

The two take turns. Prints a table and writes build/results/bench-cpu.json. Speed is tokens per second over all ranks:
the median over the steps after warm-up of each run, then the median over the runs. Memory is the mean over the ranks.
"""

import argparse
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "results"
WARMUP_STEPS = 4  # not counted: first plans, first touches of memory
TEXT_BYTES = 1 << 22


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="release")
    parser.add_argument("--config", default="configs/bench-cpu.toml")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each of the two")
    parser.add_argument("--steps", type=int, help="steps that are measured; default: train.steps of the configuration")
    return parser.parse_args()


def make_text():
    """A file of words made up from a seed: what both learn. Its content does not matter, its bytes are the same."""
    path = ROOT / "build" / "data" / "bench.txt"
    if not path.exists() or path.stat().st_size != TEXT_BYTES:
        chance = random.Random(1)
        words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(2000)]
        content = " ".join(chance.choices(words, k=TEXT_BYTES // 3))[:TEXT_BYTES]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return path


def run(command, log):
    """Runs a command, its output into the file `log`; ends this program with the log's end when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        result = subprocess.run(list(map(str, command)), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    if result.returncode:
        sys.exit(f"bench-cpu: exit code {result.returncode} of {' '.join(map(str, command))}\n{log.read_text()[-3000:]}")
    return log.read_text()


def run_ours(arguments, steps, text):
    """One run of our trainer: {tokens_per_s, rss_bytes, pss_bytes, loss}."""
    metrics, results = RESULTS / "bench-cpu-ours.jsonl", RESULTS / "bench-cpu-ours.json"
    for path in (metrics, results):
        path.unlink(missing_ok=True)
    program = ROOT / "build" / arguments.preset / "apps" / "fsdpp" / "fsdpp"
    run([program, "train", "--device", "cpu", "--config", arguments.config, "--ranks", arguments.ranks, "--data.text", text,
         "--train.steps", WARMUP_STEPS + steps, "--train.log_every", 1,
         "--output.metrics", metrics, "--output.results", results], RESULTS / "bench-cpu-ours.log")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    measured = [line for line in lines if line["event"] == "step"][WARMUP_STEPS:]
    assert len(measured) == steps, f"{len(measured)} steps in {metrics}, expected {steps}"
    end = json.loads(results.read_text())
    return {
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in measured),
        "rss_bytes": statistics.mean(end["resident_bytes"]),
        "pss_bytes": statistics.mean(end["proportional_bytes"]),
        "loss": measured[-1]["loss"],
    }


def run_fsdp2(arguments, model, train, steps, text):
    """One run of FSDP2: the same keys."""
    command = [sys.executable, ROOT / "benchmarks/peers/fsdp2_llama.py", "--ranks", arguments.ranks,
               "--batch", train["batch"], "--steps", steps, "--warmup", WARMUP_STEPS, "--text", text,
               "--learning-rate", train["learning_rate"], "--clip", train["clip_norm"]]
    for name in ("dim", "layers", "heads", "kv_heads", "ffn", "sequence"):
        command += [f"--{name}", model[name]]
    output = run([*command, *(["--tied"] if model["tied"] else [])], RESULTS / "bench-cpu-fsdp2.log")
    ranks = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert len(ranks) == arguments.ranks, f"{len(ranks)} lines of {arguments.ranks} ranks:\n{output}"
    return {name: statistics.mean(rank[name] for rank in ranks)
            for name in ("tokens_per_s", "rss_bytes", "pss_bytes", "loss")}


def print_table(turns):
    def mib(value):
        return f"{value / 2**20:,.0f}"

    print(f"\n{'':8}{'round':>6}{'tokens/s':>12}{'resident MiB':>15}{'its share MiB':>15}{'loss':>9}")
    for name, runs in turns.items():
        for number, figures in enumerate(runs, 1):
            print(f"{name:8}{number:>6}{figures['tokens_per_s']:>12,.0f}{mib(figures['rss_bytes']):>15}"
                  f"{mib(figures['pss_bytes']):>15}{figures['loss']:>9.3f}")


def main():
    arguments = parse_arguments()
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    config = tomllib.loads(pathlib.Path(arguments.config).read_text())
    model, train = config["model"], config["train"]
    if train.get("microbatches", 1) != 1:
        sys.exit(f"bench-cpu: train.microbatches = {train['microbatches']} in {arguments.config}; FSDP2's script has 1")
    steps = arguments.steps or train["steps"]
    text = make_text()
    turns = {"fsdpp": [], "FSDP2": []}
    for number in range(1, arguments.rounds + 1):
        turns["fsdpp"].append(run_ours(arguments, steps, text))
        turns["FSDP2"].append(run_fsdp2(arguments, model, train, steps, text))
        ours, theirs = turns["fsdpp"][-1]["tokens_per_s"], turns["FSDP2"][-1]["tokens_per_s"]
        print(f"round {number}: fsdpp {ours:,.0f} tokens/s, FSDP2 {theirs:,.0f}", flush=True)

    def middle(name, key):
        return statistics.median(figures[key] for figures in turns[name])

    figures = {
        "speed_ratio": middle("fsdpp", "tokens_per_s") / middle("FSDP2", "tokens_per_s"),
        "memory_ratio": middle("fsdpp", "rss_bytes") / middle("FSDP2", "rss_bytes"),
        "tokens_per_s": middle("fsdpp", "tokens_per_s"),
        "fsdp2_tokens_per_s": middle("FSDP2", "tokens_per_s"),
        "rss_bytes": middle("fsdpp", "rss_bytes"),
        "fsdp2_rss_bytes": middle("FSDP2", "rss_bytes"),
        "pss_bytes": middle("fsdpp", "pss_bytes"),
        "fsdp2_pss_bytes": middle("FSDP2", "pss_bytes"),
        "ranks": arguments.ranks,
    }
    print_table(turns)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "bench-cpu.json").write_text(json.dumps(figures, indent=2) + "\n")
    print("\nbench-cpu: speed {speed_ratio:.2f} times FSDP2's, resident memory per rank {memory_ratio:.2f} times".format(**figures))


if __name__ == "__main__":
    main()
